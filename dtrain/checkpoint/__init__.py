"""How state survives. A Checkpoint may return before bytes land, and never lies about a commit."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dtrain.checkpoint.state import TrainState
from dtrain.checkpoint.writer import SaveResult


class Checkpoint(AbstractContextManager[Any], Protocol):
    damaged: list[str]
    """One sentence for every checkpoint that `restore` passed over."""
    passed_over: Collection[str]
    """The places (`attempts.place`) of these, and of those that earlier starts passed over."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after this step."""
        ...

    def save(self, state: TrainState, *, last: bool = True) -> str:
        """Begin to save `state`, which may change when this returns; all ranks call it. The URL of the checkpoint to
        be.

        When it is not the `last`, no more is done than what made this step due, which may be a copy in memory and no
        checkpoint: no URL then.
        """
        ...

    def landed(self) -> list[SaveResult]:
        """Results of saves since the last call; waits for nothing. A save that failed ends nothing."""
        ...

    def scored(self, step: int, metrics: Mapping[str, float], *, complete: bool = True) -> None:
        """Take the figures of the state after this step; not `complete` where hooks may give more figures."""
        ...

    def brings(self) -> bool:
        """Whether `restore` will bring the state, or raise; all ranks call it."""
        ...

    def restore(self, state: TrainState) -> dict[str, Any] | None:
        """Load the newest valid checkpoint into `state`; all ranks call it. Its commit, or None when there is none."""
        ...

    def load_weights(self, source: str, state: TrainState) -> dict[str, Any]:
        """Weights only, from the checkpoint at a URL; all ranks call it. Its commit."""
        ...

    def wait(self) -> None:
        """Return when what was saved last is committed. Raises StoreError when it could not be."""
        ...
