"""batch = microbatch x data-parallel ranks x accumulate: any two give the third."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import BatchShape


def arithmetic(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    data, batch, micro, accumulate = draft["mesh"].data, config.batch, config.microbatch, config.accumulate
    if any(value is not None and value < 1 for value in (batch, micro, accumulate)):
        return {}  # numbers.positive says so
    if micro and accumulate:
        product = micro * data * accumulate
        if "batch" in config.sources and batch != product:
            raise WordsError(
                f"batch={batch} is not microbatch={micro} x {data} data-parallel ranks x accumulate={accumulate} = {product}. Leave one of the three out."
            )
        return {"batch": BatchShape(product, micro, data, accumulate)}
    step = data * (micro or accumulate or 1)
    if batch % step:
        low, high = batch // step * step, -(-batch // step) * step
        parts = f"microbatch={micro} on " if micro else f"accumulate={accumulate} on " if accumulate else ""
        raise WordsError(
            f"batch={batch} does not split over {parts}{data} data-parallel ranks. Nearest: {f'batch={low} or ' if low else ''}batch={high}."
        )
    local = batch // data
    micro = micro or local // (accumulate or 1)
    return {"batch": BatchShape(batch, micro, data, local // micro)}
