"""Rows as <out>/metrics.csv, for a spreadsheet or pandas: a line for a step, a column for each number.

What is undone is removed.
"""

import csv
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.logger.journals import Row
from dtrain.logger.tracker import Run, Tracker
from dtrain.storage import store

PUT_SECONDS = 15.0
"""On remote storage the file is uploaded at most this often, and at the end."""


@dataclass(kw_only=True)
class Csv(Tracker):
    _path: Path | None = field(default=None, init=False)
    _columns: list[str] = field(default_factory=list, init=False)
    _put: float = field(default=0.0, init=False)

    def forget(self, step: int) -> None:
        self._replace(row for row in self._there() if int(row["step"]) <= step)

    def connect(self, run: Run) -> int:
        rows = self._there()
        self._replace(rows)
        return max((int(row["step"]) for row in rows), default=0)

    def send(self, rows: Sequence[Row]) -> None:
        if {name for row in rows for name in row.values} - {*self._columns}:
            self._replace([*self._there(), *(row.values for row in rows)])
        else:
            with self._file().open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(row.values for row in rows)
        if time.monotonic() - self._put > PUT_SECONDS:
            self._upload()

    def finish(self, result: Mapping[str, Any]) -> str:
        self._upload()
        return ""

    @property
    def _url(self) -> str:
        return store.join(self.out, "metrics.csv")

    def _file(self) -> Path:
        """The local file, a copy of the one on other storage."""
        if self._path is None:
            self._path = store.local_path(self._url) if store.is_local(self._url) else store.scratch("csv") / "rows"
            if not store.is_local(self._url) and store.exists(self._url):
                store.download(self._url, self._path)
        return self._path

    def _there(self) -> list[dict[str, Any]]:
        """The whole lines."""
        text = self._file().read_text("utf-8") if self._file().exists() else ""
        return [*csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))]

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = [*rows]
        self._columns = [*dict.fromkeys(name for row in rows for name in row)]
        new = self._file().with_suffix(".new")
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        new.replace(self._file())

    def _upload(self) -> None:
        if not store.is_local(self._url):
            store.upload(self._file(), self._url)
        self._put = time.monotonic()
