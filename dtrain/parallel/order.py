"""The order of wrapping, in one place: cut and split the parameters, give them memory and values, then wrap for
synchronisation.

precision -> pipeline -> tensor -> experts -> remat -> compile -> data axes: layers that a precision replaces by others
come first, because others hang their hooks on them; what is inside comes before what is outside, so that a block
recomputes what tensor parallelism made of it, is compiled as it recomputes, and is gathered whole before either.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dtrain.compile import Compile
from dtrain.mesh import Mesh
from dtrain.model import blocks
from dtrain.model.seeds import fill
from dtrain.parallel import context, expert, huggingface, tensor
from dtrain.parallel.pipeline import Pipeline
from dtrain.parallel.stages import cut
from dtrain.planned import MeshShape, PipelineShape
from dtrain.precision import Precision
from dtrain.remat import Remat
from dtrain.strategy import Strategy


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    strategy: Strategy,
    *,
    precision: Precision,
    seed: int,
    pipeline: PipelineShape | None = None,
    tensors: Mapping[str, Any] | None = None,
    remat: Remat | None = None,
    compile: Compile | None = None,
    brought: bool = False,
) -> nn.Module:
    """The module to call. `model` is changed in place to this rank's part of it, with its parameter names. `brought`: a
    checkpoint will fill a model on the meta device, which is not initialised.
    """
    meta = any(parameter.is_meta for parameter in model.parameters())
    precision.choose_products()
    if precision.param != torch.float32:
        lower(model, precision.param)
    tensors = tensors or {"sequence": "whole", "loss": "whole"}
    check(model, mesh.shape, pipeline=pipeline, tensors=tensors)
    if precision.convert is not None:
        precision.convert(model)
    if mesh.shape.cp > 1:
        huggingface.adapt(model)
    pipelined = Pipeline(model, mesh, pipeline, precision) if pipeline and mesh.shape.pp > 1 else None
    if mesh.shape.tp > 1:
        tensor.apply(model, mesh.axis("tp"), **tensors)
    if mesh.shape.ep > 1:
        expert.apply(model, mesh)
    for wrap in (remat, compile):
        if wrap is not None:
            wrap(list(dict.fromkeys(blocks(model))))
    roots = pipelined.roots() if pipelined else [model]
    for root in roots:
        strategy.shard(root, mesh, precision)
    device = torch.device("cpu") if strategy.offload == "cpu" else mesh.device
    if meta:
        materialize(model, device)
        if not brought:
            fill(model, seed)
    else:
        model.to(device)
    place_buffers(model, mesh.device)
    called = strategy.wrap(model, mesh)
    return pipelined or called


def check(model: nn.Module, shape: MeshShape, *, pipeline: PipelineShape | None, tensors: Mapping[str, Any]) -> None:
    """Raises WordsError for an axis over which a model cannot be split, as far as is known before a forward; changes
    nothing.
    """
    if shape.cp > 1:
        context.check(model)
    if shape.ep > 1:
        expert.check(model, shape.ep)
    if shape.pp > 1 and pipeline:
        cut(model, shape.pp * pipeline.stages, pipeline.split)
    if shape.tp > 1:
        tensor.styles(model, shape.tp, **tensors)


def lower(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters and floating inputs to `dtype`; buffers keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)

    def cast(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def lowered(x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        return tree_map_only(torch.Tensor, lowered, (args, kwargs))  # type: ignore[no-any-return]

    model.register_forward_pre_hook(cast, with_kwargs=True)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the compute device, wherever parameters are; shared ones stay shared."""
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = placed.setdefault(id(buffer), buffer.to(device))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on `device`; tied ones stay tied, which `Module.to_empty` does not keep."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
