"""batch = microbatch x data-parallel ranks x accumulate: any two give the third. In a pipeline `accumulate` counts its microbatches."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import BatchShape
from dtrain.resolve.pipeline import SCHEDULES, check_microbatches


def arithmetic(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    schedule = draft["pipeline"].schedule
    chosen = draft.get("microbatch") if not config.accumulate else None  # by strategy=auto
    shape = _shape(config, config.microbatch or chosen, draft["mesh"].data, draft["mesh"].pp)
    wrong = check_microbatches(schedule, shape.accumulate, draft["mesh"].pp) if draft["mesh"].pp > 1 else None
    if wrong:
        raise WordsError(wrong)
    return {"batch": shape}


def _shape(config: Config, micro: int | None, data: int, pp: int) -> BatchShape:
    batch, accumulate = config.batch, config.accumulate
    if micro and accumulate:
        product = micro * data * accumulate
        if "batch" in config.sources and batch != product:
            raise WordsError(
                f"batch={batch} is not microbatch={micro} x {data} data-parallel ranks x accumulate={accumulate} = {product}. Leave one of the three out."
            )
        return BatchShape(product, micro, data, accumulate)
    step = data * (micro or accumulate or 1)
    if batch % step:
        low, high = batch // step * step, -(-batch // step) * step
        parts = f"microbatch={micro} on " if micro else f"accumulate={accumulate} on " if accumulate else ""
        raise WordsError(
            f"batch={batch} does not split over {parts}{data} data-parallel ranks. Nearest: {f'batch={low} or ' if low else ''}batch={high}."
        )
    local = batch // data
    if pp > 1 and not micro and not accumulate:
        accumulate = _for_pipeline(local, pp, config.pipeline.schedule)
    micro = micro or local // (accumulate or 1)
    return BatchShape(batch, micro, data, local // micro)


def _for_pipeline(local: int, pp: int, schedule: str) -> int:
    """Microbatches of `local` samples: enough to fill the pipeline twice if there are as many, in a number that the schedule takes."""
    fitting = [count for count in range(1, local + 1) if local % count == 0 and not check_microbatches(schedule, count, pp)]
    least = 2 * max(pp, SCHEDULES[schedule].least(pp) // 2)
    return next((count for count in fitting if count >= least), fitting[-1] if fitting else local)
