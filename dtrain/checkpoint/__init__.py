"""Checkpoints of the training state. A save may return before its bytes are written, and never reports a commit that
did not happen.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dtrain.checkpoint.state import TrainState
from dtrain.checkpoint.writer import SaveResult


class Checkpoint(AbstractContextManager[Any], Protocol):
    damaged: list[str]
    """One sentence for every checkpoint that `restore` skipped as damaged."""
    passed_over: Collection[str]
    """The places (`attempts.place`) of the skipped checkpoints, including those that earlier starts skipped."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""

    def save(self, state: TrainState, *, last: bool = True) -> str:
        """Begin to save `state`, which may change when this returns; all ranks call it. Returns the URL of the
        checkpoint that will be committed.

        When it is not the `last`, only the due kind of copy is made: None for a copy in memory, which is no checkpoint.
        """

    def finished_saves(self) -> list[SaveResult]:
        """Results of saves since the last call, without waiting. A failed save does not end the run."""

    best: Mapping[str, Mapping[str, float]]
    """Metric -> `value` and `step` of the best checkpoint, on rank 0; empty if no metric is asked or known."""

    def scored(self, state: TrainState, metrics: Mapping[str, float], *, complete: bool = True) -> None:
        """Record metrics of `state`, and begin to save it if it is the best; all ranks call it, and rank 0 decides.
        `complete`: no hook will add more.
        """

    def has_checkpoint(self) -> bool:
        """Whether `restore` will find a checkpoint: it then loads one, or raises; all ranks call it."""

    def restore(self, state: TrainState) -> dict[str, Any] | None:
        """Load the newest valid checkpoint into `state`; all ranks call it. Returns its commit, or None if there is
        none.
        """

    def load_weights(self, source: str, state: TrainState, names: Any = None) -> dict[str, Any]:
        """Load the weights alone from the checkpoint at a URL, which others may have written; all ranks call it.
        `names`: the value of init_names. Returns its commit.
        """

    def load_state(self, source: str, state: TrainState) -> dict[str, Any]:
        """Like `load_weights`, the whole state: `state` goes on from the checkpoint of another run."""

    def wait(self) -> None:
        """Wait until the last save is committed. Raises StoreError if it failed."""
