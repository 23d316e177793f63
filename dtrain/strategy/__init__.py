"""How the data axes hold state. All strategies average gradients over the data-parallel ranks, so the step treats them
alike.
"""

from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import nn

from dtrain.mesh import Mesh
from dtrain.precision import Precision


class Strategy(Protocol):
    """Its word states in `_about_` which mesh axis absorbs the ranks that nobody assigned (`fill`)."""

    @property
    def holds(self) -> Literal["shards", "copies"]:
        """How the ranks of dp_shard and cp hold the parameters."""
        ...

    @property
    def offload(self) -> Literal["none", "cpu"]:
        """Where parameters and optimizer state lie between two uses."""
        ...

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        """Split the parameters in place, of a model or of one stage of a pipeline; it may still be on the meta
        device.
        """
        ...

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        """The module to call; runs once the weights exist. Of a pipeline, whose stages are called, only its effect
        counts.
        """
        ...

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[list[nn.Parameter] | None]:
        """Around a forward and backward of what `wrap` returned, or around all of a pipeline; gradients cross ranks
        only in the `last`.

        All ranks average the same parameters. Where gradients crossed ranks, the list holds those for which this rank
        had none when it ends.
        """
        ...
