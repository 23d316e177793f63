"""Printing: foreign text cannot control the terminal or imitate one of our messages, and a closed pipe does no harm.

A pipe whose reader has gone, a closed terminal or a full disk never ends a run: `python -m dtrain | head`.
"""

import errno
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

GONE = (errno.EPIPE, errno.EIO)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that a terminal interprets instead of showing, except tabs and newlines: control characters, changes of
writing direction, lone surrogates.
"""
OURS = re.compile(r"^(?=(?:dtrain|note|warning):)", re.MULTILINE)
"""The prefixes of our own messages."""
UNIT = re.compile(r"(?<=\d) (?=(?:[KMGTP]iB|B|[mu]?s|min|h|days|[MGTPE]?FLOP)\b)")
"""The space between a number and its unit."""
PLAIN_WORD, PLACEHOLDER = re.compile(r"[\w@%+=:,./\[\]*-]*"), re.compile(r"<[\w ,./|>=-]*>")
_full: list[OSError] = []


def say(*lines: str, error: bool = False, end: str = "\n") -> None:
    """Print lines to standard output or standard error, with what its encoding lacks escaped. Everything that a command
    shows goes through here.
    """
    file, text = sys.stderr if error else sys.stdout, "\n".join(map(visible, lines))
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, file=file, flush=True)


def complain(text: str, *, begin: str = "dtrain: ") -> None:
    """Print one of our messages to standard error; its further lines cannot imitate another message."""
    say(begin + OURS.sub("  ", text), error=True)


def visible(text: str) -> str:
    """`text` with control characters escaped, such as \\x1b."""
    return CONTROL.sub(lambda char: char[0].encode("unicode_escape").decode(), text)


def on_one_line(text: str) -> str:
    """`text` on one line: newlines and tabs are escaped too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def table(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.ljust) -> str:
    """Rows as aligned columns, each cell on one line."""
    cells = [[*map(on_one_line, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(align, row, widths)).rstrip() for row in cells)


def width() -> int:
    """Columns of the screen: of a terminal what it has, from 60 to 160; 100 of a pipe."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 160)


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Rows of a name and a text, which wraps below itself."""
    return "\n".join(wrapped(f"{name:<11} ", text, width()) for name, text in pairs)


def figures(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of figures, aligned at the right, and a last one of text, which wraps below itself."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    columns = ("  ".join(map(str.rjust, row[:-1], widths)) for row in rows)
    return "\n".join(wrapped(f"{each}  ", row[-1], width()) for each, row in zip(columns, rows, strict=True))


def wrapped(begin: str, text: str, columns: int) -> str:
    """`text` after `begin`, on lines of at most `columns` that all start below its first letter. What two spaces part
    is kept whole where that fits, and numbers stay with their units; a text of several lines is left as it is.
    """
    room = max(columns - len(begin), 20)
    if len(text) <= room or "\n" in text:
        return begin + text
    lines = [""]
    for phrase in UNIT.sub("\xa0", text).split("  "):
        longer = f"{lines[-1]}  {phrase}" if lines[-1] else phrase
        if len(longer) <= room:
            lines[-1] = longer
        elif len(phrase) <= room:
            lines.append(phrase)
        else:
            lines[-1:] = textwrap.wrap(longer, room, break_on_hyphens=False)
    return begin + f"\n{' ' * len(begin)}".join(lines).replace("\xa0", " ")


def typed(word: str) -> str:
    """A word or path of a suggested command, quoted where a shell would treat it as more than one plain word. `<...>`
    is a placeholder for the user.
    """
    word = on_one_line(word)
    if word and PLAIN_WORD.fullmatch(PLACEHOLDER.sub("", word)):
        return word
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)


class _Screen(io.FileIO):
    """A file descriptor. Once its reader is gone, what is written to it is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno in FULL:  # space may be freed later
                _full[:] = [error]
                return len(memoryview(data).cast("B"))
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


class _Labelled(_Screen):
    """Begins each line with a label."""

    def __init__(self, number: int, label: str) -> None:
        super().__init__(number, "w", closefd=False)
        self._label, self._begins = label.encode(), True

    def write(self, data: Any) -> int:
        lines = bytes(data).splitlines(keepends=True)
        left = b"".join(self._label + line if self._begins or number else line for number, line in enumerate(lines))
        self._begins = lines[-1:] == [] or lines[-1].endswith((b"\n", b"\r"))
        while left:
            left = left[super().write(left) :]
        return len(data)


def label(text: str) -> None:
    """Begin each line that this process prints with a text, in one piece where it is printed in one."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        old.flush()
        raw = io.BufferedWriter(_Labelled(old.fileno(), text))
        setattr(sys, name, io.TextIOWrapper(raw, old.encoding, "backslashreplace", line_buffering=True))


def full() -> OSError | None:
    """Why printed text was lost: the disk is full. None if nothing was lost."""
    return _full[0] if _full else None


def outlive_readers() -> None:
    """Protect this process and its forks from readers that go away, and what they print from an encoding that lacks a
    character. Descriptors that were closed at start become the null device.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _fill(number)
            opened = open(number, mode, closefd=False, encoding="utf-8")  # noqa: SIM115 - as long as the process is
            setattr(sys, name, opened)
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            old.flush()
            raw = io.BufferedWriter(_Screen(old.fileno(), "w", closefd=False))
            by_line = old.line_buffering or name == "stderr"
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, "backslashreplace", line_buffering=by_line))


def _fill(number: int) -> None:
    """Open the null device as this descriptor, unless it is in use by now."""
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
