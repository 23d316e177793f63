"""The objective, which training minimises. It returns sums and the count to divide them by, so the mean is correct on
every mesh.

A mean of means is wrong as soon as two microbatches have different counts
(https://github.com/huggingface/transformers/issues/34242).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.data import IGNORE, Batch, Source
from dtrain.errors import WordsError, an
from dtrain.mesh import Mesh
from dtrain.objective.head import settled
from dtrain.result import OF_THE_MACHINE


@dataclass(frozen=True)
class Loss:
    """Sums over one microbatch, on the device. They are added up over microbatches and ranks, and over all batches of
    held-out data.

    Names and shapes are the same in every batch. `sum` and each scalar of `metrics` is then divided by the count. A
    tensor with dims, such as a histogram or the counts of a confusion matrix, goes to `figures` only.
    """

    sum: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    @property
    def unit(self) -> str:
        """The unit of the throughput: `tokens` or `samples`."""
        ...

    def count(self, batch: Batch) -> float:
        """The divisor of the sum over this batch: the number of its terms, or the sum of their weights. 0: nothing
        counts. Called on the CPU, before the batch moves to the device.
        """
        ...

    def inputs(self, batch: Batch) -> Any:
        """The model's input: a tensor, or a mapping of keyword arguments."""
        ...

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """The sums of one microbatch.

        An objective may also have `figures(sums, count) -> {name: number}`, for metrics that are not means, such as an
        F1 score. `sums` holds the loss and the metrics of the whole batch, or of all held-out data, by name: numbers,
        and fp64 tensors where they have dims.
        """
        ...


@runtime_checkable
class Compared(Objective, Protocol):
    """An objective that compares the model with a frozen one, as its facts state."""

    def reference(self, outputs: Any, batch: Batch) -> Tensor:
        """The part of the frozen model's outputs that `loss` needs, which finds it in the batch under `reference`.
        Called without gradients.
        """
        ...


@runtime_checkable
class Chunked(Objective, Protocol):
    """An objective whose loss takes deferred logits (dtrain/objective/head.py)."""

    chunk: int | str
    """Tokens whose logits exist at a time; 0: all; auto: few where the vocabulary is large."""


@runtime_checkable
class Masking(Objective, Protocol):
    """An objective that leaves padded targets of any type out, in its count and its loss, by the `target_mask` of a
    batch.
    """

    uses_target_mask: Literal[True]


@runtime_checkable
class Preparing(Objective, Protocol):
    """An objective that changes the samples, as their index and pass say."""

    def prepared(self, source: Source, *, seed: int) -> Source: ...


@runtime_checkable
class Redirecting(Objective, Protocol):
    """An objective that is a method of the model."""

    def redirected(self, model: nn.Module) -> nn.Module: ...


def redirected(objective: Objective, model: nn.Module) -> nn.Module:
    """The model as the objective calls it. Raises WordsError if it cannot be called so."""
    return objective.redirected(model) if isinstance(objective, Redirecting) else model


def asked(objective: Objective, batch: Batch) -> Any:
    """The model's input where its answer is wanted, and no loss."""
    return batch["inputs"] if isinstance(objective, Redirecting) else objective.inputs(batch)


def prepared(objective: Objective, source: Source, seed: int) -> Source:
    """The samples as the objective takes them. Raises WordsError if it cannot take them."""
    return objective.prepared(source, seed=seed) if isinstance(objective, Preparing) else source


def check_padded(objective: Objective, batch: Batch) -> None:
    """Raises WordsError for targets that were padded and are floats, if the objective would take padding for them."""
    if "target_mask" in batch and batch["targets"].is_floating_point() and not isinstance(objective, Masking):
        raise WordsError(
            f"data.pad: the targets are floats, which cannot be marked as not counting, and {type(objective).__name__} "
            "does not read the target_mask of a batch. Return rows of one length, or type objective=regression; a "
            "class of your own that leaves out what batch['target_mask'] [B, T] does not name says "
            "uses_target_mask = True."
        )


def chunk_asked(objective: Objective) -> int | str:
    """Tokens whose logits exist at a time, as `Chunked.chunk`; 0 for objectives that take whole logits."""
    return objective.chunk if isinstance(objective, Chunked) else 0


COLUMNS = frozenset({"step", "seen", "loss", "lr", "norm", "loss_scale", "skipped_steps", *OF_THE_MACHINE})
"""Columns of every row of metrics.jsonl; no metric may have one of these names."""
Shapes = dict[str, list[int]]
"""Name -> shape of the sums of a batch; the loss is `loss`."""


def counted(objective: Objective, batch: Batch) -> float:
    """The objective's count of a batch. Raises WordsError unless it is a finite number >= 0."""
    count: Any = objective.count(batch)
    if type(count) is int and count >= 0:
        return count
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    number = float(count) if isinstance(count, Real) else math.nan
    if not 0 <= number < math.inf:
        has = count if isinstance(count, Real) else an(count)
        raise WordsError(
            f"objective {type(objective).__name__}: its count returned {has}. Let it return what the sum of the batch "
            "is divided by, a finite number >= 0: how many targets count, or the sum of their weights."
        )
    return number


def loss_of(objective: Objective, outputs: Any, batch: Batch, first: Shapes | None = None) -> Loss:
    """Call the objective's `loss`. Raises WordsError unless it returns a Loss whose sums have the names and shapes of
    the `first` batch; the first call fills `first`.
    """
    try:
        loss = objective.loss(outputs, batch)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise WordsError(
            f"objective {type(objective).__name__}: it computes with logits that tensor.loss=split leaves split over "
            "the vocabulary. Type tensor.loss=whole, or take them by dtrain.objective.answer(outputs)."
        ) from error
    if not isinstance(loss, Loss):
        raise WordsError(
            f"objective {type(objective).__name__}: its loss returned {an(loss)}. "
            "Let it return dtrain.objective.Loss(sum), the sum over the batch; dtrain divides it by the count."
        )
    for name, value in loss.metrics.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_complex():
            kind = f"of {value.dtype}" if isinstance(value, Tensor) else f"{an(value)}"
            raise WordsError(
                f"objective {type(objective).__name__}: its metric {name!r} is {kind}. Metrics must be tensors of "
                "real numbers, named by strings."
            )
        check_name(objective, name, "metric")
    shapes: Shapes = {"loss": list(loss.sum.shape)} | {name: list(value.shape) for name, value in loss.metrics.items()}
    if first is not None and not first:
        first.update(shapes)
    elif first is not None and first != shapes:
        raise WordsError(_differ(objective, "in all batches", first, shapes))
    return loss


def check_name(objective: Objective, name: str, what: str) -> None:
    """Raises WordsError for a name that is empty or a column of dtrain's own."""
    if name in COLUMNS or name.startswith(("lr_", "eval_")) or not name.strip():
        raise WordsError(
            f"objective {type(objective).__name__}: its {what} is called {name!r}, a name that dtrain uses itself. "
            "Give it another name."
        )


def agreed(objective: Objective, mine: Shapes, mesh: Mesh) -> Shapes:
    """The shapes of the sums. All ranks call it; ranks without the last pipeline stage have none. Raises WordsError if
    the ranks disagree.
    """
    known = [each for each in mesh.gather(list(mine.items())) if each] if mesh.world > 1 else [list(mine.items())]
    other = next((each for each in known if each != known[0]), None)
    if other:
        raise WordsError(_differ(objective, "on all ranks", dict(known[0]), dict(other)))
    return dict(known[0]) if known else {}


def _differ(objective: Objective, where: str, first: Shapes, other: Shapes) -> str:
    pairs = ((name, first.get(name, "missing"), other.get(name, "missing")) for name in {**first, **other})
    odd = [f"{name} {one} and {two}" for name, one, two in pairs if one != two]
    return (
        f"objective {type(objective).__name__}: names or shapes of its sums are not the same {where}: "
        f"{', '.join(odd) or 'they come in another order'}. "
        "Always return all of them, in the same shapes; use zero for what a batch does not have."
    )


def answer(outputs: Any) -> Tensor:
    """The logits, computed if a chunked loss has put them off, gathered if tensor parallelism left them split."""
    logits = settled(logits_of(outputs))
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def logits_of(outputs: Any, losses: Collection[str] = ()) -> Tensor:
    """The tensor that a model returned, bare or as `logits` of an object or a mapping.

    Raises WordsError if there are no logits or, with gradients enabled, if the model returns a loss that is not in
    `losses` and would be dropped.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(logits, Tensor) and logits.is_complex():
        raise WordsError(
            f"model: it returns complex numbers ({str(logits.dtype).removeprefix('torch.')}), and a loss is of real "
            "ones. Return their absolute values (out.abs()), or both parts (torch.view_as_real(out))."
        )
    if not isinstance(logits, Tensor):
        raise WordsError(
            f"model: it returns {an(outputs)}. A tensor is needed, or an object or a mapping with `logits`."
        )
    if torch.is_grad_enabled():
        for name in losses_of(outputs):
            if name not in losses:
                raise WordsError(_dropped(name))
    return logits


def losses_of(outputs: Any) -> dict[str, Tensor]:
    """The losses that a model returned beside its logits: `loss` and names in `_loss`, if they have a gradient."""
    if isinstance(outputs, Tensor):
        return {}
    fields = getattr(outputs, "_asdict", lambda: _fields(outputs))()
    names = [name for name in fields if isinstance(name, str) and (name == "loss" or name.endswith("_loss"))]
    return {name: fields[name] for name in names if isinstance(fields[name], Tensor) and fields[name].requires_grad}


def add_losses(loss: Loss, outputs: Any, weights: Mapping[str, float], count: int | Tensor) -> Loss:
    """`loss` plus the weighted losses of the model, each a mean over the `count` targets of this microbatch."""
    if not weights:
        return loss
    returned = _fields(outputs)
    total, metrics = loss.sum, dict(loss.metrics)
    for name, weight in weights.items():
        value = returned.get(name)
        if not isinstance(value, Tensor) or value.numel() != 1:
            if not torch.is_grad_enabled():  # some models compute it only in training
                continue
            raise WordsError(
                f"objective.losses.{name}={weight:g}: the model returns no number called {name}. Leave it out, or "
                "have the model return it (Hugging Face's routers: model.config.output_router_logits=true)."
            )
        if weight:
            summed = sum_of(value.float().reshape(()), count)
            total, metrics["model_loss" if name == "loss" else name] = total + weight * summed, summed.detach()
    return Loss(total, metrics)


def sum_of(mean: Tensor, count: int | Tensor) -> Tensor:
    """The sum of `count` terms with this mean; 0 of none, whose mean is nan. Both 0-dim."""
    return mean.where(count > 0, 0.0) * count if isinstance(count, Tensor) else mean * count


def _fields(outputs: Any) -> Mapping[str, Any]:
    return outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})


def _dropped(name: str) -> str:
    if name == "loss":
        return (
            "model: it returns a `loss` of its own beside the logits, so it is not clear which loss to train on. Type "
            "objective=own to train on the model's, objective.losses.loss=0 to ignore it, or give the model no labels "
            "(data.inputs)."
        )
    return (
        f"model: it returns `{name}`, which would be dropped. Type objective.losses.{name}=<weight> to add it to the "
        f"loss (Hugging Face's routers: router_aux_loss_coef of the config) or objective.losses.{name}=0 to ignore it, "
        "together with the name of the objective, such as objective=next_token."
    )


def nats(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross entropy in nats, summed over the `targets` [N, ...] that are not IGNORE: -log softmax(logits)[target] for
    `logits` [N, classes, ...], times the weight of the target if there are `weights` [classes]. Raises WordsError for a
    target outside of the classes.
    """
    try:
        return F.cross_entropy(logits.float(), targets, weights, ignore_index=IGNORE, reduction="sum")
    except IndexError:
        check_targets(targets, logits.shape[1])
        raise


def check_targets(targets: Tensor, classes: int) -> None:
    """Raises WordsError for a target outside of the `classes` of the model."""
    outside = targets[(targets != IGNORE) & ((targets < 0) | (targets >= classes))]
    if len(outside):
        raise WordsError(
            f"data: a target is {int(outside[0])}, but the model has {classes} classes, 0 to {classes - 1}. "
            "Give the model more outputs (model.outputs, data.outputs, vocab_size, or of model=hf "
            "model.config={num_labels: <classes>}), or set targets that do not count to -100."
        ) from None
