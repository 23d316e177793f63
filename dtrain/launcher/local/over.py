"""The outcome of a run, in <scratch>/over.json: written by the server, read by the command."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.errors import EXIT_CODES, DtrainError
from dtrain.storage import store


def write_over(scratch: Path, over: Mapping[str, Any]) -> None:
    store.write(str(scratch / "over.json"), json.dumps(over).encode())


def exit_code(scratch: Path) -> int:
    """The exit code of the run, for the agents of nodes that another launcher started."""
    over = json.loads((scratch / "over.json").read_text("utf-8"))
    if over["stopped_by"]:
        return EXIT_CODES["interrupted" if over["stopped_by"] == signal.SIGINT else "preempted"]
    result = scratch / f"round-{over['round']}" / "result.json"
    if over["error"] or not result.exists():
        return int(over.get("exit_code", DtrainError.exit_code))
    return EXIT_CODES[json.loads(result.read_text("utf-8"))["status"]]
