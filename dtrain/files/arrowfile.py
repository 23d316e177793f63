"""Datasets of Hugging Face as `save_to_disk` or `load_dataset` write them: Arrow files, which are memory-mapped; a
remote one is copied once. The package that wrote them is not needed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dtrain.errors import PreflightError, StoreError, WordsError, first_line, nearest
from dtrain.files import hubrows, parquetfile, rowindex
from dtrain.files.rowindex import Columns, Indices
from dtrain.storage import mapped, store

LARGEST = 1 << 26
"""Bytes of a file that describes a dataset."""
CHUNK = 1 << 22


def shards(path: str, split: str | None) -> list[str]:
    """The files of a saved dataset, or of a split of several. Raises PreflightError, and WordsError for the split."""
    prepared = hubrows.prepared(path)
    if prepared:
        return hubrows.files(prepared, split)
    splits = _described(store.join(path, "dataset_dict.json")).get("splits")
    if splits is not None:
        if split is None and len(splits) > 1:
            raise WordsError(f"data.path={path} has the splits {', '.join(splits)}. Type data.split=<one of them>.")
        if split is not None and split not in splits:
            raise WordsError(f"data.split={split}: {path} has no such split.{nearest(split, splits)}")
        path = store.join(path, split or splits[0])
    files = _described(store.join(path, "state.json")).get("_data_files")
    if not isinstance(files, list) and hubrows.is_name(path):
        raise PreflightError(hubrows.missing(path))
    if not isinstance(files, list):
        raise PreflightError(
            f"data.path={path}: this is no folder that save_to_disk of Hugging Face's datasets wrote. Name one, or "
            "type data=parquet, data=jsonl or data=csv for files of rows."
        )
    return [store.join(path, str(file["filename"])) for file in files]


def is_dataset(path: str) -> bool:
    """Whether it is a folder that save_to_disk wrote, or a dataset in the cache of the package."""
    if hubrows.prepared(path):
        return True
    return any(store.exists(store.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def names(url: str, cache: Path) -> list[str]:
    """The columns of a file. Raises PreflightError."""
    return list(ArrowFile(url, [], cache).facts["names"])


@dataclass(frozen=True)
class ArrowFile:
    """`columns`: those that are read; `raw`: as they are, of any kind."""

    url: str
    columns: Sequence[str]
    cache: Path
    raw: bool = False
    facts: Mapping[str, Any] = field(init=False)
    _stem: Path = field(init=False)

    def __post_init__(self) -> None:
        beside = [] if store.is_local(self.url) else [".copy"]
        facts, stem = rowindex.kept(self.cache, self.url, how(self.columns, self.raw), self._made, beside)
        object.__setattr__(self, "facts", facts)
        object.__setattr__(self, "_stem", stem)

    def digest(self, rows: int | None = None) -> str:
        return str(self.facts["sha256"]) if rows in (None, self.facts["sizes"][0]) else ""

    def first(self, rows: int) -> Mapping[str, Any]:
        return self.facts

    def read(self, block: int, index: Indices) -> Columns:
        table = self._table
        if store.is_local(self.url) and rowindex.present(self.url):  # one that was removed stays mapped
            rowindex.unchanged(self.url, self.facts["fingerprint"])
        return parquetfile.unread(table, index) if self.raw else parquetfile.values(table, index, self.url)

    def where(self, row: int) -> str:
        return f"row {row + 1}"

    @cached_property
    def _table(self) -> Any:
        return self._mapped(self._stem).select([*self.columns])

    def _mapped(self, stem: Path) -> Any:
        """All columns and rows, memory-mapped. Raises PreflightError for another file."""
        arrow = parquetfile.library("an Arrow file")
        file = store.local_path(self.url) if store.is_local(self.url) else Path(f"{stem}.copy")
        try:
            return arrow.ipc.open_stream(arrow.memory_map(str(mapped.note(file)))).read_all()
        except FileNotFoundError:
            raise rowindex.removed(self.url) from None
        except (arrow.ArrowException, OSError) as error:
            raise PreflightError(f"data.path={self.url}: this is no whole Arrow file: {first_line(error)}") from None

    def _made(self, stem: Path) -> Mapping[str, Any]:
        file = store.local_path(self.url) if store.is_local(self.url) else Path(f"{stem}.copy")
        if not store.is_local(self.url):
            store.download(self.url, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        table = self._mapped(stem)
        for name in self.columns:
            rowindex.column(name, table.column_names, f"data.path={self.url}")
        digest = hashlib.sha256(repr([*self.columns]).encode())
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
        kinds = {name: parquetfile.kind_of(table.schema.field(name).type) for name in self.columns}
        edges = {name: _edges(table, name) for name, kind in kinds.items() if kind == "whole" and table.num_rows}
        return {
            "names": table.column_names, "sizes": [table.num_rows], "bytes": [table.nbytes],
            "sha256": digest.hexdigest(), "kinds": kinds, "classes": parquetfile.class_names(table.schema),
            "smallest": {name: edge[0] for name, edge in edges.items()},
            "largest": {name: edge[1] for name, edge in edges.items()},
        }  # fmt: skip


def how(columns: Sequence[str], raw: bool = False) -> list[Any]:
    """All that the index of a file depends on beside it."""
    return ["arrow", *columns, *(["raw"] if raw else [])]


def _edges(table: Any, name: str) -> tuple[int, int]:
    """The smallest and largest number of a column of integers; of classes that have names, the first and last of
    these.
    """
    import pyarrow.compute

    if name in (named := parquetfile.class_names(table.schema)):
        return 0, len(named[name]) - 1
    edges = pyarrow.compute.min_max(table.column(name)).as_py()
    return int(edges["min"] or 0), int(edges["max"] or 0)


def _described(url: str) -> dict[str, Any]:
    """A JSON file of a dataset; empty if it is not there, or no JSON."""
    try:
        found = json.loads(store.small(url, LARGEST))
    except StoreError as error:
        if error.kind != "missing":
            raise
        return {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
