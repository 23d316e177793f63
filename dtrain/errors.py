"""Every way a run can be refused or fail, and the exit code each one means.

    DtrainError            1   training failed
    ├── WordsError         2   the words were wrong; carries every problem found, not the first
    └── PreflightError     3   storage, devices or ports are not as the plan needs them
        └── StoreError     3   one storage operation on one URL
            ├── LeaseError 3   another run writes under the same `out`
            └── MovedError 3   other storage came to the place of `out`
    RankError              1   a rank raised; carries the first failing rank's traceback

0 is done, 75 preempted (run me again), 130 interrupted: see `dtrain.result.Result.exit_code`.
"""

import errno
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Self

from dtrain.secrets import masked

HELP = {
    errno.EMFILE: "ulimit -n has the number of open files",
    errno.ENFILE: "fs.file-max has the number of open files of this host",
    errno.EAGAIN: "ulimit -u and the control group have the number of processes and threads",
    errno.ENOSPC: "free room there, or inodes",
}
"""Error number -> the limit that was hit."""


class DtrainError(Exception):
    """Base of all errors meant for the user: printed as one message, never as a traceback, and never with a secret."""

    exit_code = 1
    facts: Mapping[str, Any] = MappingProxyType({})
    """The contents of failure.json, when ranks failed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(masked(message))


class WordsError(DtrainError):
    """The words cannot become a plan. `problems` holds one sentence per mistake, all found at once."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(masked, problems))
        super().__init__("\n".join(problems))


class PreflightError(DtrainError):
    """Something that the plan needs is missing: a device, a file, a place to write. `problems` holds one sentence for
    each.
    """

    exit_code = 3

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(masked, problems))
        super().__init__("\n".join(problems))


class StoreError(PreflightError):
    """A storage operation failed: says in one line the URL, the operation, the cause and what to type."""

    kind = "other"
    """missing, exists, odd (a folder, or no file at all, has its name), denied, full, package, busy (was tried again
    until patience ended) or other.
    """

    @classmethod
    def during(cls, operation: str, url: str, cause: object, hint: str = "", kind: str = "other") -> Self:
        url = url if len(url) <= 400 else f"{url[:380]}..."
        error = cls(f"cannot {operation} {url}: {str(cause)[:1000]}" + f". {hint}" * bool(hint))
        error.kind = kind
        return error


class LeaseError(StoreError):
    """Another run writes under `out`: it holds the lease, or has taken it over."""


class MovedError(StoreError):
    """Other storage has come to the place of `out`, on which this run has done more steps than this start of it: what a
    later start goes on from.
    """


class RankError(DtrainError):
    """One rank failed; the message is its traceback."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """` Did you mean strategy=fsdp?`, or all that is allowed when nothing is near."""
    names = sorted(allowed)
    plain = {name.lower(): name for name in names}
    near = get_close_matches(word.lower(), plain, n=1, cutoff=0.6)
    return f" Did you mean {plain[near[0]]}?" if near else f" Allowed: {', '.join(names)}."


def why(error: OSError) -> str:
    """The system's message in words, with the file it is about, and what may help."""
    text = (error.strerror or str(error)).split(" (while attempting")[0]
    where = f" {error.filename}" if error.filename else ""
    limit = HELP.get(error.errno or 0)
    return f"{text[:1].lower()}{text[1:]}{where}" + f" ({limit})" * (limit is not None)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
