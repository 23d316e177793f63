"""Parameters, gradients and optimizer state are sharded over dp_shard, block by block (FSDP2; ZeRO-3, arXiv 1910.02054)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.precision import Precision
from dtrain.strategy.outputs import restore, show

RESHARD = ("forward", "never")


@dataclass(frozen=True)
class FSDP:
    """`reshard`: `forward` frees gathered parameters after the forward, `never` keeps them for the backward."""

    reshard: str

    def __post_init__(self) -> None:
        if self.reshard not in RESHARD:
            raise WordsError(f"strategy.reshard={self.reshard}: allowed are {' and '.join(RESHARD)}.")

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        hybrid = mesh.shape.dp_replicate > 1
        shard_blocks(model, mesh.axis("dp_replicate", "dp_shard") if hybrid else mesh.axis("dp_shard"), precision, again=self.reshard == "forward")

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        return model

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        return nullcontext()


def shard_blocks(model: nn.Module, mesh: DeviceMesh, precision: Precision, *, again: bool) -> None:
    """Every block, then what is left with the root. `again`: gather for the backward once more. Raises WordsError for a parameter without dims."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise WordsError(f"strategy=fsdp: {name} has no dims and cannot be sharded. Give it the shape [1], or type strategy=ddp.")
    compute = None if precision.compute == precision.param else precision.compute
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.reduce, cast_forward_inputs=False)
    # output_dtype on the root only: on a block it would mix types in the residual
    root = MixedPrecisionPolicy(compute, precision.reduce, torch.float32 if compute else None, cast_forward_inputs=False)
    for module, kind, free in (*((block, policy, again) for block in dict.fromkeys(blocks(model))), (model, root, False)):
        module.register_forward_hook(show)
        fully_shard(module, mesh=mesh, mp_policy=kind, reshard_after_forward=free)
        module.register_forward_hook(restore)


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost elements of every ModuleList and Sequential that have parameters and can be called."""
    for child in module.children():
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(module, nn.ModuleList | nn.Sequential) and called and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)
