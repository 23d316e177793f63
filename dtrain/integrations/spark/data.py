"""The rows of a DataFrame that Spark has written as Parquet, in one global order: partition after partition, whatever
their sizes. Each host decodes them once into memory-mapped files.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from dtrain import secrets
from dtrain.data.dataset import Dataset
from dtrain.errors import PreflightError, StoreError, WordsError, first_line
from dtrain.storage import caching, store

PART = re.compile(r"part-(\d+)")
"""The number of a partition in the name of its file."""
ROWS = 1 << 16
"""Rows that are decoded at a time."""


class Spark(Dataset):
    """A Source of the rows at `path`, a folder or glob of Parquet files. `features`: a column of arrays, or columns of
    numbers; `label`: a column of numbers or arrays. Whole numbers stay whole in `label`, and in `features` if that is
    one column of arrays; all others are fp32.
    """

    def __init__(
        self, *, path: str, features: str | Sequence[str], label: str, holdout: float = 0.1, outputs: int | None = None,
        cache: str | None = None,
    ) -> None:  # fmt: skip
        folder = caching.folder(cache)
        names = [features] if isinstance(features, str) else [*features]
        facts, arrays = decoded(path, names, label, folder)
        tensors = map(torch.from_numpy, arrays)
        super().__init__(TensorDataset(*tensors), holdout=holdout, outputs=outputs)
        self._digest = str(facts["sha256"])

    @cached_property
    def fingerprint(self) -> str:
        return f"spark-{self._whole}-{self._digest}"


def decoded(path: str, features: Sequence[str], label: str, cache: Path) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Facts and memory-mapped arrays, of features and label; decoded by the first process, read by the others."""
    files = sorted((file for file in store.find(path) if file.endswith(".parquet")), key=_partition)
    if not files:
        raise StoreError.during("find Parquet files at", path, "there is none")
    identity = json.dumps([features, label, [(file, store.fingerprint(file)) for file in files]])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    about, targets = cache / f"{key}.json", [cache / f"{key}.features", cache / f"{key}.label"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{key}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not about.exists():
                facts = _Decoder(path, features, label).write(files, targets)
                store.write(str(about), json.dumps({"path": secrets.masked(path), **facts}).encode())
        facts = json.loads(about.read_text("utf-8"))
        arrays: list[NDArray[Any]] = [
            np.memmap(target, dtype=kind, mode="c", shape=tuple(shape))
            for target, kind, shape in zip(targets, facts["kinds"], facts["shapes"], strict=True)
        ]
    except OSError as error:
        raise StoreError.during("keep the decoded rows in", str(cache), error.strerror or error) from error
    return facts, arrays


class _Decoder:
    def __init__(self, path: str, features: Sequence[str], label: str) -> None:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise PreflightError("data=spark needs the pyarrow package. Type: pip install 'dtrain[spark]'") from None
        self._parquet, self._error = parquet, ArrowException
        self._path, self._features, self._label = path, [*features], label

    def write(self, files: Sequence[str], targets: Sequence[Path]) -> dict[str, Any]:
        """Append the rows of the files, in this order, to the targets."""
        digest, rows = hashlib.sha256(), 0
        kinds, widths = ["", ""], [list[int](), list[int]()]
        parts = [target.with_suffix(f"{target.suffix}.{os.getpid()}") for target in targets]
        try:
            with ExitStack() as stack:
                outputs = [stack.enter_context(part.open("wb")) for part in parts]
                for batch in self._batches(files, parts[0].with_suffix(".parquet")):
                    arrays = [_features(batch, self._features), _numbers(batch.column(self._label), self._label)]
                    rows += len(arrays[0])
                    for number, array in enumerate(arrays):
                        if rows == len(array):
                            kinds[number], widths[number] = array.dtype.name, [*array.shape[1:]]
                        if [*array.shape[1:]] != widths[number]:
                            raise PreflightError(
                                f"data.path={self._path}: {(*self._features[:1], self._label)[number]} has arrays of "
                                f"{widths[number]} and of {[*array.shape[1:]]} numbers. All must have the same."
                            )
                        data = np.ascontiguousarray(array).tobytes()
                        digest.update(data)
                        outputs[number].write(data)
            for part, target in zip(parts, targets, strict=True):
                part.replace(target)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        if not rows:
            raise PreflightError(f"data.path={self._path}: there is no row in {len(files)} file(s).")
        return {"kinds": kinds, "shapes": [[rows, *width] for width in widths], "sha256": digest.hexdigest()[:32]}

    def _batches(self, files: Sequence[str], copy: Path) -> Iterator[Any]:
        """Batches of rows. A remote file is copied first, to the path `copy`."""
        names = [*self._features, self._label]
        for url in files:
            file = store.local_path(url)
            if not store.is_local(url):
                store.download(url, copy)
                file = copy
            try:
                with self._parquet.ParquetFile(file) as opened:
                    if absent := [name for name in names if name not in opened.schema_arrow.names]:
                        raise WordsError(
                            f"data.path={self._path} has no column {absent[0]}. Its columns: "
                            f"{', '.join(opened.schema_arrow.names)}."
                        )
                    yield from (batch for batch in opened.iter_batches(ROWS, columns=names) if batch.num_rows)
            except (OSError, self._error) as error:
                raise PreflightError(f"data.path={url}: this is no Parquet file: {first_line(error)}") from error
            finally:
                copy.unlink(missing_ok=True)


def _features(batch: Any, names: Sequence[str]) -> NDArray[Any]:
    """[rows, numbers] of several columns, or of one with arrays."""
    columns = [_numbers(batch.column(name), name) for name in names]
    if len(columns) == 1 and columns[0].ndim > 1:
        return columns[0]
    if odd := [name for name, column in zip(names, columns, strict=True) if column.ndim > 1]:
        raise WordsError(f"data.features: {odd[0]} is a column of arrays. Name it alone, or columns of numbers.")
    return np.stack(columns, 1).astype(np.float32)


def _numbers(column: Any, name: str) -> NDArray[Any]:
    """The numbers of a column, as int64 or fp32. Raises PreflightError for what has none, or not everywhere."""
    import pyarrow as pa
    from pyarrow import types

    if column.null_count:
        raise PreflightError(f"data: column {name} has {column.null_count} null(s) in {len(column)} rows. Drop them.")
    shape = [len(column)]
    while types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        lengths = {*column.value_lengths().to_pylist()} if hasattr(column, "value_lengths") else {column.type.list_size}
        if len(lengths) > 1:
            raise PreflightError(
                f"data: column {name} has arrays of {min(lengths)} to {max(lengths)} numbers. All must have the same."
            )
        column = column.flatten()
        shape.append(*lengths)
        if column.null_count:
            raise PreflightError(f"data: column {name} has arrays with nulls. Fill them.")
    if types.is_decimal(column.type):
        column = column.cast(pa.float64())
    whole = types.is_integer(column.type) or types.is_boolean(column.type)
    if not whole and not types.is_floating(column.type):
        raise PreflightError(
            f"data: column {name} is of {column.type}. Numbers and arrays of them can be read; a vector of Spark's ML "
            "becomes an array by pyspark.ml.functions.vector_to_array."
        )
    with np.errstate(over="ignore"):  # told below
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False).astype(np.int64 if whole else np.float32)
    rows = values.reshape(shape)
    if odd := int((~np.isfinite(rows.reshape(shape[0], -1)).all(1)).sum()):
        raise PreflightError(
            f"data: column {name} has NaN, or numbers that are infinite or too large for 32 bits, in {odd} of "
            f"{shape[0]} rows. Drop or fill them."
        )
    return rows


def _partition(url: str) -> tuple[str, int, str]:
    folder, _, name = url.rpartition("/")
    match = PART.match(name)
    return folder, int(match[1]) if match else 0, name
