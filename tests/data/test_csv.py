"""data=csv: tests/data/test_rows.py for what the formats have in common; here quotes, separators and numbers, against
Python's own reader.
"""

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_rows import BUILD

from dtrain.errors import DtrainError
from dtrain.files import linefile, rowindex
from dtrain.files.rowfile import Reader


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


ODD = [
    "",
    " ",
    "1_0",
    "0x1",
    "nan",
    "inf",
    "1e999",
    str(1 << 63),
    "-" + str(1 << 63),
    "é",
    '"',
    "a,b",
    "two\nlines",
    "-0",
    "+3",
    "\r",
]


def facts_of(path: Path, text: bool) -> Any:
    """(facts, offsets) of an index, or the sentence that refuses it."""
    try:
        (file,) = Reader("csv", path.parent / "cache", text=text).opened([str(path)], ["x", "y"])
    except DtrainError as error:
        return str(error)
    where = np.load(f"{file._stem}.npy").tolist()
    return {name: file.facts[name] for name in ("sizes", "sha256", "kinds")}, where


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_are_parsed_together_are_those_of_one_by_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linefile, "TOGETHER", 5)
    generator = np.random.default_rng(seed)
    for number in range(9):
        rows = [[f"{generator.normal():.3f}", str(generator.integers(-9, 9))] for _ in range(23)]
        for _ in range(number % 3):
            rows[generator.integers(23)][generator.integers(2)] = ODD[generator.integers(len(ODD))]
        places = []
        for way in ("together", "alone"):
            path = tmp_path / way / "a.csv"
            path.parent.mkdir(exist_ok=True)
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([["x", "y"], *rows])
            with monkeypatch.context() as patch:
                if way == "alone":
                    patch.setattr(linefile.Separated, "columns", lambda *_: None)
                places.append([facts_of(path, text) for text in (False, True)])
        one, other = (str(each).replace("/together/", "/alone/") for each in places)
        assert one == other, rows


def test_an_index_that_takes_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rowindex, "SLOW", 0.05)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    rowindex.kept(
        tmp_path,
        str(tmp_path / "a.csv"),
        ["slow"],
        lambda stem: time.sleep(0.3) or {"sizes": [1], "sha256": "", "kinds": {}},
    )
    assert f"making the index of {tmp_path}/a.csv, once" in capsys.readouterr().err
    build(tmp_path / "a.csv").take(np.arange(1), np.zeros(1, int))
    assert capsys.readouterr().err == ""


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
        ("x,y\n1,2\nabc,3\n", "line 3: column x is 'abc', after rows in which it was a number."),
        ("x,y\nNA,2\n,3\n1,2\n", "line 3: column x is empty"),
        (
            "x,y\n\nNA,2\nNA,2\n1,2\n",
            "line 5: column x is 1, and the text 'NA' in line 3. Drop or fill what is missing.",
        ),
        ('x,y\n1,2\n"1,5",3\n', "line 3: column x is '1,5', after rows in which it was a number. Write a point before"),
        ('x,y\n"1,5",3\n"2,5",3\n', "column x holds text, such as '1,5'. Write a point before the fraction"),
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


def test_files_in_another_form_are_told_with_what_to_type(tmp_path: Path) -> None:
    for data, sentence in (
        ("x,y\n1,0\n".encode("utf-16"), "a.csv is in UTF-16, not in UTF-8. Write it again: iconv -f UTF-16"),
        ("x,y\n1,0\n".encode("utf-16-be"), "a.csv is in UTF-16BE"),
        (
            "x,n,y\n1,é,0\n".encode("latin-1"),
            "line 2: this row: byte 2 is 0xe9, which is not UTF-8. Write it again as UTF-8, from Latin-1",
        ),
        (b"x,y\r1,0\r", "its lines end in a carriage return alone"),
        (b"a;b;y\n1;2;0\n", "the columns seem to be separated by a semicolon. Type data.separator=semicolon."),
        (b"a\tb\ty\n1\t2\t0\n", "Type data.separator=tab."),
        (b"sep=;\na;b;y\n1;2;0\n", "line 1: it is 'sep=;', of Excel. Delete it, and type data.separator=semicolon."),
        (
            b"0.5,1,2\n0.5,1,2\n",
            "the first line has numbers where the names of columns are read: '0.5,1,2'. Write a line of names above it",
        ),
        (b"0.5,1,1\n0.5,1,2\n", "the first line has numbers where the names of columns are read"),
    ):
        (tmp_path / "a.csv").write_bytes(data)
        with pytest.raises(DtrainError) as error:
            build(tmp_path / "a.csv")
        assert sentence in str(error.value)


def test_files_that_match_and_are_not_read_are_named(tmp_path: Path) -> None:
    for name in ("b.csv.gz", "README.md", ".hidden", "notes.txt", "a.csv"):
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_text("x,y\n1.5,0\n2.5,1\n")
    source = build(tmp_path / "d")
    assert len(source) == 2 and source.notes == [
        "data.path: 4 file(s) that it matches are not read: b.csv.gz, .hidden, README.md and 1 more. What is packed has to be unpacked to be read."
    ]
    assert build(tmp_path / "d/a.csv").notes == []
