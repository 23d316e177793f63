"""Printing: text of others never steers the terminal or passes for a line of ours, and who reads it may go.

A pipe whose other end has gone, a closed terminal, or a disk that is full by now ends no run: `python -m dtrain |
head`.
"""

import errno
import io
import os
import re
import shlex
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing, but for tabs and ends of lines: control characters, those that
turn the direction of writing, halves of letters.
"""
OURS = re.compile(r"^(?=(?:dtrain|note|warning):)", re.MULTILINE)
"""How a line of ours begins."""
PLAIN_WORD, PLACEHOLDER = re.compile(r"[\w@%+=:,./\[\]*-]*"), re.compile(r"<[\w ,./|>=-]*>")
_full: list[OSError] = []


def say(*lines: str, error: bool = False, end: str = "\n") -> None:
    """Print lines to standard output, or to standard error. Everything that a command tells a person goes through
    here.
    """
    print(*map(visible, lines), sep="\n", end=end, file=sys.stderr if error else sys.stdout, flush=True)


def complain(text: str, *, begin: str = "dtrain: ") -> None:
    """Print to standard error a message of ours; of its further lines none passes for another one."""
    say(begin + OURS.sub("  ", text), error=True)


def visible(text: str) -> str:
    """`text` with what a terminal would obey written out, such as \\x1b."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def on_one_line(text: str) -> str:
    """`text` as a part of a line: ends of lines are written out too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def typed(word: str) -> str:
    """A word or path of a command that is suggested: quoted where a shell would read more in it than one plain word.
    `<...>` is for a person to fill in.
    """
    word = on_one_line(word)
    if word and PLAIN_WORD.fullmatch(PLACEHOLDER.sub("", word)):
        return word
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


class _Screen(io.FileIO):
    """A file descriptor; from the write on that nobody can read, what is written to it is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno in FULL:  # there may be room again
                _full[:] = [error]
                return len(memoryview(data).cast("B"))
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def full() -> OSError | None:
    """Why something that was printed is lost: a disk without room."""
    return _full[0] if _full else None


def outlive_readers() -> None:
    """From now on, for what this process prints and those that it forks. What was closed when it began is the null
    device.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _fill(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open as long as the process
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            old.flush()
            raw = io.BufferedWriter(_Screen(old.fileno(), "w", closefd=False))
            setattr(
                sys,
                name,
                io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=old.line_buffering or name == "stderr"),
            )


def _fill(number: int) -> None:
    """Open the null device as this descriptor, unless something else was opened as it since."""
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
