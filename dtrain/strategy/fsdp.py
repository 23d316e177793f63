"""Parameters, gradients and optimizer state are sharded over dp_shard, block by block (FSDP2; ZeRO-3, arXiv 1910.02054)."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import blocks
from dtrain.model.moe import Experts
from dtrain.precision import Precision
from dtrain.strategy.outputs import restore, show

# logits gathered by tensor parallelism are views; nothing here changes an output in place
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

RESHARD = ("forward", "never")
RESTS = ("device", "cpu")
REDUCE = ("last", "every")


@dataclass(frozen=True)
class FSDP:
    """`reshard`: `forward` frees gathered parameters after the forward, `never` keeps them for the backward, as every pipeline
    does: a schedule that splits the backward in two would lose gradients. `rests`: between two uses
    parameters, gradients and optimizer state lie on the device or, for the price of copies, in the memory of the CPU. `reduce`: gradients
    cross ranks in the last microbatch of a step or in every one, after which a rank keeps its shard alone.
    """

    reshard: str
    rests: Literal["device", "cpu"]
    reduce: Literal["last", "every"] = "last"
    holds: ClassVar[Literal["shards"]] = "shards"

    def __post_init__(self) -> None:
        for name, value, allowed in (("reshard", self.reshard, RESHARD), ("rests", self.rests, RESTS), ("reduce", self.reduce, REDUCE)):
            if value not in allowed:
                raise WordsError(f"strategy.{name}={value}: allowed are {' and '.join(allowed)}.")

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        shard_blocks(model, mesh, precision, again=self.reshard == "forward" and mesh.shape.pp == 1, rests=self.rests)

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        return model

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        if isinstance(model, FSDPModule):  # else a pipeline, whose schedule says it to each stage
            model.set_requires_gradient_sync(last or self.reduce == "every")
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or self.reshard == "forward")
        return nullcontext()


def shard_blocks(model: nn.Module, mesh: Mesh, precision: Precision, *, again: bool, rests: str) -> None:
    """Experts, then every block, then what is left with the root. `again`: gather for the backward once more.

    Raises WordsError for a parameter without dims.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise WordsError(f"strategy=fsdp: {name} has no dims and cannot be sharded. Give it the shape [1], or type strategy=ddp.")
    compute = None if precision.compute == precision.param else precision.compute
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.reduce, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if rests == "cpu" else OffloadPolicy()
    data = mesh.axis("dp_replicate", "dp_shard") if mesh.shape.dp_replicate > 1 else mesh.axis("dp_shard")
    for experts in _experts(model) if mesh.shape.ep > 1 else ():
        fully_shard(experts, mesh=mesh.axis("expert_shard", view="experts"), mp_policy=policy, reshard_after_forward=again, offload_policy=offload)
        assert isinstance(experts, FSDPModule)
        # tokens of all ranks came to the expert: its gradient is a sum over them already
        experts.set_gradient_divide_factor(float(mesh.batch_ranks))
        if mesh.device.type == "cpu" and mesh.batch_ranks > mesh.shape.ep:
            experts.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM; alone, an expert's gradient is divided without it
    listed = list(dict.fromkeys(blocks(model)))
    # the last block is wanted again at once
    for module, free in (*((block, again and block is not listed[-1]) for block in listed), (model, False)):
        module.register_forward_hook(show)
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=free, offload_policy=offload)
        module.register_forward_hook(restore)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Experts)]
