"""A loop that runs another one several times on one rank, in forks of this process and then in this process, so that
only model and data can make the runs differ.
"""

import os
from dataclasses import replace
from typing import Any

from dtrain.build import locate
from dtrain.launcher import process
from dtrain.planned import BatchShape, Plan
from dtrain.result import Result


def repeat(plan: Plan) -> Result:
    """Run `loop` for each of `others` (out -> microbatch), then for this plan; both are read from `plan.checkpoint`. If
    one of the others fails, so does this one, with the reason.
    """
    part = dict(plan.checkpoint)
    loop, others, size = locate(part.pop("loop")), part.pop("others"), plan.batch.size
    for out, micro in others.items():
        other = replace(plan, checkpoint=part, out=out, batch=BatchShape(size, micro, 1, size // micro))
        os.waitpid(process.fork(lambda other=other: _quietly(loop, other)), 0)  # type: ignore[misc]
    result: Result = loop(replace(plan, checkpoint=part))
    return result


def _quietly(loop: Any, plan: Plan) -> None:
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nowhere.fileno(), 2)
    loop(plan)
