"""The launcher's server process: reads the plan from standard input, loads torch once and runs rounds until the run is
over.

python -m dtrain.launcher.local.server <pid of the command> <scratch folder>
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.config.environment import COLD
from dtrain.errors import PreflightError, StoreError, why
from dtrain.launcher import process
from dtrain.launcher.local.over import write_over
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.local.rounds import Rounds
from dtrain.launcher.title import retitle
from dtrain.launcher.warm import UnforkableError, warm
from dtrain.planned import Plan
from dtrain.secrets import screen
from dtrain.storage import options, store


def main(parent: int, scratch: Path) -> None:
    """Serve the request on standard input."""
    process.die_with(parent)
    screen.outlive_readers()
    secrets.guard()
    request, cold = sys.stdin.read(), os.environ.pop(COLD, "")
    try:
        serve(json.loads(request), scratch, cold=cold)
    except UnforkableError as error:
        error.begin_again(["dtrain.launcher.local.server", *sys.argv[1:]], request, cold=cold)


def forked(request: dict[str, Any], scratch: str) -> None:
    """Serve the request in a child of the zygote."""
    retitle(f"dtrain-server {scratch}")
    try:
        serve(dict(request), Path(scratch))
    except UnforkableError as error:
        parent = str(os.getppid())
        error.begin_again(["dtrain.launcher.local.server", parent, scratch], json.dumps(request), cold="")


def serve(request: dict[str, Any], scratch: Path, *, cold: str = "") -> None:
    """Load torch and the parts of the plan, except the modules of `cold`, then run the rounds. A system error is
    written to over.json. Raises UnforkableError.
    """
    try:
        process.claim(scratch)
        options.take_over(request.pop("storage"))
        plan = Plan.from_dict(request.pop("plan"))
        with store.anchored():
            warm(plan, cold)
            Rounds(plan, scratch, RestartLog.read(scratch), **request).run()
    except (OSError, StoreError) as error:
        sentence = f"the launcher cannot start: {why(error) if isinstance(error, OSError) else error}"
        over = {"round": -1, "error": sentence, "stopped_by": 0, "exit_code": PreflightError.exit_code}
        try:
            write_over(scratch, over)
        except StoreError:  # it is the disk
            screen.complain(sentence)
            sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
