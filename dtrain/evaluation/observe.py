"""Observers of a run: the held-out loss and the hooks, each with its own period. They do not affect training."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from dtrain.build import GIVEN, build
from dtrain.checkpoint import Checkpoint
from dtrain.checkpoint.state import TrainState
from dtrain.config.period import EPOCH, is_due
from dtrain.errors import WordsError, nearest
from dtrain.evaluation import whole
from dtrain.evaluation.heldout import check_targets, measure
from dtrain.evaluation.metrics import metrics_of
from dtrain.evaluation.patience import Patience
from dtrain.evaluation.session import watch
from dtrain.hook import Hook, StepInfo, epochs, figure, gives_none, numbers, plain
from dtrain.lifecycle.watchdog import Watchdog
from dtrain.loop.assemble import Parts
from dtrain.loop.metrics import Log
from dtrain.loop.step import StepLoss
from dtrain.loop.unsaved import Moved, Unsaved
from dtrain.model import caveats
from dtrain.model.seeds import kept
from dtrain.objective.state import Changes
from dtrain.strategy.writes import is_power, is_watched

MOST = 3
"""Buffers that one sentence names."""


class Observers:
    """Evaluation and hooks of a run; all ranks call the methods in the same order.

    `checkpoint` gets the metrics of every evaluation, and saves the best. If `enough` returns True, a running
    evaluation is cut short and has no metrics.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        state: TrainState,
        log: Log,
        checkpoint: Checkpoint,
        enough: Callable[[], bool],
        watchdog: Watchdog,
    ) -> None:
        self._plan, self._source, self._log = parts.plan, parts.source, log
        self._checkpoint, self._asked, self._watchdog = checkpoint, enough, watchdog
        plan, mesh, forward = parts.plan, parts.mesh, parts.forward
        self._measured_on = parts.measured
        check_targets(parts.measured, parts.objective, plan.evaluate_samples)
        self._one = next((f"eval_{name}_loss" for name in parts.measured if name), "eval_loss")
        """A figure that every evaluation has."""
        self._measure = partial(
            measure, forward, objective=parts.objective, mesh=mesh, precision=parts.precision,
            samples=plan.evaluate_samples, microbatch=plan.batch.microbatch, context=parts.context,
            reference=parts.reference, ema=state.ema,
            enough=self._enough, tell=self._tell, metrics=metrics_of(parts),
        )  # fmt: skip
        self._forward = watch(forward, mesh, parts.precision, step=plan.tokens_step)
        made = [(name, part["_target_"] == GIVEN, build(part, Hook)) for name, part in plan.hooks.items()]
        self._hooks: list[tuple[str, Hook]] = [
            (name if given else type(hook).__name__, hook) for name, given, hook in made
        ]
        self._complete = all(gives_none(hook) for _, hook in self._hooks)
        self._whole_model, self._whole_weights = partial(whole.model, parts), partial(whole.weights, parts)
        self._unsaved, self._of_objective = Unsaved(parts.model), Changes(parts.objective)
        self._moved = Moved(parts.model)
        self._state, self._model, self._check, self._steps = state, parts.model, state.check, 0
        self._device = mesh.device
        self._warned = set(caveats(parts.model))
        self._measured: Collection[str] = ()
        self.metrics: dict[str, Any] = {}
        """The newest metrics of the evaluation and of the hooks, on rank 0."""
        self.measured = dict[str, int]()
        """The step after which each was measured."""
        self.over = ""
        """Why the run ends early, once `stop.metric` has not improved for so long."""
        seen = log.evaluations(plan.stop["metric"]) if plan.stop else {}
        self._patience = Patience(plan.stop, every=plan.evaluate_every, mesh=mesh, seen=seen)
        if not self._measured_on:
            log.caveat("nothing is held out: there will be no evaluation")

    @property
    def stop(self) -> dict[str, Any]:
        """The plan's `stop`, if it has ended the run."""
        return dict(self._plan.stop) if self.over else {}

    @property
    def best(self) -> dict[str, Mapping[str, float]]:
        """Metric -> `value` and `step` of its best evaluation, for `stop.metric` and `checkpoint.best`: of the latter
        the best that is saved; on rank 0.
        """
        return {**self._patience.best(self._state.step), **self._checkpoint.best}

    def due(self, step: int, seen: int) -> bool:
        """Whether a save, the evaluation or a hook is due after `step` and `seen` samples, so that its numbers are
        needed at once.
        """
        last = step == self._plan.last_step or self._checkpoint.due(step)
        due = is_due(self._plan.evaluate_every, step, last=last)
        return due or any(last or self._is_due(hook, step, seen) for _, hook in self._hooks)

    def _is_due(self, hook: Hook, step: int, seen: int) -> bool:
        """Whether a hook is called after `step`, which may not be the last."""
        if hook.every != EPOCH:
            return is_due(hook.every, step)
        return epochs(self._source, seen) != epochs(self._source, seen - self._plan.batch.size)

    def look(self, step: int, seen: int, loss: StepLoss, norm: Tensor, lr: float) -> None:
        """Call after every step: warn of irreproducible state, and run the evaluation and the hooks that are due."""
        self._report_step(loss)
        plan, last = self._plan, step == self._plan.last_step
        if is_due(plan.evaluate_every, step, last=last):
            self.evaluate(step)
        for name, hook in self._hooks:
            if not last and not self._is_due(hook, step, seen):
                continue
            self._log.flush()
            info = StepInfo(
                step=step,
                steps=plan.steps,
                seen=seen,
                seed=plan.seed,
                loss=loss.sums["loss"],
                norm=norm,
                lr=lr,
                source=self._source,
                forward=self._forward,
                model=self._whole_model,
                weights=self._whole_weights,
                epoch=epochs(self._source, seen),
            )
            with kept(), self._log.spent.of("other"):
                returned = plain(hook(info), name)
            self._log.saw(step, name, returned)
            free = {each: value for each, value in numbers(returned).items() if self._is_free(figure(each))}
            self._log.widen(free)
            self._report(step, {figure(each): value for each, value in free.items()})

    def catch_up(self, step: int) -> None:
        """Evaluate after `step`, to which the run was restored, if that was due and a stop or a kill came first. If the
        kill came between the evaluation and the record of the best checkpoint, that is made now.
        """
        known = self._log.figures_at(step)
        is_missing = is_due(self._plan.evaluate_every, step) and self._one not in known
        if self._measured_on and 0 < step < self._plan.last_step and is_missing:
            self.evaluate(step)
        elif known and step:
            self._checkpoint.scored(self._state, known, complete=False)
        self.over = self.over or self._patience.over(step)

    def evaluate(self, step: int) -> None:
        """Evaluate now, if there is held-out data."""
        if not self._measured_on:
            return
        self._check()
        self._log.flush()
        with self._log.spent.of("evaluate"):
            metrics = self._measure(sources=self._measured_on)
        self._check()  # the model's own `train` was called
        self._watchdog.pause_hang_detection()
        if metrics:
            if self._plan.stop and self._plan.stop["metric"] not in metrics:
                metric = self._plan.stop["metric"]
                raise WordsError(f"stop.metric={metric}: the evaluation has no such figure.{nearest(metric, metrics)}")
            self._measured = metrics.keys()
            self._report(step, metrics)
            self.over = self._patience.over(step)

    def _report_step(self, loss: StepLoss) -> None:
        """Tell of what a step did, and after steps 1, 2, 4, 8 and so on of what the model is now. State is watched over
        a few steps, at the beginning and after steps 4, 8, 16 and so on.
        """
        for caveat in loss.caveats:
            self._tell(caveat)
        self._report_draws(loss.drawn)
        self._report_moved(self._moved.names())
        for name in self._unsaved.changed():
            self._tell(
                f"{name} is a buffer with persistent=False that training changes: each rank has its own, and a "
                "restart begins with its initial value. Register it with persistent=True."
            )
        for name in self._unsaved.counted():
            self._tell(
                f"{name} is a number that every step changes, but it is not in the checkpoint: a restart begins with "
                "its initial value. Make it a buffer."
            )
        for name in self._of_objective.names():
            self._tell(
                f"{name} of the objective changes with every step, but each rank has its own and no checkpoint holds "
                "it: a restart begins with its initial value. Keep it in a buffer of the model."
            )
        self._steps += 1
        if is_power(self._steps):
            self._check()
            for caveat in caveats(self._model):
                self._tell(caveat)
        if self._steps > 2 and is_watched(self._steps, self._device):
            for each in (self._moved, self._unsaved, self._of_objective):
                each.again()

    def _report_draws(self, generators: Sequence[str]) -> None:
        """Warn if the first forward drew random numbers and no module of the model explains it."""
        if generators and not any("dropout" in sentence for sentence in caveats(self._model)):
            self._tell(
                f"the forward draws random numbers (of {', '.join(generators)}), such as functional dropout: losses "
                "differ on another mesh."
            )

    def _report_moved(self, names: Sequence[str]) -> None:
        if names:
            listed = f"{', '.join(names[:MOST])}{f' and {len(names) - MOST} more' if len(names) > MOST else ''}"
            self._tell(
                f"{listed}: training changes these buffers. A forward sees one microbatch of one rank, and the ranks "
                "average them after each step: if they hold anything of the samples, losses depend on the mesh."
            )

    def _report(self, step: int, figures: Mapping[str, float]) -> None:
        with self._log.spent.of("checkpoint_stall"):
            self._checkpoint.scored(self._state, figures, complete=self._complete and bool(figures))
        if figures:
            self.metrics |= figures
            self.measured |= dict.fromkeys(figures, step)
            self._patience.see(step, figures)
            self._log.evaluated(step, figures, self.best)

    def _is_free(self, name: str) -> bool:
        """Whether a hook may use this name for a metric; warns if the evaluation has a metric of that name."""
        taken = name == "eval_loss" or name in self._measured
        if taken:
            self._tell(
                f"a hook returns {name}, which is a metric of the evaluation: the value of the hook is ignored. Give "
                "it another name."
            )
        return not taken

    def _enough(self) -> bool:
        self._watchdog.resume_hang_detection()
        return self._asked()

    def _tell(self, text: str) -> None:
        """Warn, once per message."""
        if text not in self._warned:
            self._warned.add(text)
            self._log.caveat(text)
