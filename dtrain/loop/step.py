"""The forwards and backwards of one optimizer step: accumulation over microbatches, or a pipeline schedule."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtrain import compile
from dtrain.data import Batch
from dtrain.data.stream import Stream
from dtrain.errors import WordsError
from dtrain.loop.agreement import Agreement, News
from dtrain.loop.watch import Watch
from dtrain.mesh import Mesh
from dtrain.model import seeds
from dtrain.model.documents import is_packed
from dtrain.objective import Objective, Shapes, agreed, chunk_asked, loss_of
from dtrain.objective.head import deferring, is_compiled
from dtrain.parallel.context import Context
from dtrain.parallel.document_check import check_documents
from dtrain.parallel.pipeline import Pipeline
from dtrain.parallel.split_check import check_split
from dtrain.parallel.tensor_check import check_tensors
from dtrain.precision import Precision
from dtrain.strategy import Strategy


@dataclass(frozen=True)
class StepLoss:
    """This rank's part of a step: `sums` of the loss and the objective's metrics, over the `count` of the whole
    batch. `drawn`: the generators from which the forwards drew random numbers, if the step is watched (watch.py).
    """

    sums: Mapping[str, Tensor]
    count: float
    drawn: Sequence[str] = ()
    news: News | None = None
    """For `clip`, if the strategy does not sum what ranks tell each other about the step."""
    caveats: Sequence[str] = ()
    """About the loss, if the step is watched."""


Step = Callable[[Stream, int], StepLoss]
Compare = Callable[[Batch, Any], Batch]
"""(batch, the model's inputs) -> the batch with what the objective needs of a reference."""


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Inputs as arguments of the model: a mapping, and what a pair holds beside its first, become keyword arguments.
    Raises WordsError for whole numbers where the model needs fractions, and for arguments that its forward does not
    take.
    """
    try:
        if isinstance(inputs, tuple):
            return model(inputs[0], **inputs[1])
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    except TypeError as error:
        frames = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        if "forward()" in str(error) and all(name.split(".")[0] in ("torch", "dtrain") for name in frames):
            given = f"{', '.join(inputs)} by name" if isinstance(inputs, Mapping) else "one input"
            raise WordsError(
                f"model: {error}. The data gives it {given}. Let its forward take that; of samples with names "
                "data.inputs=[x] gives x by its name, and data.inputs=x as the one input."
            ) from error
        raise
    except RuntimeError as error:
        whole = any(each.dtype == torch.int64 for each in tree_leaves(inputs) if isinstance(each, Tensor))
        if whole and re.search(r"\bLong\b|\blong int\b|mixed dtype", str(error)):
            raise WordsError(
                "model: its forward needs fractions, and the data gives whole numbers (int64), as they are in the "
                "file. Write x.float() in the forward, or 1.0 in the data."
            ) from error
        raise


def make_step(
    model: nn.Module,
    objective: Objective,
    strategy: Strategy,
    mesh: Mesh,
    *,
    precision: Precision,
    seed: int,
    context: Context | None = None,
    reference: Compare | None = None,
    whole: bool | None = None,  # as the objective states
) -> Step:
    """(stream, step number) -> StepLoss, leaving gradients of the mean over the whole batch, scaled, in the model."""
    first, shapes, watch = Shapes(), Shapes(), Watch(model, objective, strategy, mesh)
    news, again = News(Agreement(model, mesh), mesh), isinstance(model, Pipeline) and model.shape.waits
    deferred = partial(deferring, chunk_asked(objective), again=again, compiled=is_compiled(model))

    def step(stream: Stream, number: int) -> StepLoss:
        share = next(stream)
        news.begin()
        compile.begin()
        if context or not shapes:
            check(model, objective, batch=share.microbatches[0], context=context, mesh=mesh, precision=precision)
        seeds.reseed(seed, number, mesh.batch_rank)
        batches = [context.split(batch) for batch in share.microbatches] if context else share.microbatches
        scale, sums = _scale(precision, mesh, share.count), dict[str, Tensor]()

        def summed(outputs: Any, index: int) -> Tensor:
            loss = loss_of(objective, outputs, batches[index], first)
            if index == 0:
                watch.loss(outputs, batches[0], forwards=len(batches) * mesh.data_ranks, whole=whole)
            for name, value in (("loss", loss.sum), *loss.metrics.items()):
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
            return loss.sum * scale if isinstance(model, Pipeline) else loss.sum

        with watch.step(seed, number), deferred(weight=scale), context.active() if context else nullcontext():
            if isinstance(model, Pipeline):
                batches = [compared(reference, batch, objective, context) for batch in batches]
                with strategy.sync(model, True) as missing:
                    news.add(missing)
                    model.step([inputs_of(objective, batch, context) for batch in batches], summed)
            else:
                for index, batch in enumerate(batches):
                    batch = batches[index] = compared(reference, batch, objective, context)
                    with strategy.sync(model, index == len(batches) - 1) as missing:
                        news.add(missing)
                        with precision.autocast(mesh.device):
                            loss = summed(call(model, inputs_of(objective, batch, context)), index)
                        _backward(loss, scale)
        if not shapes:
            shapes.update(agreed(objective, first, mesh))
        if not sums:  # a rank without the last stage knows no loss
            sums.update({name: torch.zeros(shape, device=mesh.device) for name, shape in shapes.items()})
        return StepLoss(sums, share.count, watch.drawn, news.tell(), watch.caveats)

    return step


def _scale(precision: Precision, mesh: Mesh, count: float) -> Tensor:
    """The factor of the sum of a loss, 0-dim: strategies average gradients over the ranks of the batch, and the
    loss is a sum over all of them. Under fp16 `clip` makes up for it, or more ranks would overflow earlier.
    """
    weight = (precision.scale.value if precision.scale else mesh.batch_ranks) / (count or 1)
    return torch.full((), weight, dtype=torch.float32, device=mesh.device)


def _backward(loss: Tensor, scale: Tensor) -> None:
    """The gradients of `loss` times `scale`. Raises WordsError for a loss without a gradient."""
    if not loss.requires_grad:
        raise WordsError(
            "the loss does not depend on any trained parameter: the forward of the model or the objective detaches "
            "it. Look for detach(), no_grad(), item() or numpy() there."
        )
    loss.backward(scale.to(loss.dtype).view(loss.shape))  # the same memory, by which a chunked loss knows it


def check(
    model: nn.Module, objective: Objective, batch: Batch, context: Context | None, mesh: Mesh, precision: Precision
) -> None:
    """Check a model before its first packed rows, and before its matrices or its sequence are split for the first time.
    Raises WordsError if it mixes documents, or if parts give other numbers than the whole.
    """

    def forward(batch: Batch, context: Context | None = None) -> Any:
        with precision.autocast(mesh.device), context.active() if context else nullcontext():
            return call(model, inputs_of(objective, batch, context))

    check_tensors(model, batch, forward, mesh=mesh, precision=precision)
    if is_packed(batch["inputs"]) and not (context and context.checked):
        check_documents(model, batch, forward, mesh=mesh, precision=precision)
    if context:
        check_split(model, batch, context, forward, mesh=mesh, precision=precision)


def inputs_of(objective: Objective, batch: Batch, context: Context | None) -> Any:
    """The model's arguments; for a part of a sequence also the positions of its tokens."""
    inputs = objective.inputs(batch)
    if context is None or is_packed(inputs):
        return inputs
    first = next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs
    positions = {"position_ids": context.position_ids(first.shape[1] * context.size)}
    return {**inputs, **positions} if isinstance(inputs, Mapping) else (inputs, positions)


def compared(reference: Compare | None, batch: Batch, objective: Objective, context: Context | None) -> Batch:
    """`batch` with what the objective needs of the reference, if there is one."""
    return reference(batch, inputs_of(objective, batch, context)) if reference else batch


def gradients_of(model: nn.Module) -> list[nn.Parameter]:
    """Trained parameters, listed once: walking the modules every step costs more than a small model's backward."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def zero(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
