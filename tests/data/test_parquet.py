"""data=parquet: tests/data/test_rows.py for what the formats have in common; here types, against pyarrow's own."""

import decimal
import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data.test_rows import BUILD

from dtrain.errors import DtrainError, PreflightError
from dtrain.files import parquetfile

COLUMNS: dict[str, Any] = {
    "int8": pa.array([1, 2, 3], pa.int8()),
    "bool": pa.array([True, False, True]),
    "double": pa.array([0.5, 1.5, 2.5]),
    "half": pa.array(np.array([0.5, 1.5, 2.5], np.float16)),
    "decimal": pa.array([decimal.Decimal("0.50"), decimal.Decimal("1.5"), decimal.Decimal(2)]),
    "list": pa.array([[1, 2], [3, 4], [5, 6]]),
    "large": pa.array([[1.5], [2.5], [3.5]], pa.large_list(pa.float32())),
    "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
    "nested": pa.array([[[1, 2], [3, 4]]] * 3),
}


def build(path: str, **given: Any) -> Any:
    return BUILD["parquet"](
        path=path, **{"inputs": "x", "targets": "y", "holdout": 0, "outputs": None, "cache": None} | given
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_numbers_of_any_type_are_those_that_pyarrow_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pq.write_table(pa.table({"x": [0, 1, 2], "y": COLUMNS[name]}), tmp_path / "a.parquet", row_group_size=2)
    source = build(str(tmp_path / "a.parquet"))
    batch = source.take(np.arange(3), np.zeros(3, int))
    theirs = pq.read_table(tmp_path / "a.parquet").column("y").to_pylist()
    assert batch["targets"].tolist() == [
        torch.tensor(np.array(theirs[int(i)], float)).tolist() for i in batch["inputs"]
    ]
    assert batch["targets"].dtype == (
        torch.float32 if isinstance(np.ravel(theirs)[0], float | decimal.Decimal) else torch.int64
    )


def test_rows_of_a_remote_file_are_read_by_ranges(tmp_path: Path) -> None:
    written = io.BytesIO()
    x = np.random.default_rng(0).normal(size=400_000)
    pq.write_table(pa.table({"x": x, "other": x, "y": np.arange(400_000)}), written, row_group_size=1000)
    fs, reads = fsspec.filesystem("memory"), list[int]()
    fs.pipe_file("/wide/a.parquet", written.getvalue())
    file = type(fs.open("/wide/a.parquet"))
    with pytest.MonkeyPatch.context() as patch:
        plain = file.read
        patch.setattr(file, "read", lambda self, *count: reads.append(len(data := plain(self, *count))) or data)
        source = build("memory://wide/a.parquet", cache=str(tmp_path))
        reads.clear()
        batch = source.take(np.arange(4), np.zeros(4, int))
    assert batch["inputs"].flatten().tolist() == torch.tensor(x[batch["targets"]]).float().tolist()
    assert 0 < sum(reads) < written.getbuffer().nbytes / 10


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-30], "its end is missing, so it is torn"),
        (lambda data: b"a,b\n1,2\n", "this is no Parquet file"),
        (lambda data: data[:4] + b"\0" * 200 + data[204:], "is damaged"),
        (lambda data: b"", "this is no Parquet file"),
    ],
)
def test_a_damaged_file_is_named(damage: Any, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.random.default_rng(0).normal(size=99), "y": range(99)}), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DtrainError, match=sentence):
        build(str(path), cache=str(tmp_path)).take(np.arange(9), np.zeros(9, int))


def test_rows_in_another_format_are_told_with_their_word(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PreflightError, match=r"no Parquet file\. Type data=csv"):
        parquetfile.footer(str(tmp_path / "train.csv"))
