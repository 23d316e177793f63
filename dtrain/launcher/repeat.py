"""A loop that runs another one several times on one rank, in forks of this process and then in this one: nothing but
model and data can make them differ.
"""

import os
from dataclasses import replace
from typing import Any

from dtrain.build import locate
from dtrain.launcher import process
from dtrain.planned import BatchShape, Plan
from dtrain.result import Result


def repeat(plan: Plan) -> Result:
    """`plan.checkpoint` says which `loop`, and where the `others` go, each with its microbatch. If one of them fails,
    this one tells why.
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
