"""The objective, which is minimised. It returns sums, and the count they are to be divided by: the mean is then right
on every mesh.

Means of means are wrong as soon as two microbatches count differently
(https://github.com/huggingface/transformers/issues/34242).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.result import OF_THE_MACHINE


@dataclass(frozen=True)
class Loss:
    """Sums over one microbatch, on the device, which are added over microbatches, ranks and, of held-out data, all
    batches.

    They have the same names and shapes in every batch. `sum` and each number of `metrics` is then divided by the count.
    A tensor with dims, such as a histogram or the counts of a confusion matrix, is for `figures` alone.
    """

    sum: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    @property
    def unit(self) -> str:
        """The unit of the throughput: `tokens` or `samples`."""
        ...

    def count(self, batch: Batch) -> int:
        """The number of terms in the sum over this batch; read on the CPU, before the batch moves to the device."""
        ...

    def inputs(self, batch: Batch) -> Any:
        """The model's input: a tensor, or a mapping of keyword arguments."""
        ...

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        """An objective may also have `figures(sums, count) -> {name: number}`: what is no mean, out of all sums of the
        whole batch, or of the held-out data.

        `sums` holds the loss and the metrics by name: numbers, and fp64 tensors where they have dims.
        """
        ...


COLUMNS = frozenset({"step", "seen", "loss", "lr", "norm", *OF_THE_MACHINE})
"""Columns of every row, which no metric may be named."""
Shapes = dict[str, list[int]]
"""The name of the loss among the sums of a batch."""


def loss_of(objective: Objective, outputs: Any, batch: Batch, first: Shapes | None = None) -> Loss:
    """The objective's Loss of a forward. Raises WordsError unless it is a Loss of named tensors with the sums of the
    `first` batch, which is recorded.
    """
    found = objective.loss(outputs, batch)
    if not isinstance(found, Loss):
        raise WordsError(
            f"objective {type(objective).__name__}: its loss returned a {type(found).__name__}. "
            "Let it return dtrain.objective.Loss(sum): the sum over the batch, of which the mean is made by its count."
        )
    for name, value in found.metrics.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_complex():
            what = f"of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise WordsError(
                f"objective {type(objective).__name__}: its metric {name!r} is {what}. Let it be a tensor of real "
                "numbers, called by a text."
            )
        check_name(objective, name, "metric")
    shapes: Shapes = {"loss": list(found.sum.shape)} | {
        name: list(value.shape) for name, value in found.metrics.items()
    }
    if first is not None and not first:
        first.update(shapes)
    elif first is not None and first != shapes:
        raise WordsError(_differ(objective, "in all batches", first, shapes))
    return found


def check_name(objective: Objective, name: str, what: str) -> None:
    """Raises WordsError for a name that is a column of every row."""
    if name in COLUMNS or name.startswith(("lr_", "eval_")) or not name.strip():
        raise WordsError(
            f"objective {type(objective).__name__}: its {what} is called {name!r}, which rows of a run use otherwise. "
            "Call it something else."
        )


def agreed(objective: Objective, mine: Shapes, mesh: Mesh) -> Shapes:
    """The shapes of the sums, which must agree on all ranks; ranks without the last stage of a pipeline have none. All
    ranks call it. Raises WordsError.
    """
    known = [each for each in mesh.gather(list(mine.items())) if each] if mesh.world > 1 else [list(mine.items())]
    other = next((each for each in known if each != known[0]), None)
    if other:
        raise WordsError(_differ(objective, "on all ranks", dict(known[0]), dict(other)))
    return dict(known[0]) if known else {}


def _differ(objective: Objective, where: str, first: Shapes, other: Shapes) -> str:
    odd = [
        f"{name} {first.get(name, 'missing')} and {other.get(name, 'missing')}"
        for name in {**first, **other}
        if first.get(name) != other.get(name)
    ]
    return (
        f"objective {type(objective).__name__}: names or shapes of its sums are not the same {where}: "
        f"{', '.join(odd) or 'they come in another order'}. "
        "Give all of them always, in the same shapes; of what a batch lacks the sum is zero."
    )


def answer(outputs: Any) -> Tensor:
    """The logits, gathered if tensor parallelism left them split."""
    logits = logits_of(outputs)
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def logits_of(outputs: Any, losses: Collection[str] = ()) -> Tensor:
    """The tensor a model returned, bare or as `logits` of an object or a mapping; the caller takes `losses` of it as
    well.

    Raises WordsError when there are no logits, or where gradients flow when the model returns another loss, which would
    be dropped.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise WordsError(
            f"model: it returns a {type(outputs).__name__}. A tensor is needed, or an object or a mapping with "
            "`logits`."
        )
    if torch.is_grad_enabled():
        for name in losses_of(outputs):
            if name not in losses:
                raise WordsError(_dropped(name))
    return logits


def losses_of(outputs: Any) -> dict[str, Tensor]:
    """The losses that a model returned by name, beside its logits: `loss`, and each with the suffix `_loss` and a
    gradient.
    """
    if isinstance(outputs, Tensor):
        return {}
    fields = (
        outputs
        if isinstance(outputs, Mapping)
        else getattr(outputs, "_asdict", lambda: getattr(outputs, "__dict__", {}))()
    )
    return {
        name: value
        for name, value in fields.items()
        if isinstance(name, str)
        and (name == "loss" or name.endswith("_loss"))
        and isinstance(value, Tensor)
        and value.requires_grad
    }


def add_losses(loss: Loss, outputs: Any, weights: Mapping[str, float], count: int | Tensor) -> Loss:
    """`loss` plus the weighted losses of the model, each a mean over the `count` targets of this microbatch."""
    if not weights:
        return loss
    found = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    total, metrics = loss.sum, dict(loss.metrics)
    for name, weight in weights.items():
        value = found.get(name)
        if not isinstance(value, Tensor) or value.numel() != 1:
            if not torch.is_grad_enabled():  # some models compute it in training alone
                continue
            raise WordsError(
                f"objective.losses.{name}={weight:g}: the model returns no number called {name}. Leave it out, or "
                "have the model return it "
                "(Hugging Face's routers: model.config.output_router_logits=true)."
            )
        if weight:
            summed = value.float().reshape(()) * count
            total, metrics["model_loss" if name == "loss" else name] = total + weight * summed, summed.detach()
    return Loss(total, metrics)


def _dropped(name: str) -> str:
    if name == "loss":
        return (
            "model: it returns a `loss` of its own beside the logits, and two losses cannot both be meant. Type "
            "objective=own to train on the model's, "
            "objective.losses.loss=0 to leave it out, or give the model no labels (data.inputs)."
        )
    return (
        f"model: it returns `{name}`, which would be dropped. Type objective.losses.{name}=<weight> to add it to the "
        "loss "
        f"(Hugging Face's routers: what the config calls router_aux_loss_coef), objective.losses.{name}=0 to leave it "
        "out, "
        "beside the name of the objective, such as objective=next_token."
    )


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over `targets` [N, ...] but IGNORE of -log softmax(logits [N, classes, ...])[target]; 0-dim. Raises
    WordsError for a class that the model lacks.
    """
    try:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    except IndexError:
        check_targets(targets, logits.shape[1])
        raise


def check_targets(targets: Tensor, classes: int) -> None:
    """Raises WordsError for a target outside of the `classes` of the model."""
    outside = targets[(targets != IGNORE) & ((targets < 0) | (targets >= classes))]
    if len(outside):
        raise WordsError(
            f"data: a target is {int(outside[0])}, and the model gives {classes} classes, 0 to {classes - 1}. "
            "Give the model more outputs (model.outputs, data.outputs, vocab_size), or mark what does not count with "
            "-100."
        ) from None
