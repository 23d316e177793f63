"""Every way in which a run can be refused or fail, and its exit code.

    DtrainError            1   training failed
    ├── WordsError         2   the words are wrong; lists every problem, not only the first
    ├── EnvironError       2   the variables by which another launcher started this process contradict each other
    ├── PreflightError     3   storage, devices or ports are not as the plan needs them
    │   ├── ChangedError   3   a file of samples became another one while a run reads it
    │   └── StoreError     3   one storage operation on one URL failed
    │       ├── LeaseError 3   another run writes under the same `out`
    │       └── MovedError 3   other storage was mounted at `out`
    └── RankError          1   a rank failed; carries the traceback of the first rank that failed

0 is done, 75 preempted (run it again), 130 interrupted: see `EXIT_CODES`. 4 is a 1 of `dtrain run`,
which a job executes: it would fail again.
"""

import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, Self

from dtrain.secrets import masked

Status = Literal["finished", "stopped", "interrupted", "preempted", "spiked", "submitted"]
"""How a run ended."""
EXIT_CODES: dict[Status, int] = {
    "finished": 0, "stopped": 0, "interrupted": 130, "preempted": 75, "spiked": 1, "submitted": 0
}  # fmt: skip
FOR_GOOD = 4
"""Exit code of a process of a job that has failed, and would again."""
HELP = {
    errno.EMFILE: "raise the number of open files: ulimit -n",
    errno.ENFILE: "raise the number of open files of this host: fs.file-max",
    errno.EAGAIN: "raise the number of processes and threads: ulimit -u, and the control group",
    errno.ENOSPC: "free space there, or inodes",
}
"""Error number -> the fix for the user."""


class DtrainError(Exception):
    """Base of all errors for the user: printed as one message without a traceback and without secrets."""

    exit_code = 1
    facts: Mapping[str, Any] = MappingProxyType({})
    """The contents of failure.json, when ranks failed."""

    def __init__(self, message: str = "") -> None:
        super().__init__(masked(message))


class WordsError(DtrainError):
    """The words cannot become a plan. `problems` has a sentence for every mistake."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(masked, problems))
        super().__init__("\n".join(problems))


class EnvironError(DtrainError):
    """The variables of the launcher that started this process are no place among its processes, or two launchers set
    variables that disagree. The message names them.
    """

    exit_code = 2


class PreflightError(DtrainError):
    """The plan needs something that is missing: a device, a file, writable storage. `problems`: a sentence for each."""

    exit_code = 3

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(masked, problems))
        super().__init__("\n".join(problems))


class ChangedError(PreflightError):
    """A file of samples became another one while a run reads it. The message names it."""


class StoreError(PreflightError):
    """A storage operation failed. The message names the operation, the URL, the cause and, if known, the fix."""

    kind = "other"
    """missing, exists, odd (a folder, or something else that is not a file, has the name), denied, full, package, busy
    (retried until patience ended) or other.
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
    """Other storage was mounted at `out`, with more steps of this run than this start has done; a later start continues
    from there.
    """


class RankError(DtrainError):
    """One rank failed; the message is its traceback."""


MOST_NAMED = 1000
"""Characters of the allowed words that an error lists."""
FIRST_NAMED = 8
"""Words that it lists if there are more."""


def an(value: object) -> str:
    """The type of a value with its article, such as `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


MOST_EDITS = 2
"""Letters that a misspelt word differs in."""


def _is_alike(word: str, name: str) -> bool:
    """Whether two names differ by a slip, or have a part of several letters in common."""
    section = f"{word.rpartition('.')[0]}."
    if name.startswith(section):
        word, name = word.removeprefix(section), name.removeprefix(section)
    parts = {part for part in re.split(r"[^a-z]+", word) if len(part) > 2} & {*re.split(r"[^a-z]+", name)}
    return bool(parts) or _edits(word, name) <= MOST_EDITS


def _edits(one: str, other: str) -> int:
    """How many letters to add, drop, replace or swap with the next one make one text the other."""
    rows: list[list[int]] = [[*range(len(other) + 1)]]
    for at, letter in enumerate(one, 1):
        row = [at]
        for there, theirs in enumerate(other, 1):
            edits = min(rows[-1][there] + 1, row[-1] + 1, rows[-1][there - 1] + (letter != theirs))
            if at > 1 and there > 1 and letter == other[there - 2] and theirs == one[at - 2]:
                edits = min(edits, rows[-2][there - 2] + 1)
            row.append(edits)
        rows.append(row)
    return rows[-1][-1]


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint such as ` Did you mean strategy=fsdp?`, or allowed words if none is similar; of very many the first."""
    names = sorted(allowed)
    plain = {name.lower(): name for name in names}
    if figure := plain.get(f"eval_{word.lower()}"):
        return f" Did you mean {figure}?"
    near = get_close_matches(word.lower(), plain, n=5, cutoff=0.6)
    if meant := next((name for name in near if _is_alike(word.lower(), name)), ""):
        return f" Did you mean {plain[meant]}?"
    every = ", ".join(names)
    if len(every) < MOST_NAMED:
        return f" Allowed: {every}."
    return f" Allowed: {', '.join(names[:FIRST_NAMED])} and {len(names) - FIRST_NAMED} others."


@contextmanager
def about_data(key: str) -> Iterator[None]:
    """A context in which sentences about `data` are about the data at another key, such as evaluate.sets.dev."""
    try:
        yield
    except (WordsError, PreflightError) as error:
        if isinstance(error, StoreError) or not str(error).startswith(("data.", "data:")):
            raise
        told = (f"{key}{each[4:]}" if each.startswith(("data.", "data:")) else each for each in error.problems)
        raise type(error)(*told) from error


def why(error: OSError) -> str:
    """The system's message, the file it is about, and a possible fix."""
    text = (error.strerror or str(error)).split(" (while attempting")[0]
    where = f" {error.filename}" if error.filename else ""
    limit = HELP.get(error.errno or 0)
    return f"{text[:1].lower()}{text[1:]}{where}" + f" ({limit})" * (limit is not None)


def text_of(error: BaseException) -> str:
    """An error's message, or a note in its place if its own `__str__` fails."""
    try:
        return str(error)
    except Exception as broken:
        return f"(no message: its __str__ raises {type(broken).__name__})"


READING = "reading "


def note_sample(error: BaseException, sample: str) -> None:
    """Note which sample was read when an error was raised, unless one is noted."""
    if not sample_of(error):
        error.add_note(f"{READING}{sample}")


def note_source(error: BaseException, source: str) -> None:
    """Note of which source the noted sample is."""
    if sample := sample_of(error):
        error.__notes__[error.__notes__.index(sample)] = f"{sample} of {source}"


def sample_of(error: BaseException) -> str:
    """The noted sample, such as `reading sample 12, epoch 0`; empty if there is none."""
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if isinstance(note, str) and note.startswith(READING)), "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next((line.strip() for line in text_of(error).splitlines() if line.strip()), type(error).__name__)
