"""batch = microbatch x data-parallel ranks x accumulate: any two give the third. In a pipeline, `accumulate` is the
number of microbatches.
"""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import BatchShape, PipelineShape
from dtrain.resolve.mesh import divisors
from dtrain.resolve.pipeline import check_microbatches, least

MOST = 1_000_000_000
"""Largest batch that is accepted, in samples."""


def arithmetic(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    shape = _shape(config, config.microbatch or config.objective.get("together"), draft)
    wrong = check_microbatches(draft["pipeline"], shape.accumulate, draft["mesh"].pp) if draft["mesh"].pp > 1 else None
    if wrong:
        raise WordsError(wrong)
    return {"batch": shape}


def _shape(config: Config, micro: int | None, draft: Mapping[str, Any]) -> BatchShape:
    batch, accumulate, data, pp = config.batch, config.accumulate, draft["mesh"].data, draft["mesh"].pp
    if micro and accumulate:
        product = micro * data * accumulate
        if "batch" in config.sources and batch != product:
            raise WordsError(
                f"batch={batch} is not microbatch={micro} x {data} data-parallel ranks x accumulate={accumulate} = "
                f"{product}. Leave one of the three out."
            )
        if product > MOST:
            raise WordsError(
                f"microbatch={micro} x {data} data-parallel ranks x accumulate={accumulate} = {product} samples: "
                f"at most {MOST} are allowed."
            )
        return BatchShape(product, micro, data, accumulate)
    step = data * (micro or accumulate or 1)
    if batch % step:
        sizes = {"microbatch": micro, "accumulate": accumulate}
        parts = next((f"{name}={size} on " for name, size in sizes.items() if size), "")
        raise WordsError(
            f"batch={batch} does not split over {parts}{data} data-parallel ranks. "
            f"{_nearest(batch, step, draft['nodes'], draft['elastic'])}"
        )
    local = batch // data
    if pp > 1 and not micro and not accumulate:
        accumulate = _for_pipeline(local, pp, draft["pipeline"])
    micro = micro or local // (accumulate or 1)
    return BatchShape(batch, micro, data, local // micro)


def _nearest(batch: int, step: int, nodes: int, elastic: str) -> str:
    """Suggest what to type instead of a batch that is no multiple of `step`; with a range of nodes, every count has to
    divide it.
    """
    if elastic and step % nodes == 0:
        fewest, most = map(int, elastic.split(":"))
        step = step // nodes * math.lcm(*range(fewest, most + 1)) if most - fewest < 40 else MOST
        if step >= MOST:
            return f"Type nodes={most}, or a shorter range of nodes, every one of which divides the batch."
    low, high = batch // step * step, -(-batch // step) * step
    return f"Nearest: {f'batch={low} or ' if low else ''}batch={high}."


def _for_pipeline(local: int, pp: int, shape: PipelineShape) -> int:
    """Number of microbatches that `local` samples are split into: at least two per stage if possible, and a number that
    the schedule accepts.
    """
    fitting = [count for count in divisors(local) if not check_microbatches(shape, count, pp)]
    enough = max(2 * pp, least(shape, pp))
    return next((count for count in fitting if count >= enough), fitting[-1] if fitting else local)
