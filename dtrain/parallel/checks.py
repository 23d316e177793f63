"""Tools of the checks before the first step, each of which compares a forward of a few samples with another."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.model import evaluating
from dtrain.parallel.pipeline import Pipeline
from dtrain.precision import Precision

ROWS = 2
"""Samples in a check."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The rounding of one module, relative to its largest value."""
FP8 = 0.2


def first_rows(part: Any, T: int | None = None, length: int = 0) -> Any:
    """The first samples of a batch; of the tensors with `T` in dim 1 the first `length`."""
    if isinstance(part, Mapping):
        return {name: first_rows(value, T, length) for name, value in part.items()}
    if not isinstance(part, Tensor) or not part.ndim:
        return part
    return part[:ROWS, :length] if part.ndim >= 2 and part.shape[1] == T else part[:ROWS]


def modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name in the model, module), without wrappers."""
    return list({id(module): (name, module) for root in roots(model) for name, module in root.named_modules()}.values())


def roots(model: nn.Module) -> list[nn.Module]:
    """The model without wrappers; of a pipeline the model of each stage."""
    if isinstance(model, Pipeline):
        return [stage.model for stage in model.stages.values()]
    return [model.module if isinstance(model, DistributedDataParallel) else model]


@contextmanager
def hooked(
    model: nn.Module, before: Callable[..., None], after: Callable[..., Any], *, first: bool = False
) -> Iterator[None]:
    """Calls `before(module, args, kwargs)` and `after(module, args, output)` around the forward of every module;
    `first`: `after` runs before other hooks. Scripted modules take no hooks.
    """
    with ExitStack() as stack:
        for module in (each for _, each in modules(model) if not isinstance(each, torch.jit.ScriptModule)):
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after, prepend=first).remove)
        yield


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """`evaluating` without compilers; afterwards all buffers and generators of the model are as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [value for module in model.modules() for value in vars(module).values()]
    generators = [(value, value.get_state()) for value in attributes if isinstance(value, torch.Generator)]
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)
            for generator, state in generators:
                generator.set_state(state)


def distance(a: Tensor, b: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest value of the reference; inf if rounding cannot explain it."""
    b = b.detach().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    wide = torch.promote_types(a.dtype, torch.float32)
    most = (a.to(wide) - b.to(wide)).abs().masked_fill(same, 0.0).max()
    return float("inf") if most.isnan() else (most / reference.to(wide).abs().nan_to_num(0.0, 0.0, 0.0).max()).item()


def tolerance_of(precision: Precision, device: torch.device) -> float:
    """On a GPU fp32 products may be rounded to TF32, whose precision is that of fp16."""
    if precision.convert is not None:
        return FP8
    least = TOLERANCES[torch.float16] if device.type == "cuda" else 0.0
    return max(least, TOLERANCES.get(precision.param, 3e-2), TOLERANCES.get(precision.compute, 3e-2))
