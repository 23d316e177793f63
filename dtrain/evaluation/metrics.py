"""The metrics of `evaluate.metrics` over one pass of held-out data, on any mesh: dtrain's own, those of torchmetrics,
and classes with its `update` and `compute`.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.build import build
from dtrain.config.facts import about
from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError, an, first_line
from dtrain.loop.assemble import Parts
from dtrain.mesh import Mesh
from dtrain.model.labels import names_in
from dtrain.objective import answer
from dtrain.planned import Part

LABELS = ("classification", "next_token")
"""Tasks whose targets are classes."""


class Metrics:
    """`begin` a pass, `add` the outputs of each batch, then take the `figures`. All ranks call these alike. `names`: of
    the classes, for figures of each.

    Raises WordsError for an object that is no metric.
    """

    def __init__(
        self, parts: Mapping[str, Part], *, task: str | None, mesh: Mesh, names: Sequence[str] | None = None
    ) -> None:
        self._task, self._mesh, self._names = task, mesh, names or []
        self._metrics = {name: _made(name, part, mesh) for name, part in parts.items()}
        self._parts: dict[str, list[Tensor]] = {}

    def begin(self) -> None:
        """Forget what was added."""
        self._parts = {name: [] for name in self._metrics}
        for metric in self._metrics.values():
            if _is_theirs(metric):
                metric.reset()

    def add(self, outputs: Any, batch: Batch, *, counts: bool) -> None:
        """Add a batch; without `counts` it is there for the other ranks alone."""
        if not self._metrics:
            return
        scores, targets = self._paired(answer(outputs).detach(), batch)
        if not counts:
            scores, targets = scores[:0], targets[:0]
        for name, metric in self._metrics.items():
            if not _is_theirs(metric):
                part, parts = _part(name, metric, scores, targets, beside=self._parts[name]), self._parts[name]
                if metric.rows:
                    parts.append(part)
                else:
                    parts[:] = [sum(parts, part.double())]
            elif len(targets):
                _update(name, metric, scores, targets)

    def figures(self) -> dict[str, float]:
        """Name -> figure over the samples of all ranks."""
        figures = dict[str, float]()
        for name, metric in self._metrics.items():
            if _is_theirs(metric):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a rank may have had no samples
                    figures |= _numbers(name, metric.compute(), self._names)
            elif metric.rows:
                rows = gathered(torch.cat(self._parts[name]), self._mesh)
                figures[name] = _number(f"the value of {name}", metric.value(torch.cat(rows)))
            else:
                value = metric.value(self._mesh.sum(self._parts[name][0]))
                several = isinstance(value, Mapping)
                figures |= (
                    _numbers(name, value, self._names) if several else {name: _number(f"the value of {name}", value)}
                )
        return figures

    def try_out(self, classes: int) -> None:
        """Call each class of the user's own with made-up samples: what it returns is judged before the first step. What
        it raises is not: two samples may be too few.
        """
        scores = torch.linspace(-1, 1, 2 * classes, device=self._mesh.device).view(2, classes)
        targets = torch.tensor([0, classes - 1], device=self._mesh.device)
        for name, metric in self._metrics.items():
            if _is_theirs(metric) or type(metric).__module__.startswith("dtrain."):
                continue
            parts, value = list[Tensor](), list[Any]()
            for _ in range(2):
                try:
                    parts.append(_part(name, metric, scores, targets, beside=parts))
                except WordsError:
                    raise
                except Exception:
                    break
            else:
                with suppress(Exception):
                    value.append(metric.value(torch.cat(parts) if metric.rows else (parts[0] + parts[1]).double()))
            for each in value:
                _number(f"the value of {name}", each)

    def _paired(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Scores [N, classes] and the targets [N] that count; both as the targets are, if these are no classes, or
        those of rows that were padded, one after the other.
        """
        targets = batch["targets"]
        if self._task not in LABELS:
            outputs = outputs.view_as(targets) if outputs.numel() == targets.numel() else outputs
            mask = batch.get("target_mask")
            return (outputs, targets) if mask is None else (outputs[mask], targets[mask])
        scores = outputs if self._task != "classification" else outputs.movedim(1, -1)
        counts = targets != IGNORE
        return scores[counts], targets[counts].long()


def metrics_of(parts: Parts) -> Metrics | None:
    """Those of a plan; None if it has none. Raises WordsError for one that says nothing about so few classes."""
    plan, facts = parts.plan, parts.source.facts if parts.plan.evaluate_metrics else {}
    for name, part in plan.evaluate_metrics.items():
        fewest, classes = about(part).get("classes", 0), facts.get("outputs", facts.get("vocab"))
        if isinstance(classes, int) and classes < fewest:
            raise WordsError(f"evaluate.metrics: {name} says nothing about {classes} classes. Leave it out.")
    if not plan.evaluate_metrics:
        return None
    task, classes = about(plan.objective).get("task"), facts.get("outputs", facts.get("vocab"))
    names = facts.get("class_names") or names_in(parts.model)
    metrics = Metrics(plan.evaluate_metrics, task=task, mesh=parts.mesh, names=names)
    if task in LABELS and isinstance(classes, int):
        metrics.try_out(classes)
    return metrics


def gathered(rows: Tensor, mesh: Mesh) -> list[Tensor]:
    """`rows` of each rank of the batch, in their order; lengths may differ, ranks without any are left out unless all
    are. All ranks call it.
    """
    if mesh.batch_ranks == 1:
        return [rows]
    rows = rows.contiguous()
    known = mesh.gather([list(rows.shape), str(rows.dtype).removeprefix("torch.")])
    group = mesh.group("batch")
    others = [known[rank] for rank in dist.get_process_group_ranks(group)]
    data = rows.reshape(-1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
    sizes = [math.prod(shape) * getattr(torch, kind).itemsize for shape, kind in others]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=mesh.device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in others]
    dist.all_gather(parts, padded, group=group)
    return [
        part[:size].view(getattr(torch, kind)).view(shape)
        for part, size, (shape, kind) in zip(parts, sizes, others, strict=True)
        if size
    ] or [rows]


def _is_theirs(metric: Any) -> bool:
    """Whether it has the methods of torchmetrics, and not ours."""
    return not hasattr(metric, "part")


def _made(name: str, part: Part, mesh: Mesh) -> Any:
    """The metric of a part; one of torchmetrics on the device, with our way to gather its states."""
    metric = build(part)
    if not _is_theirs(metric):
        if lacks := [each for each in ("rows", "value") if not hasattr(metric, each)]:
            raise WordsError(
                f"evaluate.metrics: {part['_target_']} is {an(metric)}, which has `part` but not "
                f"{' and '.join(f'`{each}`' for each in lacks)} (dtrain.metric.Metric)."
            )
        return metric
    if not all(hasattr(metric, method) for method in ("update", "compute", "reset")):
        raise WordsError(
            f"evaluate.metrics: {part['_target_']} is {an(metric)}, which has neither `part` and `value` "
            "(dtrain.metric.Metric) nor `update`, `compute` and `reset` (torchmetrics)."
        )
    if not hasattr(metric, "dist_sync_fn"):
        if mesh.batch_ranks > 1:
            raise WordsError(
                f"evaluate.metrics: {part['_target_']} cannot add up what several ranks saw. Derive it from "
                "torchmetrics.Metric, or give it `part` and `value` (dtrain.metric.Metric)."
            )
        return metric
    metric.dist_sync_fn = lambda state, group=None: gathered(state, mesh)
    return metric.to(mesh.device)


def _update(name: str, metric: Any, scores: Tensor, targets: Tensor) -> None:
    """Pass samples to a metric of torchmetrics. Those of two classes take the probability of class 1."""
    if scores.ndim == 2 and scores.shape[1] == 2 and any(k.__name__.startswith("Binary") for k in type(metric).__mro__):
        scores = scores.float().softmax(1)[:, 1]
    try:
        metric.update(scores, targets)
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise WordsError(
            f"evaluate.metrics: {type(metric).__name__} does not take scores {list(scores.shape)} and targets "
            f"{list(targets.shape)} of this run: {first_line(error)}."
        ) from error


def _part(name: str, metric: Any, scores: Tensor, targets: Tensor, *, beside: Sequence[Tensor]) -> Tensor:
    """The part of some samples, which can be put together with those `beside` it. Raises WordsError."""
    part = metric.part(scores, targets)
    if not isinstance(part, Tensor):
        raise WordsError(
            f"evaluate.metrics: the part of {name} is {an(part)}, {str(part)[:60]!r}. Let `part` return a tensor: "
            "numbers that are added up, or with rows = True rows that are put together."
        )
    if metric.rows and part.ndim == 0:
        raise WordsError(
            f"evaluate.metrics: the part of {name} is one number, and its rows are put together. Let `part` return a "
            "tensor with a row per sample, or set rows = False."
        )
    start = 1 if metric.rows else 0
    if beside and part.shape[start:] != beside[0].shape[start:]:
        raise WordsError(
            f"evaluate.metrics: the parts of {name} have the shapes {list(beside[0].shape)} and {list(part.shape)}. "
            "Numbers that are added up have one shape for every batch; rows (rows = True) may differ in their number."
        )
    return part


def _number(what: str, value: Any) -> float:
    """A figure. Raises WordsError if it is not one number."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    # a tensor with several elements raises RuntimeError
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    shape = f" of the shape {list(value.shape)}" if isinstance(value, Tensor) else f", {str(value)[:60]!r}"
    raise WordsError(f"evaluate.metrics: {what} is {an(value)}{shape}. Let it return one number.")


def _numbers(name: str, value: Any, classes: Sequence[str]) -> dict[str, float]:
    """A figure, or one for each name or place of several; of each class, or pair of classes, by their names."""
    if isinstance(value, Mapping) and all(isinstance(each, Tensor) and each.ndim for each in value.values()):
        return {
            end: figure
            for key, each in value.items()
            for end, figure in _numbers(f"{name}_{key}", each, classes).items()
        }
    if isinstance(value, Mapping):
        return {f"{name}_{key}": _number(f"{key} of {name}", each) for key, each in value.items()}
    if not isinstance(value, Tensor) or value.numel() == 1:
        return {name: _number(f"the result of compute of {name}", value)}
    is_of_classes = {*value.shape} == {len(classes)}
    places = product(classes, repeat=value.ndim) if is_of_classes else ([str(each)] for each in range(value.numel()))
    ends = ("_".join(place) for place in places)
    return {f"{name}_{end}": float(each) for end, each in zip(ends, value.reshape(-1).tolist(), strict=True)}
