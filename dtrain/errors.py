"""Every way a run can be refused or fail, and the exit code each one means.

    DtrainError            1   training failed
    ├── WordsError         2   the words were wrong; carries every problem found, not the first
    └── PreflightError     3   storage, devices or ports are not as the plan needs them
        └── StoreError     3   one storage operation on one URL
    RankError              1   a rank raised; carries the first failing rank's traceback

0 is done, 75 preempted (run me again), 130 interrupted: see `dtrain.result.Result.exit_code`.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class DtrainError(Exception):
    """Base of all errors meant for the user: printed as one message, never as a traceback."""

    exit_code = 1


class WordsError(DtrainError):
    """The words cannot become a plan. `problems` holds one sentence per mistake, all found at once."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class PreflightError(DtrainError):
    """What the plan needs is not here: a device, a file, a place to write."""

    exit_code = 3


class StoreError(PreflightError):
    """A storage operation failed: says the URL, the operation, the cause."""

    @classmethod
    def during(cls, operation: str, url: str, cause: object) -> "StoreError":
        return cls(f"cannot {operation} {url}: {cause}")


class RankError(DtrainError):
    """One rank failed; the message is its traceback."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """` Did you mean strategy=fsdp?`, or all that is allowed when nothing is near."""
    names = sorted(allowed)
    near = get_close_matches(word, names, n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else f" Allowed: {', '.join(names)}."


def first_line(error: BaseException) -> str:
    """What an error says, without the rest."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
