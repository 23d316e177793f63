"""Rows that are written in order, in durable parts: what was written stays when its process is killed, and the next
start goes on behind it.

<to>.jsonl or <to>.parquet     one file, made of <to>.parts/part-000000, ... when all are there
<to>/                          the parts themselves
Beside either is a record of what the rows are: <to>.predict.json or <to>/predict.json.
"""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.errors import StoreError, WordsError
from dtrain.files.parquetfile import library
from dtrain.secrets.as_json import clean
from dtrain.storage import leftovers, store

SUFFIXES = (".jsonl", ".parquet")
Columns = Mapping[str, Sequence[Any]]


class Predictions:
    """The rows at `to`. Raises WordsError for a place of another kind."""

    def __init__(self, to: str) -> None:
        self.to, self._folder = to, to.endswith("/")
        bare = to.rstrip("/")
        if not self._folder and not bare.endswith(SUFFIXES):
            raise WordsError(
                f"predict.to={to}: a file ends in .jsonl or .parquet, a folder of parts in /. Type "
                f"predict.to={to}.jsonl, or predict.to={to}/"
            )
        self._suffix = ".parquet" if bare.endswith(".parquet") else ".jsonl"
        self._parts = bare if self._folder else f"{bare}.parts"
        self._record = store.join(bare, "predict.json") if self._folder else f"{bare}.predict.json"
        self._pyarrow = library(f"predict.to={to}") if self._suffix == ".parquet" else None

    def look(self, facts: Mapping[str, Any]) -> str:
        """`done`, `begun` or `new`. Raises WordsError if there are rows of another kind than these `facts` say."""
        there = self._read()
        if there is None:
            if store.children(self.to.rstrip("/")) if self._folder else store.exists(self.to):
                raise WordsError(
                    f"predict.to={self.to} exists, and dtrain predict did not write it. Type predict.to=<another "
                    "place>."
                )
            return "new"
        other = [name for name, value in facts.items() if there["facts"].get(name) != value]
        if other:
            said = ", ".join(f"{name} {there['facts'].get(name)} there, {facts[name]} here" for name in other)
            raise WordsError(
                f"predict.to={self.to} holds other rows ({said}). Type predict.to=<another place>, or remove it."
            )
        return "done" if there["done"] else "begun"

    def begin(self, facts: Mapping[str, Any]) -> int | None:
        """Write down what the rows are. The number of parts that are there; None if all is done. Raises WordsError as
        `look`, StoreError.
        """
        state = self.look(facts)
        for url in (self.to.rstrip("/"), self._record):
            folder, _, name = url.rpartition("/")
            leftovers.remove_parts(folder or ".", [name])
        if state == "done":
            self._remove_parts()  # whoever wrote it was killed before
            return None
        if state == "new":
            self._write(facts, done=False)
        there = set(store.children(self._parts))
        return next(number for number in range(len(there) + 1) if self._name(number) not in there)

    def write(self, number: int, columns: Columns) -> None:
        """Write a part. Raises StoreError."""
        store.write(store.join(self._parts, self._name(number)), self._packed(columns))

    def finish(self, facts: Mapping[str, Any], parts: int) -> None:
        """Make one file of the parts, if it is to be one."""
        if not self._folder:
            urls = [store.join(self._parts, self._name(number)) for number in range(parts)]
            store.write(self.to, self._joined(urls))
        self._write(facts, done=True)
        self._remove_parts()

    def _remove_parts(self) -> None:
        if not self._folder:
            store.remove(self._parts)

    def _name(self, number: int) -> str:
        return f"part-{number:06d}{self._suffix}"

    def _packed(self, columns: Columns) -> bytes:
        if self._pyarrow is None:
            rows = zip(*columns.values(), strict=True)
            return "".join(f"{json.dumps(clean(dict(zip(columns, row, strict=True))))}\n" for row in rows).encode()
        buffer = io.BytesIO()
        self._pyarrow.parquet.write_table(self._pyarrow.table(dict(columns)), buffer)
        return buffer.getvalue()

    def _joined(self, urls: Sequence[str]) -> bytes:
        if self._pyarrow is None:
            return b"".join(map(store.read, urls))
        parquet, buffer, writer = self._pyarrow.parquet, io.BytesIO(), None
        for url in urls:
            table = parquet.read_table(io.BytesIO(store.read(url)))
            writer = writer or parquet.ParquetWriter(buffer, table.schema)
            writer.write_table(table)
        if writer:
            writer.close()
        return buffer.getvalue()

    def _read(self) -> dict[str, Any] | None:
        try:
            there = json.loads(store.read(self._record))
            return {"facts": dict(there["facts"]), "done": bool(there["done"])}
        except StoreError as error:
            if error.kind != "missing":
                raise
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"facts": {}, "done": False}

    def _write(self, facts: Mapping[str, Any], *, done: bool) -> None:
        store.write(self._record, json.dumps({"facts": dict(facts), "done": done}, indent=1).encode())
