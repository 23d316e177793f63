"""How state survives. A Checkpoint may return before bytes land, and never lies about a commit."""

from typing import Any, Protocol

from dtrain.state import TrainState


class Checkpoint(Protocol):
    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after this step."""
        ...

    def save(self, state: TrainState) -> str:
        """Write a checkpoint of `state`; all ranks call it. Returns its URL."""
        ...

    def restore(self, state: TrainState) -> dict[str, Any] | None:
        """Load the newest valid checkpoint into `state`; all ranks call it. Its commit, or None when there is none."""
        ...

    def wait(self) -> None:
        """Return when everything saved is committed."""
        ...
