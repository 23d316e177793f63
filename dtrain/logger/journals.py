"""The rows and events of a run as its trackers get them, read from the files that the run writes.

A tracker gets one row for a step, with the evaluations after it, once a later row shows that these are complete: so
whatever is killed, what it has of a step is whole, and a later start sends what comes after.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MOST = 20_000
"""Rows that wait in memory; the others wait in the file."""
CHUNK = 1 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class Row:
    step: int
    values: Mapping[str, float]
    """Also `step`; a number that JSON does not have is left out."""


class Journals:
    """`every`: rows of steps that it divides are for trackers, beside those with an evaluation or a text, and the
    last.
    """

    def __init__(self, rows: Path, events: Path, *, every: int) -> None:
        self._rows_file, self._events_file, self._every = _Tail(rows), _Tail(events), every
        self._rows, self._newest = dict[int, dict[str, float]](), 0
        self._figures = dict[int, dict[str, float]]()
        self._texts = dict[tuple[int, str], str]()
        self.committed = dict[int, str]()
        """Step -> URL of each checkpoint, also of those that are removed by now."""

    def again(self) -> None:
        """Read from the beginning: rows were dropped."""
        self._rows, self._newest = {}, 0
        self._rows_file.again()

    def close(self) -> None:
        self._rows_file.again()
        self._events_file.again()

    def read(self) -> None:
        """Read what has been written since; of the rows so many that they fit into memory."""
        for row in self._rows_file.lines(room=MOST - len(self._rows)):
            if row is None:
                self.again()
            elif type(row.get("step")) is int:
                self._newest = row["step"]
                self._rows[self._newest] = _numbers(row)
        for event in self._events_file.lines():
            self._take(event or {})
        wanted = {self._newest, *self._figures, *(step for step, _ in self._texts)}
        self._rows = {step: row for step, row in self._rows.items() if step in wanted or step % self._every == 0}

    def ready(self, after: int, *, whole: bool) -> list[Row]:
        """The rows of later steps that are complete, or with `whole` all; earlier ones are forgotten."""
        self._rows = {step: row for step, row in self._rows.items() if step > after}
        steps = [step for step in sorted(self._rows) if whole or step < self._newest]
        return [Row(step, {**self._rows[step], **self._figures.get(step, {})}) for step in steps]

    def texts(self, until: int) -> dict[str, list[tuple[int, str]]]:
        """Hook -> (step, text) of its samples so far."""
        tables: dict[str, list[tuple[int, str]]] = {}
        for (step, name), text in sorted(self._texts.items()):
            if step <= until:
                tables.setdefault(name, []).append((step, text))
        return tables

    def _take(self, event: Mapping[str, Any]) -> None:
        step, name = event.get("step"), str(event.get("event"))
        if type(step) is not int:
            return
        if name == "evaluated":
            self._figures.setdefault(step, {}).update(_numbers(event, begin="eval_"))
        elif name == "committed":
            self.committed[step] = str(event.get("url"))
        elif isinstance(event.get("text"), str):
            self._texts[step, name] = event["text"]


class _Tail:
    """The new lines of a file that grows, and may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._file: BinaryIO | None = None
        """Held open: so no other file can have its number."""

    def again(self) -> None:
        if self._file:
            self._file.close()
        self._file, self._at = None, 0

    def lines(self, room: int = MOST) -> Iterator[dict[str, Any] | None]:
        """Each new line as a mapping, and None where the file begins anew."""
        with suppress(OSError):
            if self._file and not self._is_same():
                self.again()
                yield None
            self._file = self._file or self._path.open("rb")
            while room > 0 and (data := self._chunk()):
                for line in data.splitlines():
                    room -= 1
                    with suppress(ValueError, RecursionError):
                        row = json.loads(line)
                        yield row if isinstance(row, dict) else {}

    def _is_same(self) -> bool:
        assert self._file
        there, ours = self._path.stat(), os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and there.st_size >= self._at

    def _chunk(self) -> bytes:
        """The next whole lines."""
        assert self._file
        self._file.seek(self._at)
        data = self._file.read(CHUNK)
        data = data[: data.rfind(b"\n") + 1]
        self._at += len(data)
        return data


def _numbers(row: Mapping[str, Any], begin: str = "") -> dict[str, float]:
    return {name: value for name, value in row.items() if type(value) in (int, float) and name.startswith(begin)}
