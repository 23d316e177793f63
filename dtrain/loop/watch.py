"""Checks of the first step that are made again in steps 2, 4, 8 and so on, since a model or an objective may begin
something later. The other steps cost nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import seeds
from dtrain.objective import Objective
from dtrain.objective.additive import check_sum
from dtrain.parallel.checks import roots
from dtrain.strategy import Strategy
from dtrain.strategy.trained import Trained
from dtrain.strategy.writes import CopyWrites, is_power, is_watched

MIXED = "mixed torch.Tensor and DTensor"
"""In what torch says of a sharded weight that is not gathered."""
TWICE = "mark a variable ready only once"
"""In what torch says of a copy whose gradient comes after it was counted as missing."""
OUTSIDE = (
    "strategy: the forward reads or writes weights outside of the layer that owns them, and did not in the first step, "
    "which decides what is gathered when. Type strategy=ddp, or let the first forward do it too."
)


class Watch:
    """Create it before the first forward of a start."""

    def __init__(self, model: nn.Module, objective: Objective, strategy: Strategy, mesh: Mesh) -> None:
        self._roots, self._objective, self._mesh = roots(model), objective, mesh
        self._copies = strategy.holds == "copies"
        """Shards are watched by their strategy."""
        self._trained = Trained(*self._roots)
        self._steps, self._is_on, self._is_sum = 0, False, True
        self.caveats: list[str] = []
        """Of the last step."""
        self.drawn: list[str] = []
        """The generators from which its forwards drew random numbers."""

    @contextmanager
    def step(self, seed: int, number: int) -> Iterator[None]:
        """A context for the forwards and backwards of a step; all ranks enter it. Raises WordsError as `CopyWrites` and
        `Trained`. `seed` and `number`: as for `reseed`.
        """
        self._steps += 1
        self._is_on = is_watched(self._steps, self._mesh.device)
        self.caveats, self.drawn = [], []
        writes = CopyWrites(self._roots, self._mesh) if self._is_on and self._copies else None
        try:
            yield
        except Exception as error:
            self._explain(str(error))
            raise
        if writes:
            writes.check()
        if is_power(self._steps):
            self._trained.check()
        if self._is_on:
            self.drawn = seeds.drawn(seed, number, self._mesh.batch_rank)

    def _explain(self, error: str) -> None:
        """Raises WordsError if what a model does since the first step says more than the error that follows from it."""
        self._trained.check()
        if self._steps > 1 and not self._copies and MIXED in error:
            raise WordsError(OUTSIDE)
        if TWICE in error and (names := self._trained.resting()):
            raise WordsError(
                f"strategy: the forward freezes {names[0]} after it has used it, when the ranks expect its gradient. "
                "Freeze it before its layer is called."
            )

    def loss(self, outputs: Any, batch: Batch, *, forwards: int, whole: bool | None) -> None:
        """Call it with the first microbatch of a step. Raises WordsError as `check_sum`."""
        if self._is_on and self._is_sum:
            self.caveats = check_sum(self._objective, outputs, batch, forwards, whole)
            self._is_sum = not self.caveats
