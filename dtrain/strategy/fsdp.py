"""Parameters, gradients and optimizer state are sharded over dp_shard, block by block (FSDP2; ZeRO-3, arXiv
1910.02054).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import head_of, untied_blocks
from dtrain.model.moe import experts_of
from dtrain.precision import Precision
from dtrain.strategy.ddp import average
from dtrain.strategy.outputs import restore, show
from dtrain.strategy.units import Order, gather_first, take_part, units
from dtrain.strategy.writes import ShardWrites, refuse_max_norm

# logits gathered by tensor parallelism are views; dtrain changes no output in place
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

ALLOWED = {"reshard": ("forward", "never"), "offload": ("none", "cpu"), "reduce": ("last", "every")}


class FSDP:
    """Fully sharded data parallelism (FSDP2).

    `reshard`: `forward` frees gathered parameters after the forward; `never` keeps them for the backward. Pipelines
    always keep them, because a schedule that splits the backward in two would lose gradients. `offload`: between uses,
    parameters, gradients and optimizer state stay on the device or, at the cost of copies, in CPU memory. `reduce`:
    gradients are reduced in the last microbatch of a step, or in every one, after which a rank keeps only its shard.
    """

    holds: ClassVar[Literal["shards"]] = "shards"

    def __init__(
        self, *, reshard: str, offload: Literal["none", "cpu"], reduce: Literal["last", "every"] = "last"
    ) -> None:
        for name, value in (("reshard", reshard), ("offload", offload), ("reduce", reduce)):
            if value not in ALLOWED[name]:
                raise WordsError(f"strategy.{name}={value}: allowed are {' and '.join(ALLOWED[name])}.")
        self.reshard, self.offload, self.reduce = reshard, offload, reduce
        self._reached: dict[nn.Parameter, bool] = {}
        self._is_last: bool | None = None
        """Kind of pass that the FSDP units are set for; setting them walks all modules."""
        self._orders: list[Order] = []
        self._whole: list[nn.Parameter] = []
        """Parameters without dims, of which every rank holds a copy."""

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        self._whole += [p for p in model.parameters() if p.ndim == 0 and p.requires_grad]
        self._batch_ranks = mesh.group("batch")
        again = self.reshard == "forward" and mesh.shape.pp == 1
        shard_blocks(model, mesh, precision, again=again, offload=self.offload)
        take_part(model, self._reached)
        if mesh.shape.pp > 1:
            gather_first(model)
        else:
            self._orders.append(Order(model, mesh.group("batch")))
        ShardWrites(model, [group for _, group in units(model)])

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        return model

    @contextmanager
    def sync(self, model: nn.Module, last: bool) -> Iterator[list[nn.Parameter] | None]:
        reducing = last or self.reduce == "every"
        if isinstance(model, FSDPModule) and self._is_last != last:  # else a pipeline, whose schedule tells each stage
            self._is_last = last
            model.set_requires_gradient_sync(reducing)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or self.reshard == "forward")
        missing: list[nn.Parameter] = []
        self._reached.clear()
        yield missing if reducing else None
        missing += [parameter for parameter, reached in self._reached.items() if not reached]
        for order in self._orders:
            order.end()
        if last and self._whole:
            missing += average(self._whole, self._batch_ranks, self._batch_ranks.size(), bucket=2**25)
        elif reducing:
            missing += [parameter for parameter in self._whole if parameter.grad is None]


def shard_blocks(model: nn.Module, mesh: Mesh, precision: Precision, *, again: bool, offload: str) -> None:
    """Shard experts, then every block, then the head, then the rest with the root. `again`: free gathered parameters
    after the forward, and gather them again for the backward.

    The head has the first gradients of the backward. As a unit of its own it is reduced and freed during the backward
    of the blocks; with the root it would wait for the end (torchtitan groups them the same way,
    https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/llama3/parallelize.py). Parameters without dims
    are not sharded. Raises WordsError as `check`.
    """
    check(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and offload == "cpu" and mesh.device.type != "cpu":
            raise WordsError(
                f"strategy.offload=cpu: {name} has no dims, so it stays on the device. Give it the shape [1], or type "
                "strategy.offload=none."
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    compute = None if precision.compute == precision.param else precision.compute
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.reduce, cast_forward_inputs=False)
    offloading = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if offload == "cpu" else OffloadPolicy()
    data = mesh.axis("dp_replicate", "dp_shard") if mesh.shape.dp_replicate > 1 else mesh.axis("dp_shard")
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offloading)
    for experts in experts_of(model) if mesh.shape.ep > 1 else ():
        shard(experts, mesh=mesh.axis("expert_shard", view="experts"), reshard_after_forward=again)
        assert isinstance(experts, FSDPModule)
        # an expert gets the tokens of all ranks, so its gradient is already a sum over them
        experts.set_gradient_divide_factor(float(mesh.batch_ranks))
        if mesh.device.type == "cpu" and mesh.batch_ranks > mesh.shape.ep:
            # gloo has no PREMUL_SUM; with one rank per expert, FSDP2 divides without it
            experts.set_force_sum_reduction_for_comms(True)
    ignored = {parameter for parameter in model.parameters() if not parameter.numel() or not parameter.ndim}
    listed = untied_blocks(model)
    for module in _units(model, listed):
        free = again and module in listed[:-1]  # the backward needs the last block, the head and the root at once
        module.register_forward_hook(show)
        shard(module, mesh=data, reshard_after_forward=free, ignored_params=ignored)
        module.register_forward_hook(restore)


def check(model: nn.Module) -> None:
    """Raises WordsError for complex parameters, scripted modules, embeddings with max_norm, and for different dtypes in
    a unit.
    """
    refuse_max_norm(model, "with sharded weights that is lost")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise WordsError(
                f"strategy=fsdp: {name or 'the model'} is made by torch.jit, whose weights cannot be sharded. Type "
                "strategy=ddp, or leave out torch.jit.script."
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise WordsError(
                f"strategy=fsdp: {name} holds complex numbers, which cannot be sharded. Type strategy=ddp."
            )
    _check_types(_units(model, untied_blocks(model)))


def _units(model: nn.Module, listed: list[nn.Module]) -> list[nn.Module]:
    """Modules that are gathered at once each, the root last."""
    head = head_of(model)
    return [*listed, *([head] if head else []), model]


def _check_types(units: list[nn.Module]) -> None:
    """Raises WordsError if the parameters of a unit, without those of inner units, have different dtypes."""
    seen = set[int]()
    for module in units:
        types: dict[torch.dtype, str] = {}
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen and parameter.requires_grad and parameter.ndim:
                types.setdefault(parameter.dtype, name)
            seen.add(id(parameter))
        if len(types) > 1:
            both = " and ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in types.items())
            raise WordsError(
                f"strategy=fsdp: {both} of {type(module).__name__} are gathered together but have different dtypes. "
                "Give them one dtype, or type strategy=ddp."
            )
