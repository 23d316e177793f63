"""What a run that failed leaves: a file per rank that says what ended it, and which of them is the cause."""

import json
import re
import time
import traceback
from pathlib import Path

from dtrain import store
from dtrain.errors import DtrainError, PreflightError, RankError, WordsError
from dtrain.result import Result

LOST_PEER = re.compile(
    "connection (closed|reset|refused)|broken pipe|connectFullMesh|unhandled (system|cuda) error|remote process exited", re.IGNORECASE
)
"""What a rank says when another one is gone."""


def leave(folder: Path, rank: int, error: BaseException) -> None:
    """Say on a rank what went wrong, with the time: the earliest is the cause."""
    known = isinstance(error, DtrainError)
    message = str(error) if known else "".join(traceback.format_exception(error))
    facts = {"rank": rank, "time": time.time(), "message": message, "exit_code": error.exit_code if isinstance(error, DtrainError) else 1}
    store.write(str(folder / f"failure-{rank}-{time.monotonic_ns()}.json"), json.dumps(facts).encode())


def _silent(folder: Path, spoke: set[int]) -> list[int]:
    """Ranks that began and left neither a result nor a failure; where an agent saw which ended first, only those."""
    began, ended = ({int(path.name.split("-")[1]) for path in folder.glob(f"{what}-*")} - spoke for what in ("began", "ended"))
    return sorted(began & ended or began)


def outcome(folder: Path, code: int) -> Result:
    """The result rank 0 left, or the error of the rank that failed first."""
    if (folder / "result.json").exists():
        return Result(**json.loads((folder / "result.json").read_text()))
    failures = sorted((json.loads(path.read_text()) for path in folder.glob("failure-*.json")), key=lambda failure: float(failure["time"]))
    if not failures:
        raise RankError(
            f"rank {', '.join(map(str, _silent(folder, set())))} ended without a word: killed from outside, or out of memory (exit code {code})"
        )
    first = failures[0]
    silent = _silent(folder, {failure["rank"] for failure in failures})
    if silent and LOST_PEER.search(first["message"]):
        raise RankError(
            f"rank {silent[0]} ended without a word: killed from outside, or out of memory. The other ranks lost it while waiting for it."
        )
    if first["exit_code"] == WordsError.exit_code:
        raise WordsError(first["message"])
    if first["exit_code"] == PreflightError.exit_code:
        raise PreflightError(first["message"])
    raise RankError(f"rank {first['rank']} failed\n{first['message']}")
