"""Metrics and events of a run: a row per step, events, and copies for the loggers.

Values stay on the device as tensors for `every` steps; then one collective sums them over the ranks, one transfer
brings them to the host, and rank 0 writes. No step waits for the device in between.
"""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from dtrain import secrets
from dtrain.build import build
from dtrain.checkpoint import Checkpoint
from dtrain.checkpoint.state import TrainState
from dtrain.config import environment
from dtrain.errors import DtrainError, LeaseError, MovedError, StoreError, WordsError, text_of
from dtrain.hook import numbers
from dtrain.lifecycle.signals import StopRequested
from dtrain.lifecycle.slowdown import Slowdown
from dtrain.logger import Logger
from dtrain.logger.facts import facts
from dtrain.loop.spent import Spent
from dtrain.loop.spike import Spike
from dtrain.loop.step import StepLoss
from dtrain.mesh import Mesh
from dtrain.objective import COLUMNS, Objective
from dtrain.objective.figures import figures
from dtrain.planned import Plan
from dtrain.predict.time import at_peak
from dtrain.result import Result, peak_bytes, versions
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.storage import attempts, store
from dtrain.storage.jsonl import Journal

OVERFLOWS = 10
"""Steps at the beginning of a run under fp16 that are reported if all of them are skipped."""
Pending = tuple[int, int, StepLoss, Tensor, Mapping[str, float], float]
"""(step, samples seen, loss, norm, columns, seconds) of a step whose row is not written yet."""
IDLE_SECONDS = 1.0
"""How long a run that ends by an error waits for its device."""


class Log:
    """A context on all ranks; rank 0 writes metrics.jsonl, events.jsonl and result.json."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._mesh, self._every, self._batch = mesh, plan.log_every, plan.batch.size
        self.spent = Spent()
        self._pending: list[Pending] = []
        self._reached: int | None = None
        self._passed_over: Collection[str] = ()
        self._rows = (
            Journal(store.join(plan.out, "metrics.jsonl"), by_step=True, check=self._check) if mesh.rank == 0 else None
        )
        self._events = Journal(store.join(plan.out, "events.jsonl"), check=self._check) if mesh.rank == 0 else None
        self._journals = [journal for journal in (self._rows, self._events) if journal is not None]
        self._loggers: dict[str, Logger] = {}
        self._plan, self._is_targetless = plan, False
        self._ended: Mapping[str, Any] = {}
        self.start()
        self.last: dict[str, Any] = {}
        """The newest row; on rank 0."""

    def __enter__(self) -> "Log":
        if self._rows is None or self._events is None:
            return self
        told = facts(self._plan, rows=str(self._rows.path), events=str(self._events.path))
        for name, part in self._plan.loggers.items():
            try:
                logger = build(part, Logger, out=self._plan.out, steps=self._plan.steps)
                logger.begin(told)
                self._loggers[name] = logger
            except DtrainError:
                raise
            except Exception as error:  # as below
                self._left_out(name, error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._rows is None or self._events is None:
            return
        if error is not None and not isinstance(error, (LeaseError, MovedError)):
            with suppress(Exception):  # it must not hide the error
                self._rescue()
        if error is not None and not isinstance(error, KeyboardInterrupt):  # a request to stop is no failure
            with suppress(LeaseError, MovedError):
                self.event("failed", error=f"{type(error).__name__}: {text_of(error)}")
        self._tell("end", self._ended or _without_result(error, self._reached))
        with ExitStack() as stack:
            if error is not None:
                stack.enter_context(suppress(StoreError))  # it must not hide the error
            stack.callback(self._events.close)
            stack.callback(self._rows.close)

    def event(self, name: str, /, **facts: Any) -> None:
        """Write a line of events.jsonl."""
        if self._events is not None:
            self._events.append({"time": time.time(), "event": name, **facts})

    def note(self, text: str, name: str = "note") -> None:
        """Tell the loggers a text: of the run, or of the hook `name`."""
        self._tell("text", self._reached or 0, name, secrets.masked(text))

    def warn(self, text: str) -> None:
        """Note what may cost a user rows or checkpoints: on standard error if there is no logger."""
        self.note(text)
        if self._mesh.rank == 0 and not self._loggers:
            screen.complain(screen.on_one_line(secrets.masked(text)), begin="note: ")

    def caveat(self, text: str) -> None:
        """Report a caveat about this run: an event and a note."""
        self.event("caveat", text=text)
        self.note(text)

    def spike(self, spike: Spike, answer: str, samples: Sequence[int]) -> None:
        """Report a spike, the action (`on_spike`), and the samples of its step."""
        self.event("spike", answer=answer, **vars(spike), samples=samples)
        self.note(f"step {spike.step}: {spike.why}: {answer}")

    def started(self, state: TrainState, checkpoint: Checkpoint, *, parameters: int, caveats: Iterable[str]) -> None:
        """Resume after the steps of an earlier start, or none; later rows are written again. Raises MovedError if the
        storage is not the one that was restored from.
        """
        step = self._reached = state.step
        self._passed_over = checkpoint.passed_over
        missing = step - state.first - self.drop_rows_after(step) if self._rows is not None else 0
        if missing:
            text = f"metrics.jsonl lacks the rows of {missing} of the {step} steps that are done"
            self.event("caveat", text=text)
            self.warn(text)
        if environment.RESTART_REASON in os.environ:
            self.event("restarted", reason=os.environ[environment.RESTART_REASON])
        for sentence in checkpoint.damaged:
            self.event("damaged", error=sentence)
        facts = {"ranks": self._mesh.world, "parameters": parameters, "plan": self._plan.digest}
        self.event("started", step=step, **facts, versions=versions())
        self.note(
            f"{short(parameters)} parameters on {self._mesh.world} rank(s)"
            + (f", going on after step {step}" if step else "")
        )
        for sentence in (*caveats, *state.notes):
            self.caveat(sentence)

    def begin(self, objective: Objective, waited: Callable[[], float]) -> None:
        """The loop begins. `waited`: the total seconds that steps waited for samples."""
        self._objective, self._slowdown = objective, Slowdown(waited)
        self.spent.begin(waited)
        self._at_peak = at_peak(self._plan) if self._rows is not None else None
        self.start()

    def start(self) -> None:
        """Steps are timed from here on: building, logging, evaluating and saving do not count."""
        self._clock = self._flushed = time.perf_counter()

    def record(
        self, step: int, seen: int, loss: StepLoss, norm: Tensor, columns: Mapping[str, float], *, now: bool = False
    ) -> None:
        """Record one step, after which the run has seen `seen` samples; `norm`: of the global gradient; `columns`:
        learning rates, and the precision's.

        Costs no device sync unless its row is due, or needed `now`.
        """
        self._reached, clock = max(step, self._reached or 0), time.perf_counter()
        self._pending.append((step, seen, loss, norm, columns, clock - self._clock))
        self._clock = clock
        if now or step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        flat = [value.float().reshape(-1) for _, _, loss, *_ in self._pending for value in loss.sums.values()]
        self._write(self._mesh.sum_stages(self._mesh.sum(torch.cat(flat))))

    def _rescue(self) -> None:
        """Write the rows of finished steps when an error ends the run. No other rank is asked, because it may be gone:
        the rows of several ranks lack the loss and what else is summed over them.
        """
        if self._mesh.world == 1:
            self.flush()
        elif self._pending and _is_idle(self._mesh.device):
            self._write(None)

    def _write(self, sums: Tensor | None) -> None:
        """Write the pending rows. `sums`: theirs, over all ranks, one after the other; None if unknown."""
        pending, self._pending = self._pending, []
        if self._rows is None:
            return
        shapes = {name: value.shape for name, value in pending[0][2].sums.items()}
        # under strategy.offload=cpu the norms are on the CPU
        norms = torch.stack([norm for *_, norm, _, _ in pending]).tolist()
        totals = [] if sums is None else sums.view(len(pending), -1).tolist()
        if self._mesh.device.type != "cpu":  # steps are only queued, so the time of all of them is divided
            each = (time.perf_counter() - self._flushed) / len(pending)
            pending = [(*entry[:-1], each) for entry in pending]
        rows, peak = [], peak_bytes(self._mesh.device.type)
        for index, (step, seen, loss, _, columns, seconds) in enumerate(pending):
            row: dict[str, Any] = {"step": step, "seen": seen}
            if totals and loss.count:
                row |= figures(self._objective, shapes, totals[index], loss.count)
            row |= columns
            row |= {"norm": norms[index], "step_seconds": seconds}
            row |= {"samples_per_second": self._batch / seconds, "peak_bytes": peak}
            if self._at_peak:
                row["mfu"] = self._at_peak / seconds
            if self._objective.unit == "tokens":
                row |= {"tokens_per_second": loss.count / seconds}
            rows.append(row)
        rows[-1] |= self.spent.row()
        with self.spent.of("other"):
            self._report(rows, pending)

    def _report(self, rows: list[dict[str, Any]], pending: Sequence[Pending]) -> None:
        """Write rows, tell the loggers of them, and the user of what is odd about them."""
        assert self._rows is not None
        self._rows.append(*rows)
        empty = next((step for step, _, loss, *_ in pending if not loss.count), None)
        if empty and not self._is_targetless:
            self._is_targetless = True
            self.caveat(
                f"step {empty} has no loss and changes no weight, like all steps without a target that counts: its "
                "targets are -100 everywhere, or its rows are single tokens, which have no next one"
            )
        if any(row["step"] == row.get("skipped_steps") == OVERFLOWS for row in rows):
            self.caveat(
                f"precision=fp16: the gradients of the first {OVERFLOWS} steps all overflowed, so no weight has "
                "changed yet. Type a smaller precision.scale, or precision=bf16."
            )
        self._warn()
        for sentence in self._slowdown.look((row["step"], row["step_seconds"]) for row in rows):
            self.caveat(sentence)
        self.last = rows[-1]
        elapsed = sum(row["step_seconds"] for row in rows) / len(rows)
        scalars = {**self.last, "step_seconds": elapsed, "samples_per_second": self._batch / elapsed}
        if self._at_peak:
            scalars["mfu"] = self._at_peak / elapsed
        if "tokens_per_second" in scalars:
            scalars["tokens_per_second"] = pending[-1][2].count / elapsed
        self._tell("scalars", scalars.pop("step"), scalars)
        self.start()

    def saves(self, ended: Iterable[Any]) -> None:
        """Report the outcome of saves, as events: committed or save_failed. A failure is printed too; training goes
        on.
        """
        for one in ended:
            facts = {name: value for name, value in vars(one).items() if value is not None and name != "kind"}
            self.event("save_failed" if one.kind == "failed" else one.kind, **facts)
            if one.kind == "failed":
                self.warn(f"the save of step {one.step} failed, training goes on: {one.error}")
        self._warn()

    def durable(self) -> None:
        """Make rows and events durable. Called in the background, before a commit, which goes on if a journal cannot be
        written: its rows stay in memory until the next commit. Raises LeaseError and MovedError.
        """
        for journal in self._journals:
            try:
                journal.durable()
            except StoreError as error:  # others were noted by the journal
                if isinstance(error, (LeaseError, MovedError)):
                    raise

    def drop_rows_after(self, step: int) -> int:
        """Drop rows after `step`, whose steps are done again. Returns the number of rows kept, on rank 0."""
        self._pending = [entry for entry in self._pending if entry[0] <= step]
        kept: list[dict[str, Any]] = []
        if self._rows is not None:
            kept = self._rows.keep(lambda row: type(row.get("step")) is int and row["step"] <= step)
        self.last = kept[-1] if kept and kept[-1]["step"] == step else {}  # a torn journal lacks its last rows
        self._tell("back", step)
        self.start()
        return len(kept)

    def evaluated(
        self, step: int, scalars: Mapping[str, float], best: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Report held-out metrics: an event, and a row for the loggers. `best`: metric -> its best value and step."""
        self.event("evaluated", step=step, **scalars, **({"best": best} if best else {}))
        self._tell("scalars", step, scalars)
        self.start()

    def figures_at(self, step: int) -> dict[str, float]:
        """The metrics of the evaluations after `step` that are on record; the same on all ranks."""
        rows = self._events.rows() if self._events is not None else []
        evaluated = [row for row in rows if row.get("event") == "evaluated" and row.get("step") == step]
        figures = {name: value for row in evaluated for name, value in row.items() if name.startswith("eval_")}
        known: dict[str, float] = self._mesh.gather(figures)[0]
        return {name: nan_if_none(value) for name, value in known.items()}

    def evaluations(self, metric: str) -> dict[int, float]:
        """Step -> the metric of each evaluation on record, nan for none; on rank 0."""
        rows = self._events.rows() if self._events is not None else []
        evaluated = (row for row in rows if row.get("event") == "evaluated" and type(row.get("step")) is int)
        return {row["step"]: nan_if_none(row[metric]) for row in evaluated if metric in row}

    def saw(self, step: int, hook: str, values: Mapping[str, Any]) -> None:
        """Report a hook's return value: an event, and its `text` as a note. Raises WordsError if a number has the name
        of another column.
        """
        taken = [name for name in numbers(values) if name in COLUMNS | self.last.keys() or name.startswith("lr_")]
        if taken:
            raise WordsError(
                f"hook {hook} returned {taken[0]}, which is a column of metrics.jsonl already. Call it something else, "
                f"such as {hook.lower()}_{taken[0]}."
            )
        self.event(hook.lower(), step=step, **values)
        if "text" in values:
            self.note(values["text"], hook)
        self.start()

    def widen(self, columns: Mapping[str, float]) -> None:
        """Add the numbers of a hook to the newest row."""
        if self._rows is not None and columns:
            self._rows.widen(columns)
            self.last |= columns

    def finish(self, result: Result) -> None:
        """Write the last event, and then result.json: where it is, rows and events are complete, whatever is killed."""
        reason = {"reason": result.reason} if result.reason else {}
        self.event(result.status, step=result.step, loss=result.loss, wall_seconds=result.wall_seconds, **reason)
        if self._mesh.rank == 0:
            self.durable()
            self._ended = result.to_dict()
            text = json.dumps(clean(result.to_dict()), indent=1)
            store.write(store.join(self._plan.out, "result.json"), text.encode())

    def _check(self) -> None:
        """Raises MovedError if a checkpoint under `out` has more steps than this start of the run; StoreError."""
        if self._reached is None:
            return
        committed = (one for one in attempts.listed(self._plan.out) if one.is_committed)
        steps = [one.step for one in committed if attempts.place(one.url) not in self._passed_over]
        if max(steps, default=0) > self._reached:
            raise MovedError(
                f"other storage has come to the place of out={self._plan.out}: a checkpoint of step {max(steps)} is "
                f"there, and this start of the run, which did not see it, is at step {self._reached}. It ends; the "
                f"same words go on from step {max(steps)}"
            )

    def _warn(self) -> None:
        """Note when journals cannot be written, and when they can again."""
        for journal in self._journals:
            warnings, journal.warnings = journal.warnings, []
            for text in warnings:
                self.event("caveat", text=text)
                self.warn(text)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call the loggers. One that fails is named once and left out; training goes on."""
        for name, logger in [*self._loggers.items()]:
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # whatever a tracker raises must not end a run
                del self._loggers[name]
                self._left_out(name, error)

    def _left_out(self, name: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {text_of(error)}"
        self.event("logger_failed", logger=name, error=text)
        screen.say(screen.on_one_line(secrets.masked(f"dtrain: logger {name} failed and is left out: {text}")))


def _is_idle(device: torch.device) -> bool:
    """Whether a device finishes its work soon; it may wait for a rank that is gone."""
    if device.type == "cpu":
        return True
    event, deadline = torch.Event(device), time.monotonic() + IDLE_SECONDS
    event.record()
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.01)
    return event.query()


def nan_if_none(value: Any) -> float:
    """A number of a row, in which null stands for nan and infinity."""
    return float(value) if isinstance(value, int | float) else math.nan


def _without_result(error: BaseException | None, step: int | None) -> dict[str, Any]:
    """The end of a run that has no result, as loggers are told of it."""
    told: dict[str, Any] = {"status": "stopped" if isinstance(error, StopRequested) else "failed", "step": step or 0}
    return told | ({"error": f"{type(error).__name__}: {text_of(error)}"} if error is not None else {})


def short(number: int) -> str:
    """1.62M, or all digits of a small number."""
    return f"{number / 1e6:.2f}M" if number >= 1e5 else f"{number:,}"
