"""Sharded checkpoints: every rank writes its own safetensors shards and JSON, no pickle, committed by one file.

    <out>/checkpoints/step-00000100/<attempt>/rank-00000-0000.safetensors ... COMMIT.json

The loop waits only for a copy of the state (snapshot.py), which is written and committed in the background (writer.py).
Old checkpoints are removed (retention.py); any mesh loads a checkpoint of any other (restore.py, load.py). Between
checkpoints, copies may be kept in the memory of the nodes (memory.py). No directory is written twice, and without a
valid COMMIT.json it is not a checkpoint.
"""

import datetime
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import others, shards
from dtrain.checkpoint.adopt import adopt
from dtrain.checkpoint.memory import Copy, Memory
from dtrain.checkpoint.restore import Commit, Restore
from dtrain.checkpoint.retention import Best, Policy, Retention
from dtrain.checkpoint.scores import Scores
from dtrain.checkpoint.snapshot import Snapshot
from dtrain.checkpoint.state import TrainState
from dtrain.checkpoint.writer import FATAL, CheckpointWriter, SaveResult, describe
from dtrain.config.environment import LEASE, MEMORY
from dtrain.config.period import Period
from dtrain.errors import DtrainError, PreflightError, StoreError, WordsError, nearest
from dtrain.files import sampled
from dtrain.mesh import Mesh
from dtrain.model.adapted import begin
from dtrain.secrets import screen
from dtrain.storage import attempts, mapped, store
from dtrain.weights import place

END_SECONDS = 30.0, 1.0
"""How long a failed run waits for a running save: with one rank, and with several, one of which may be dead."""
TIDY_SECONDS = 10.0
"""How long a finished run waits for the removal of old checkpoints; the next run under `out` continues it."""


class Sharded:
    """A context. `resume`: auto, never or must; `mode`: background or blocking; `every`, `keep`, `keep_every`, `best`,
    `best_is` and `ephemeral`: as in retention.py; `memory`: steps between copies in the memory of the nodes (0: none).
    `before_commit` runs on rank 0, in a thread, after all files and before the commit.
    """

    def __init__(
        self,
        *,
        out: str,
        mesh: Mesh,
        resume: str,
        every: Period,
        keep: int | None,
        keep_every: int | None = None,
        best: str | None = None,
        best_is: Best = "lowest",
        ephemeral: int = 0,
        memory: int = 0,
        mode: Literal["background", "blocking"] = "background",
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        if mode not in ("background", "blocking"):
            raise ValueError(f"mode is background or blocking, not {mode}")
        self._out, self._mesh, self._resume, self._mode, self._before = out, mesh, resume, mode, before_commit
        self._promised = False
        self._policy = Policy(every, keep, keep_every=keep_every, best=best, ephemeral=ephemeral, best_is=best_is)
        self.passed_over = set[str]()
        """The places of the checkpoints that this start or an earlier one skipped."""
        self._retention = Retention(out, self._policy, self.passed_over)
        self._scores = Scores(self._retention)
        self._snapshot: Snapshot | None = None
        self._every_copy, self._restored = memory, False
        self._memory: Memory | None = None
        self._writer: CheckpointWriter | None = None
        self._previous: CheckpointWriter | None = None
        self._step, self._stall = -1, 0.0
        self._run, self._count = "", 0
        self._last: tuple[int, str] | None = None
        self._landed: list[SaveResult] = []
        self._untidy: list[str] = []
        self._error = ""
        self.damaged: list[str] = []
        """One sentence for every checkpoint that `restore` skipped as damaged."""

    def __enter__(self) -> "Sharded":
        mapped.forget()
        sampled.forget()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error, give a running save a little time to finish."""
        if self._writer and kind:
            if issubclass(kind, Exception):  # a user who interrupts does not want to wait
                self._writer.join(END_SECONDS[self._mesh.world > 1])
            self._writer.stop()

    def due(self, step: int) -> bool:
        return self._policy.due(step) or self._copies(step)

    def save(self, state: TrainState, *, last: bool = True) -> str:
        """Copy `state` and return the URL of its checkpoint; all ranks call it, and wait for a save that is still being
        written.

        Returns an empty string if only a copy in memory is due and this is not the `last` save.
        """
        begin = time.monotonic()
        if self._copies(state.step):
            self._copy(state)
        if not last and not self._policy.due(state.step):
            return ""
        return self._save(state, begin)

    def _save(self, state: TrainState, begin: float) -> str:
        """Save, unless this step is saved. `begin`: since when the loop has waited."""
        self._settle()
        if self._last and self._last[0] == state.step:
            return self._last[1]
        tensors, facts = state.tensors(), json.loads(json.dumps(state.facts()))
        if self._snapshot is None:
            self._snapshot = Snapshot(self._mesh.rank, self._mesh.replica_coords)
        files = self._snapshot.take(tensors)
        url = store.join(attempts.folder(self._out, state.step), self._attempt())
        self._retention.begin(url, state.step)
        name, names = url.rsplit("/", 1)[-1], {piece.name for file in files for piece in file.pieces}
        ranks = {"world": self._mesh.world, "mesh": vars(self._mesh.shape), "lease": int(os.environ.get(LEASE, 0))}
        passed_over = sorted(self.passed_over)
        self._writer = CheckpointWriter(
            self._mesh,
            out=self._out,
            url=url,
            files=files,
            arrived=partial(_arrive, self._snapshot),
            commit={"step": state.step, "attempt": name, "passed_over": passed_over, "facts": facts, **ranks},
            manifest={name: facts[name] for name in ("optim", "resting")}
            | {"tensors": shards.described(tensors, names)},
            before_commit=partial(self._prepare, state.step, url),
            after_commit=self._tidy,
            before=self._previous,
        )
        self._step, self._stall = state.step, time.monotonic() - begin
        if self._mode == "blocking":
            self._writer.join()
            self._stall = time.monotonic() - begin
        return url

    def finished_saves(self) -> list[SaveResult]:
        """Results of saves since the last call, without waiting. Raises LeaseError if another run has taken over, and
        ChangedError if a file of samples is another one.
        """
        if self._writer and self._writer.done:
            self._settle()
        landed, self._landed = self._landed, []
        return landed

    def wait(self) -> None:
        """Wait for the running save. Raises StoreError if the newest save was not committed."""
        self._settle()
        self._scores.wait()
        self._await_removals()
        if self._error:
            raise StoreError(self._error)

    def scored(self, state: TrainState, metrics: Mapping[str, float], *, complete: bool = True) -> None:
        """Record metrics of `state`, and save it in the background if it is the best by `best`; all ranks call it, and
        rank 0 decides. Raises WordsError if `best` is missing in `complete` metrics.
        """
        if not self._policy.best:
            return
        if complete and self._policy.best not in metrics:
            raise WordsError(
                f"checkpoint.best={self._policy.best}: the evaluation has no such "
                f"figure.{nearest(self._policy.best, metrics)}"
            )
        begin, step = time.monotonic(), state.step
        is_saved = (self._writer is not None and self._step == step) or (self._last or (-1, ""))[0] == step
        if self._mesh.gather(self._mesh.rank == 0 and self._scores.add(step, metrics, is_saved=is_saved))[0]:
            self._save(state, begin)
        elif self._mesh.rank == 0 and is_saved:
            self._scores.write_later(self._writer)

    @property
    def best(self) -> dict[str, dict[str, float]]:
        """Metric -> `value` and `step` of the best checkpoint, committed or being saved, on rank 0."""
        return self._scores.best

    def has_checkpoint(self) -> bool:
        """Whether there is a committed checkpoint; without one, a copy in memory may still be loaded."""
        self._promised = self._mesh.on_rank_0(
            "look for checkpoints", lambda: any(attempt.is_committed for attempt in attempts.listed(self._out))
        )
        return bool(self._promised)

    def restore(self, state: TrainState) -> dict[str, Any] | None:
        """Load the newest checkpoint whose bytes are intact on every rank into `state`; all ranks call it. Returns its
        commit, or None.

        Raises StoreError if it is of another model or all are damaged, WordsError if it is of other data,
        PreflightError if `resume` requires or forbids one. One that does not fit is passed over if an older one of the
        same process does. A later call rewinds the run to the newest commit, whatever `resume` says.
        """
        misfit: tuple[str, DtrainError] | None = None
        copy, resume, self._resume = self._newest_copy(), self._resume, "auto"
        restore = Restore(self._mesh)
        self.damaged = restore.damaged
        for url, commit in restore.candidates(lambda: commits.candidates(self._out)):
            self.passed_over |= {*commit.get("passed_over", ()), *restore.passed_over}
            if resume == "never":
                raise PreflightError(
                    f"resume=never: {self._out} has a run already. Type out=<another place>, or resume=auto to "
                    "continue it."
                )
            if copy and copy.step > commit["step"]:
                break
            if misfit and attempts.writer(url) != attempts.writer(misfit[0]):
                break
            try:
                loaded = restore.load(url, commit, state)
            except (commits.MisfitError, WordsError) as error:
                misfit = misfit or (url, error)
                restore.skip_misfit(url, error)
                continue
            if loaded:
                self._last = (state.step, url)
                self._look_back(state.step, url)
                return {**commit, "url": url}
        if misfit:
            raise misfit[1]
        self.passed_over |= restore.passed_over
        if copy:
            restore.load_copy(self._nodes(), copy, os.environ[MEMORY], state)
            self._look_back(state.step)
            return {**copy.commit, "url": os.environ[MEMORY]}
        if self.damaged:  # a new start would remove checkpoints that may be repairable
            raise PreflightError(
                f"no checkpoint under {self._out} can be read: {'; '.join(self.damaged[:3])}. Type out=<another "
                f"place>, or remove {store.join(self._out, 'checkpoints')} to start from the beginning."
            )
        if resume == "must":
            raise PreflightError(
                f"resume=must: there is no checkpoint under {self._out}. Type resume=auto to start from the beginning."
            )
        if self._promised:  # so the weights were not initialised
            raise StoreError(
                f"the checkpoints under {self._out} were there a moment ago, but are gone. Run the same command again "
                "when the storage is back."
            )
        return None

    def _look_back(self, step: int, url: str = "") -> None:
        """Learn which of the checkpoints up to `step` is the best."""
        self._mesh.on_rank_0("read the metrics of checkpoints", lambda: self._scores.restored(step, url))

    def load_weights(self, source: str, state: TrainState, names: Any = None) -> dict[str, Any]:
        """Load only the weights, from a run's `out`, a step's folder or one attempt, or from a checkpoint of others;
        all ranks call it. `names`: what its tensors are called here (dtrain.weights.names). Raises StoreError.
        """
        if not self._mesh.on_rank_0(f"look at {source}", lambda: place.is_ours(source)):
            state.source = source
            return self._adopt(source, state, names)
        restore = Restore(self._mesh)
        return self._load_from(source, restore, restore.load_weights, state)

    def _adopt(self, source: str, state: TrainState, names: Any) -> dict[str, Any]:
        """Load weights of others, which become the base of an adapter."""
        if not state.adapter:
            return adopt(source, state, self._mesh, names)
        state.base = others.load(source, state, self._mesh, names)
        begin(state.model)
        if state.ema:
            state.ema.begin()
        return {"step": 0, "url": source, "facts": {"step": 0, "optim": {}}}

    def load_state(self, source: str, state: TrainState) -> dict[str, Any]:
        """Like `load_weights`, the whole state. Raises WordsError if it was trained on other data or with another
        seed.
        """
        hint = f"Type the model and optim of that run, or {screen.typed(f'init={source}')} to take its weights alone"
        restore = Restore(self._mesh, hint)
        commit = self._load_from(source, restore, restore.load, state)
        state.first = state.step
        return commit

    def _load_from(
        self, source: str, restore: Restore, load: Callable[[str, Commit, TrainState], bool], state: TrainState
    ) -> dict[str, Any]:
        """The commit of the newest checkpoint at `source` that is intact, after `load` has loaded it."""
        for url, commit in restore.candidates(lambda: commits.candidates_at(source)):
            if load(url, commit, state):
                state.source = url
                return {**commit, "url": url}
        cause = "; ".join(restore.damaged) or commits.none_at(source)
        raise StoreError.during("find a checkpoint at", source, cause)

    # copies in memory

    def _copies(self, step: int) -> bool:
        return bool(self._every_copy) and MEMORY in os.environ and step % self._every_copy == 0

    def _copy(self, state: TrainState) -> None:
        """Copy into the memory of the nodes; after a failure on one rank, no rank tries again."""
        try:
            self._nodes().take(state.step, state.tensors(), state.facts())
        except StoreError as error:
            self._every_copy = 0
            failed = SaveResult(kind="failed", step=state.step, url=os.environ[MEMORY], error=str(error))
            self._landed.append(failed)

    def _nodes(self) -> Memory:
        if self._memory is None:
            self._memory = Memory(self._mesh, os.environ[MEMORY], self._name())
        return self._memory

    def _newest_copy(self) -> Copy | None:
        """The copy that previous ranks left in memory. None if these ranks restored before: they rewind, and the copy
        is too new.
        """
        if not self._every_copy or MEMORY not in os.environ:
            return None
        copy, self._restored = None if self._restored else self._nodes().newest(), True
        self._nodes().forget(lambda name: copy is not None and name in copy.parts)
        self._memory = None
        self._mesh.barrier()
        return copy

    # running saves

    def _attempt(self) -> str:
        """A unique folder name: number of the lease, start and random id of the run, number of the save."""
        self._count += 1
        return f"{self._name()}-{self._count:04d}"

    def _name(self) -> str:
        if not self._run:
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
            name = f"{int(os.environ.get(LEASE, 0)):08d}-{now}-{uuid.uuid4().hex[:8]}"
            self._run = self._mesh.on_rank_0(f"save under {self._out}", lambda: name)
        return self._run

    def _settle(self) -> None:
        """Wait for the running save, and record its result."""
        if self._writer is None:
            return
        self._previous, self._writer = self._writer, None
        writer = self._previous
        writer.join()
        self._error = writer.error
        if writer.error:
            self._scores.failed(self._step)
        else:
            self._last = (self._step, writer.url)
        kind: Literal["committed", "failed"] = "failed" if writer.error else "committed"
        error = writer.error or self._left() or None
        result = SaveResult(kind, self._step, writer.url, error, stall_seconds=self._stall, seconds=writer.seconds)
        self._landed.append(result)
        for fatal in FATAL:
            if writer.fatal == fatal.__name__:
                raise fatal(writer.error)

    def _prepare(self, step: int, url: str) -> None:
        """Make durable what the commit depends on; runs on rank 0 in the thread of the writer."""
        if self._before:
            self._before()
        self._scores.write(step, url)

    def _tidy(self, url: str, commit: Mapping[str, Any]) -> None:
        """Remove what the new commit makes obsolete; runs on rank 0 in the thread of the writer."""
        try:
            self._retention.committed(url)
            self._scores.committed(commit["step"], url)
            self._retention.apply(commit["step"])
        except Exception as error:  # the checkpoint is committed nevertheless
            self._untidy.append(describe(error))

    def _await_removals(self) -> None:
        """Wait for removals; the newest save, if its result was not read yet, reports what could not be removed."""
        deadline, writer = time.monotonic() + TIDY_SECONDS, self._previous
        if writer and not (writer.ended(TIDY_SECONDS) and self._retention.settled(deadline - time.monotonic())):
            self._untidy.append(
                f"after {TIDY_SECONDS:g} s old checkpoints are still there; the next save under this out removes them"
            )
        if self._landed and not self._landed[-1].error:
            self._landed[-1] = replace(self._landed[-1], error=self._left() or None)

    def _left(self) -> str:
        """The files that could not be removed since the last call."""
        faults, self._untidy = self._untidy, []
        return "; ".join(faults[:3])


def _arrive(snapshot: Snapshot) -> None:
    """Wait for the copy of the state. Raises ChangedError if samples that led to it may be of another file."""
    snapshot.wait()
    mapped.check()
