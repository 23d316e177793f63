"""The order of wrapping, in one place: split the parameters, allocate and initialise them, then wrap for
synchronisation.

precision -> pipeline -> tensor -> experts -> remat -> compile -> data axes. A precision replaces layers, so it comes
first: later steps add hooks to these layers. Then from the inside to the outside: a block recomputes what tensor
parallelism has split, is compiled with its recomputation, and its parameters are gathered before either runs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dtrain.compile import Compile
from dtrain.mesh import Mesh
from dtrain.model import blocks
from dtrain.model.adapted import begin, lacks_memory, packed
from dtrain.model.listed import check_listed
from dtrain.model.seeds import fill, fill_added, fill_head
from dtrain.objective.head import Head, defer
from dtrain.parallel import context, expert, huggingface, tensor
from dtrain.parallel.attachments import Attachments
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
    chunk: int | str = 0,
) -> nn.Module:
    """The module to call. `model` becomes, in place, this rank's part of it, with the same parameter names. `brought`:
    a checkpoint will fill a model on the meta device, so it is not initialised. `chunk`: that of the objective, for
    which the head may defer its product.
    """
    meta, attachments = lacks_memory(model), Attachments(model)
    precision.choose_products()
    if precision.param != torch.float32:
        lower(model, precision.param)
    tensors = tensors or {"sequence": "whole", "loss": "whole"}
    check(model, mesh.shape, pipeline=pipeline, tensors=tensors)
    if precision.convert is not None:
        precision.convert(model)
    defer(model, chunk)
    huggingface.packs(model)
    if mesh.shape.cp > 1:
        huggingface.adapt(model)
    pipelined = Pipeline(model, mesh, pipeline, precision) if pipeline and mesh.shape.pp > 1 else None
    if mesh.shape.tp > 1:
        tensor.apply(model, mesh.axis("tp"), **tensors)
    if mesh.shape.ep > 1:
        expert.apply(model, mesh)
    attachments.restore(model)
    if remat is not None:
        remat(list(dict.fromkeys(blocks(model))))
    if compile is not None:
        compile(model)
    if model._compiled_call_impl is not None:
        for head in (each for each in model.modules() if isinstance(each, Head)):  # deferred logits are in no graph
            head.forward = torch.compiler.disable(head.forward)  # type: ignore[method-assign]
    for root in pipelined.stages.values() if pipelined else [model]:
        strategy.shard(root, mesh, precision)
    device = torch.device("cpu") if strategy.offload == "cpu" else mesh.device
    if meta:
        materialize(model, device)
        if not brought:
            fill(model, seed)
        fill_head(model, seed)
    else:
        move(model, device)
    fill_added(model, seed)
    if not brought:
        begin(model)
    place_buffers(model, mesh.device)
    attachments.finish(model, *_reason(mesh.shape, strategy))
    called = strategy.wrap(model, mesh)
    return pipelined or called


def _reason(shape: MeshShape, strategy: Strategy) -> tuple[str, str, str]:
    """(key, act, advice): what replaces parameters, and how to do without."""
    axes = [f"mesh.{axis}" for axis in ("tp", "ep") if getattr(shape, axis) > 1]
    if strategy.holds == "shards":
        return "strategy", "sharding", f"Type strategy=ddp{''.join(f', and leave out {axis}' for axis in axes)}."
    if axes:
        return axes[0], "splitting", f"Leave out {' and '.join(axes)}."
    return "model", "allocating", "A model with init_weight is built without memory: leave that method out."


def check(model: nn.Module, shape: MeshShape, *, pipeline: PipelineShape | None, tensors: Mapping[str, Any]) -> None:
    """Raises WordsError as `check_listed`, and for an axis over which the model cannot be split, as far as that is
    known before a forward. Changes nothing.
    """
    check_listed(model)
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

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    model.register_forward_pre_hook(cast, with_kwargs=True)


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model that has memory, but for the parameters that are packed, to `device`."""
    if not packed(model):
        model.to(device)
        return
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to the compute device, wherever the parameters are; shared buffers stay shared."""
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = placed.setdefault(id(buffer), buffer.to(device))


def materialize(model: nn.Module, device: torch.device, *, whole: bool = False) -> None:
    """Allocate meta parameters on `device`; `whole`: also those that are packed when they are read. Tied ones stay
    tied, which they would not in `Module.to_empty`.
    """
    made: dict[int, nn.Parameter] = {}
    kept = {} if whole else packed(model)
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if f"{prefix}.{name}" in kept:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
