"""How the data-parallel axes hold state. All strategies average gradients over the data-parallel ranks, so the training
step treats them alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor, nn

from dtrain.mesh import Mesh
from dtrain.model import saved_buffers
from dtrain.precision import Precision


class Carried(list[nn.Parameter]):
    """The parameters for which this rank had no gradient, of a strategy that sums a message of each rank with the
    gradients. `message()` is called once the list is complete, and has as many numbers as `carried` counts; `sums`: of
    these over the ranks of the batch, perhaps divided.
    """

    message: Callable[[], Tensor] | None = None
    sums: Tensor | None = None


def carried(model: nn.Module) -> int:
    """Numbers in a message: one for each trained parameter and each saved buffer."""
    return sum(parameter.requires_grad for parameter in model.parameters()) + len(saved_buffers(model))


class Strategy(Protocol):
    """A strategy; its YAML states in `_about_` which mesh axis absorbs unassigned ranks (`fill`)."""

    @property
    def holds(self) -> Literal["shards", "copies"]:
        """How the ranks of dp_shard and cp hold the parameters."""
        ...

    @property
    def offload(self) -> Literal["none", "cpu"]:
        """Where parameters and optimizer state are kept between uses."""
        ...

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        """Split the parameters of a model, or of a pipeline stage, in place; it may still be on the meta device."""
        ...

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        """The module to call; runs once the weights exist. The result is not used for a pipeline, whose stages are
        called instead.
        """
        ...

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[list[nn.Parameter] | None]:
        """A context for a forward and backward of the wrapped module, or for a step of a pipeline; gradients are
        reduced only in the `last` one of a step.

        All ranks average the same parameters. Of a pass whose gradients are reduced the context gives a list, which has
        at its end the parameters for which this rank had no gradient; it may be `Carried`. Of any other pass it gives
        None.
        """
        ...
