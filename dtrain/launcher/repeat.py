"""A loop that runs another one several times on one rank, in forks of this process or in new interpreters, and then in
this process, so that only model and data can make the runs differ.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.build import locate
from dtrain.launcher import process
from dtrain.launcher.rank import run_rank
from dtrain.planned import BatchShape, Plan
from dtrain.result import Result
from dtrain.storage import options, store

HASH_SEED = "PYTHONHASHSEED"
"""Variable from which Python seeds hash(); without it every interpreter has a seed of its own, and its forks share it
(https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED).
"""


def repeat(plan: Plan) -> Result:
    """Run `loop` for each of `others` (out -> changes), then for this plan; both are read from `plan.checkpoint`. The
    changes are `microbatch`, `fresh`, true for a new interpreter, and more arguments of the checkpoint. If one of the
    others fails, so does this one, with the reason.
    """
    part = dict(plan.checkpoint)
    name, others = part.pop("loop"), part.pop("others")
    loop = locate(name)
    for out, changes in others.items():
        other = _changed(replace(plan, loop=name, checkpoint=part, out=out), **changes)
        if not changes.get("fresh") or not _in_an_interpreter(other):
            os.waitpid(process.fork(lambda other=other: _quietly(loop, other)), 0)  # type: ignore[misc]
    result: Result = loop(replace(plan, checkpoint=part))
    return result


def _changed(plan: Plan, *, microbatch: int, fresh: bool = False, stop_after: int | None = None, **more: Any) -> Plan:
    size = plan.batch.size
    return replace(
        plan,
        batch=BatchShape(size, microbatch, 1, size // microbatch),
        stop_after=stop_after or plan.stop_after,
        checkpoint={**plan.checkpoint, **more},
    )


def _quietly(loop: Any, plan: Plan) -> None:
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nowhere.fileno(), 2)
    loop(plan)


def _in_an_interpreter(plan: Plan) -> bool:
    """Whether a new interpreter, whose hash() has another seed unless the user chose one, ran the plan to its end."""
    code = (
        "import json, sys; sys.path[:], *request = json.load(sys.stdin); from dtrain.launcher import process, repeat; "
        "process.die_with(int(sys.argv[1])); repeat.run(*request)"
    )
    chosen = os.environ.get(HASH_SEED, "random")
    environment = {**os.environ, HASH_SEED: "1" if chosen == "random" else chosen}
    request = json.dumps([sys.path, plan.to_dict(), options.hand_over()])
    command: Sequence[str] = [sys.executable, "-P", "-c", code, str(os.getpid())]
    done = subprocess.run(
        command, input=request.encode(), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if done.returncode:
        store.remove(plan.out)
    return not done.returncode


def run(plan: Mapping[str, Any], storage: str) -> None:
    """In that interpreter. `storage`: as `dtrain.storage.options.hand_over` gives it."""
    options.take_over(storage)
    with store.anchored():
        run_rank(Plan.from_dict(plan))
