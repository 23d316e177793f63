"""Rows that Spark has written: one order over partitions of any sizes, and a sentence for what is no number."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dtrain.data.dataset import Dataset
from dtrain.errors import DtrainError
from dtrain.integrations.spark.data import Spark

pa = pytest.importorskip("pyarrow", reason="pip install 'dtrain[spark]'")
parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'dtrain[spark]'")
SIZES = (257, 0, 258, 3)


def written(folder: Path, sizes: tuple[int, ...] = SIZES, **columns: Any) -> Path:
    """Columns in partitions of these sizes, as Spark names them."""
    folder.mkdir()
    begin = 0
    for number, size in enumerate(sizes):
        part = {name: values[begin : begin + size] for name, values in columns.items()}
        parquet.write_table(pa.table(part), folder / f"part-{number:05d}-3f2a-c000.snappy.parquet")
        begin += size
    (folder / "_SUCCESS").touch()
    return folder


@pytest.fixture
def rows() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(sum(SIZES), 3)), random.integers(0, 4, sum(SIZES))


def test_uneven_partitions_give_the_batches_of_the_same_rows_in_memory(rows: tuple[Any, Any], tmp_path: Path) -> None:
    x, y = rows
    folder = written(tmp_path / "rows", features=[*map(list, x)], label=y)
    ours = Spark(path=str(folder), features="features", label="label", holdout=0.2, cache=str(tmp_path / "cache"))
    theirs = Dataset(TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y)), holdout=0.2)
    assert len(ours) == len(theirs) == 414
    for mine, other in (ours, theirs), (ours.holdout(), theirs.holdout()):
        assert mine and other
        index = np.arange(len(mine))
        one, two = mine.take(index, index * 0), other.take(index, index * 0)
        assert torch.equal(one["inputs"], two["inputs"]) and torch.equal(one["targets"], two["targets"])
    assert ours.facts == theirs.facts


def test_columns_of_numbers_are_features_and_arrays_are_labels(rows: tuple[Any, Any], tmp_path: Path) -> None:
    x, y = rows
    folder = written(tmp_path / "rows", a=x[:, 0], b=y, c=[*map(list, x[:, 1:])], d=[[1, 2]] * len(y))
    source = Spark(path=str(folder), features=["a", "b"], label="c", holdout=0, cache=str(tmp_path / "cache"))
    index = source.original(np.arange(5))
    batch = source.take(np.arange(5), np.zeros(5, int))
    assert torch.equal(batch["inputs"], torch.tensor(np.stack([x[index, 0], y[index]], 1), dtype=torch.float32))
    assert torch.equal(batch["targets"], torch.tensor(x[index, 1:], dtype=torch.float32))
    assert source.facts["outputs"] == 2
    tokens = Spark(path=str(folder), features="d", label="b", holdout=0, cache=str(tmp_path / "cache"))
    assert tokens.take(np.arange(1), np.zeros(1, int))["inputs"].dtype == torch.int64


def test_partitions_are_ordered_by_number_and_changed_files_are_read_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "rows", (1, 1), x=[1.0, 2.0], y=[1, 2])
    (folder / "part-00001-3f2a-c000.snappy.parquet").rename(folder / "part-100000-3f2a-c000.snappy.parquet")
    (folder / "part-00000-3f2a-c000.snappy.parquet").rename(folder / "part-99999-3f2a-c000.snappy.parquet")

    def labels() -> list[int]:
        source = Spark(path=str(folder), features=["x"], label="y", holdout=0, cache=str(tmp_path / "cache"))
        order = source.original(np.arange(2)).argsort()
        return list(source.take(order, order * 0)["targets"].tolist())

    assert labels() == [1, 2]
    parquet.write_table(pa.table({"x": [1.0], "y": [3]}), folder / "part-100000-3f2a-c000.snappy.parquet")
    assert labels() == [1, 3]


def test_what_is_no_number_everywhere_is_refused(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "rows", (2, 1), x=[1.0, 2.0, 3.0], none=[1, None, 2], text=["a", "b", "c"],
        ragged=[[1.0], [1.0, 2.0], [1.0]], wider=[[1.0], [1.0], [1.0, 2.0]], holes=[[1.0], [None], [1.0]], odd=[[1.0, 2.0], [1.0, math.nan], [1.0, 2.0]],
    )  # fmt: skip
    for features, label, sentence in (
        ("x", "y", "has no column y. Its columns: x, none, text, ragged, wider, holes, odd."),
        ("x", "none", "column none has 1 null(s)"),
        ("text", "x", "column text is of string. Numbers and arrays of them can be read"),
        ("ragged", "x", "column ragged has arrays of 1 to 2 numbers"),
        ("wider", "x", "wider has arrays of [1] and of [2] numbers"),
        ("holes", "x", "column holes has arrays with nulls"),
        ("odd", "x", "column odd has NaN, or numbers that are infinite or too large for 32 bits, in 1 of 2 rows"),
        (["x", "wider"], "x", "data.features: wider is a column of arrays"),
    ):
        with pytest.raises(DtrainError) as error:
            Spark(path=str(folder), features=features, label=label, cache=str(tmp_path / "cache"))
        assert sentence in str(error.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("part-00000.parquet", "this is no Parquet file"), ("notes.txt", "find Parquet files at")],
)
def test_what_is_no_parquet_is_named(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a b c")
    with pytest.raises(DtrainError, match=sentence):
        Spark(path=str(tmp_path), features="x", label="y", cache=str(tmp_path / "cache"))
