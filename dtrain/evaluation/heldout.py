"""The loss on held-out data: the same samples on every mesh, divided among the data-parallel ranks.

Every forward starts from the buffers of training and its own random seed, so it does not depend on earlier forwards.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from dtrain import compile
from dtrain.data import Batch, Source
from dtrain.data.stream import to_device
from dtrain.errors import WordsError, about_data
from dtrain.evaluation.metrics import Metrics
from dtrain.loop.step import Compare, call, check, compared, inputs_of
from dtrain.mesh import Mesh
from dtrain.model import evaluating, seeds
from dtrain.model.limits import Limits, limits_of
from dtrain.objective import Objective, Shapes, agreed, check_padded, chunk_asked, counted, loss_of
from dtrain.objective.figures import figures
from dtrain.objective.head import deferring, is_compiled
from dtrain.optim.ema import EMA
from dtrain.parallel.context import Context
from dtrain.precision import Precision

NO_TARGET = (
    "data: no target of the held-out samples counts (all are -100, or rows of one token have no next one), so there "
    "is no held-out loss. Name other held-out data, or none."
)
DRAWS = (
    "the model still draws random numbers in evaluation (of {}): its held-out loss differs from mesh to mesh. "
    "For F.dropout, pass training=self.training."
)


def chosen(source: Source, samples: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of `samples` samples, spread evenly over the source; None means all."""
    count = len(source) if samples is None else min(samples, len(source))
    return np.arange(count, dtype=np.int64) * len(source) // max(1, count)


def check_targets(sources: Mapping[str, Source], objective: Objective, samples: int | None) -> None:
    """Raises WordsError for a source, by name as in `each`, none of whose targets counts. Reads up to the first sample
    with one.
    """
    for name, source in sources.items():
        with _named(name):
            indices = chosen(source, 0 if source.dense else samples)
            alone = (source.take(indices[i : i + 1], np.zeros(1, np.int64)) for i in range(len(indices)))
            if len(indices) and not any(counted(objective, sample) for sample in alone):
                raise WordsError(NO_TARGET)


def each(model: nn.Module, sources: Mapping[str, Source], *arguments: Any, **options: Any) -> dict[str, float]:
    """Like `evaluate`, of several sources by name: `eval_<name>_loss`; of that with an empty name `eval_loss`. Empty if
    cut short.
    """
    metrics = dict[str, float]()
    for name, source in sources.items():
        with _named(name):
            figures = evaluate(model, source, *arguments, **options)
        if not figures:
            return {}
        named = f"eval_{name}_" if name else "eval_"
        metrics |= {figure.replace("eval_", named, 1): value for figure, value in figures.items()}
    return metrics


def _named(name: str) -> AbstractContextManager[None]:
    """A context whose errors name a further set."""
    return about_data(f"evaluate.sets.{name}") if name else nullcontext()


def measure(
    model: nn.Module, sources: Mapping[str, Source], *arguments: Any, ema: EMA | None, **options: Any
) -> dict[str, float]:
    """Like `each`, and also measures the averaged weights (`eval_ema_loss` and so on). Empty if cut short."""
    metrics = each(model, sources, *arguments, **options)
    if ema and metrics:
        with ema.instead(model):
            averaged = each(model, sources, *arguments, **options)
        metrics |= {name.replace("eval_", "eval_ema_", 1): value for name, value in averaged.items()}
        return metrics if averaged else {}
    return metrics


def evaluate(
    model: nn.Module,
    source: Source,
    objective: Objective,
    mesh: Mesh,
    *,
    precision: Precision,
    samples: int | None,
    microbatch: int,
    metrics: Metrics | None = None,
    context: Context | None = None,
    reference: Compare | None = None,
    enough: Callable[[], bool] = lambda: False,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """`eval_loss` and the objective's metrics over the held-out samples. Raises WordsError if no target counts.

    All ranks call it and run the same number of forwards. `metrics`: figures of whole logits. `enough` is called before
    each forward, on all ranks: True cuts the evaluation short, without metrics. `tell` is called with a warning if the
    model draws random numbers.
    """
    indices, first, limits = chosen(source, samples), Shapes(), limits_of(model)
    sums, count = dict[str, torch.Tensor](), 0.0
    deferred = partial(deferring, 0 if metrics else chunk_asked(objective), compiled=is_compiled(model))
    if metrics:
        metrics.begin()
    with evaluating(model) as put_back:
        for start in range(0, len(indices), microbatch * mesh.data_ranks):
            if enough():
                return {}
            begin = start + mesh.data_rank * microbatch
            idle = begin >= len(indices)
            mine = indices[:1] if idle else indices[begin : begin + microbatch]
            batch = _taken(source, mine, limits, objective)
            if context or (mesh.shape.tp > 1 and start == 0):
                check(model, objective, to_device(batch, mesh.device), context, mesh=mesh, precision=precision)
            batch = context.split(batch) if context else batch
            count += 0 if idle else counted(objective, batch)
            batch = to_device(batch, mesh.device)
            compile.begin()
            seeds.reseed(0, start, mesh.batch_rank)
            with deferred(), precision.autocast(mesh.device), context.active() if context else nullcontext():
                outputs = call(model, inputs_of(objective, batch, context))
                loss = loss_of(objective, outputs, compared(reference, batch, objective, context), first)
                if metrics:
                    metrics.add(outputs, batch, counts=not idle)
            drawn = seeds.drawn(0, start, mesh.batch_rank) if start == 0 else []
            if drawn:
                tell(DRAWS.format(", ".join(drawn)))
            put_back()
            for name, value in (("loss", loss.sum), *loss.metrics.items()):
                value = torch.zeros_like(value, dtype=torch.float64) if idle else value.double()
                sums[name] = sums[name] + value if name in sums else value
    agreed(objective, first, mesh)
    counts = torch.full((1,), count, device=mesh.device, dtype=torch.float64)
    *totals, whole = mesh.sum(torch.cat([*(value.reshape(-1) for value in sums.values()), counts])).tolist()
    if len(indices) and not whole:
        raise WordsError(NO_TARGET)
    known = figures(objective, {name: value.shape for name, value in sums.items()}, totals, whole)
    return {f"eval_{name}": value for name, value in (known | (metrics.figures() if metrics else {})).items()}


def _taken(source: Source, index: np.ndarray[Any, Any], limits: Limits, objective: Objective) -> Batch:
    """Samples that the model and the objective can take. Raises WordsError."""
    batch = source.take(index, np.zeros_like(index))
    limits.check(batch)
    check_padded(objective, batch)
    return batch
