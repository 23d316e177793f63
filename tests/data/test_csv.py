"""data=csv: tests/data/test_rows.py for what the formats have in common; here quotes, separators and numbers, against
Python's own reader.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_rows import BUILD

from dtrain.errors import DtrainError
from dtrain.storage import linefile
from dtrain.storage.rowfile import Reader


def build(path: Path, **given: Any) -> Any:
    words = {"inputs": None, "targets": "y", "holdout": 0, "outputs": None, "cache": str(path.parent / "cache")}
    return BUILD["csv"](path=str(path), **words | given)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_rows_are_those_of_pythons_reader(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linefile, "CHUNK", chunk)
    cells = ["plain", 'with "quotes"', "two\nlines", 'a,"b"\r\n"c"', "é", '"', "007", " "]
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "y"], *([cell, number] for number, cell in enumerate(cells))])
    (opened,) = Reader("csv", tmp_path / "cache", text=True).opened([str(path)], ["text"])
    assert opened.facts["sizes"] == [len(cells)]
    assert opened.read(0, np.array([5, 0, 3, 6]))["text"] == ['"', "plain", 'a,"b"\r\n"c"', "007"]
    assert opened.read(0, np.arange(len(cells)))["text"] == cells


@pytest.mark.parametrize(("word", "separator"), [("semicolon", ";"), ("tab", "\t"), ("pipe", "|")])
def test_columns_may_be_separated_otherwise(word: str, separator: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"x{separator}y\n1.5{separator}2\n1.5{separator}2\n")
    batch = build(tmp_path / "a.csv", separator=word).take(np.arange(1), np.zeros(1, int))
    assert batch["inputs"].tolist() == [[1.5]] and batch["targets"].tolist() == [2]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfy,x\r\n1,2\r\n3,4\r\n")
    assert sorted(build(tmp_path / "a.csv").take(np.arange(2), np.zeros(2, int))["targets"].tolist()) == [1, 3]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x,y\n1,2\n3\n4,5\n", "line 3: a row has 2 columns, and this one 1"),
        ("x,y\n1,2\n,3\n", "line 3: column x is empty"),
        ("x,y\n1,2\nabc,3\n", "line 3: column x is 'abc', after rows in which it was a number"),
        ('x,y\n1,2\n"3,4\n5,6\n', "line 3: "),
        ("x,y,x\n1,2,3\n", "line 1: two columns have the name 'x'"),
        ("x,y\n", "there is no row in 1 file(s)"),
        ("", "the file is empty"),
    ],
)
def test_a_row_that_is_none_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DtrainError) as error:
        build(tmp_path / "a.csv")
    assert sentence in str(error.value)
