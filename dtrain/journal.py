"""JSON lines under `out`: appended on a local disk, kept beside and put whole on storage that cannot append."""

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

from dtrain import store

PUT_SECONDS = 15.0
"""Remote journals are put at most this often, and at the end."""


class Journal:
    """One file of rows. Only rank 0 has one. Numbers that JSON has no word for (nan, inf) become null."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._scratch = None if store.is_local(url) else store.scratch("journal")
        self._path = store.local_path(url) if self._scratch is None else self._scratch / "rows.jsonl"
        self._put, self._dirty = time.monotonic(), False
        if self._scratch is not None and store.exists(url):
            self._path.write_bytes(store.read(url))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_torn()
        self._file = self._path.open("a")

    def append(self, *rows: Mapping[str, Any]) -> None:
        self._file.writelines(json.dumps(clean(row)) + "\n" for row in rows)
        self._file.flush()
        self._dirty = True
        if self._scratch is not None and time.monotonic() - self._put > PUT_SECONDS:
            self.sync()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the rows that are not wanted: those of steps that will be done again."""
        self._file.close()
        rows = [line for line in self._path.read_text().splitlines() if wanted(json.loads(line))]
        store.write(str(self._path), "".join(f"{row}\n" for row in rows).encode())
        self._file, self._dirty = self._path.open("a"), True

    def sync(self) -> None:
        """Make the rows visible to others."""
        if self._scratch is not None and self._dirty:
            store.upload(self._path, self.url)
        self._put, self._dirty = time.monotonic(), False

    def close(self) -> None:
        self.sync()
        self._file.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch)

    def _drop_torn(self) -> None:
        """A process that died while writing leaves half a line."""
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                self._path.write_bytes(whole)


def clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return {key: clean(item) for key, item in value.items()} if isinstance(value, Mapping) else value
