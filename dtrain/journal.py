"""JSON lines under `out`: appended on a local disk, kept beside and put whole on storage that cannot append."""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dtrain import lease, secrets, store
from dtrain.errors import StoreError

PUT_SECONDS = 15.0
"""Remote journals are put at most this often, and at the end."""


class Journal:
    """One file of rows. Only rank 0 has one. Numbers that JSON has no word for (nan, inf) become null."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._scratch = None if store.is_local(url) else store.scratch("journal", inside=os.environ.get("DTRAIN_REPORTS"))
        self._path = store.local_path(url) if self._scratch is None else self._scratch / "rows.jsonl"
        self._put, self._dirty = time.monotonic(), False
        self._writing, self._putting = threading.Lock(), threading.Lock()
        if self._scratch is not None and store.exists(url):
            self._path.write_bytes(store.read(url))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_torn()
        self._file = self._path.open("a")

    def append(self, *rows: Mapping[str, Any]) -> None:
        lines = "".join(json.dumps(clean(row)) + "\n" for row in rows)
        with self._writing:
            self._file.write(lines)
            self._file.flush()
            self._dirty = True
        if self._scratch is not None and time.monotonic() - self._put > PUT_SECONDS:
            self._put = time.monotonic()
            threading.Thread(target=self._put_quietly, name="dtrain-journal", daemon=True).start()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop the rows that are not wanted: those of steps that will be done again; and what follows a line that is none. Returns those that stay."""
        with self._writing:
            self._file.close()
            rows = list[tuple[str, dict[str, Any]]]()
            for line in self._path.read_text(errors="replace").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # a power cut left it: what must not be lost was made durable and stands before it
                    break
                if wanted(row):
                    rows.append((line, row))
            store.write(str(self._path), "".join(f"{line}\n" for line, _ in rows).encode())
            self._file, self._dirty = self._path.open("a"), True
        return [row for _, row in rows]

    def durable(self) -> None:
        """Whatever dies after this, the rows appended before it stay, and others see them; any thread may call it. Raises StoreError."""
        with self._putting:  # of two puts the one with fewer rows must not come last, and one under way must be done
            if not self._dirty:
                return
            with self._writing:
                data, self._dirty = self._path.read_bytes() if self._scratch is not None else b"", False
            try:
                if self._scratch is not None:
                    lease.verify(self.url.rsplit("/", 1)[0])  # the rows there may be those of a run that took over
                    store.write(self.url, data)
                else:
                    store.fsync(self._path)
                    store.sync_folder(str(self._path.parent))
            except OSError as error:
                self._dirty = True
                raise StoreError.during("sync", self.url, error.strerror or error) from error
            except StoreError:
                self._dirty = True
                raise

    def close(self) -> None:
        try:
            self.durable()
        finally:
            self._file.close()
            if self._scratch is not None:
                shutil.rmtree(self._scratch)

    def _put_quietly(self) -> None:
        with suppress(StoreError):  # `durable` tells whom it concerns
            self.durable()

    def _drop_torn(self) -> None:
        """A process that died while writing leaves half a line."""
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                self._path.write_bytes(whole)


def clean(value: Any) -> Any:
    """As JSON can say it, and without secrets."""
    return _finite(secrets.hidden(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return {key: _finite(item) for key, item in value.items()} if isinstance(value, Mapping) else value
