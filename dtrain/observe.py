"""Who looks on while a run trains: the held-out loss and the hooks, each after its own steps. Nothing here changes a number."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from dtrain.build import build
from dtrain.data import Source
from dtrain.ema import EMA
from dtrain.heldout import measure
from dtrain.hook import Hook, StepInfo, falls
from dtrain.log import Log
from dtrain.looking import watch
from dtrain.mesh import Mesh
from dtrain.objective import Objective
from dtrain.parallel.context import Context
from dtrain.plan import Plan
from dtrain.precision import Precision
from dtrain.step import StepLoss


class Observers:
    """All ranks call them alike. `scored` hears of every evaluation; `enough` breaks one off, which then has no figures."""

    def __init__(
        self,
        plan: Plan,
        wrapped: nn.Module,
        source: Source,
        objective: Objective,
        mesh: Mesh,
        *,
        precision: Precision,
        context: Context | None,
        ema: EMA | None,
        log: Log,
        scored: Callable[[int, dict[str, float]], None],
        enough: Callable[[], bool],
    ) -> None:
        self._plan, self._source, self._log, self._scored = plan, source, log, scored
        self._heldout = source.holdout()
        self._measure = partial(
            measure, wrapped, objective=objective, mesh=mesh,
            precision=precision, samples=plan.evaluate_samples, microbatch=plan.batch.microbatch, context=context, ema=ema, enough=enough,
        )  # fmt: skip
        self._forward = watch(wrapped, mesh, precision, step=plan.tokens_step)
        self._hooks: list[Hook] = [build(hook) for hook in plan.hooks.values()]
        self.metrics: dict[str, Any] = {}
        """The newest held-out figures."""
        if self._heldout is None:
            log.caveat("nothing is held out: there will be no evaluation")

    def look(self, step: int, seen: int, loss: StepLoss, norm: Tensor, lr: float) -> None:
        """After a step."""
        plan, last = self._plan, step == self._plan.steps
        if falls(plan.evaluate_every, step, last=last):
            self.evaluate(step)
        for hook in (hook for hook in self._hooks if falls(hook.every, step, last=last)):
            self._log.flush()
            info = StepInfo(step, plan.steps, seen, plan.seed, loss.sums["loss"], norm, lr, self._source, self._forward)
            self._log.saw(step, type(hook).__name__.lower(), hook(info) or {})

    def evaluate(self, step: int) -> None:
        """The held-out loss now, where something is held out."""
        if self._heldout is None:
            return
        self._log.flush()
        found = self._measure(source=self._heldout)
        if found:
            self.metrics = found
            self._log.evaluated(step, found)
            self._scored(step, found)
