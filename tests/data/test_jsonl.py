"""data=jsonl: tests/data/test_rows.py for what the formats have in common; here the lines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_rows import BUILD

from dtrain.errors import DtrainError
from dtrain.files.rowfile import Reader, problem


def build(path: Path) -> Any:
    return BUILD["jsonl"](
        path=str(path), inputs="x", targets="y", holdout=0, outputs=None, cache=str(path.parent / "cache")
    )


def test_blank_lines_and_a_missing_last_line_break_are_no_rows_and_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"x": [1], "y": 0}\r\n  \n{"y": 1, "z": {}, "x": [2.5]}')
    source: Any = build(tmp_path / "a.jsonl")
    batch = source.take(np.arange(2), np.zeros(2, int))
    assert sorted(batch["inputs"].flatten().tolist()) == [1, 2.5] and sorted(batch["targets"].tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"x": [1], "y"', "line 3: this is no JSON"),
        ('{"x": [1], "y": 1, "y": 2}', "line 3: 'y' is given twice. Leave one out."),
        ('{"x": [1], "y": 1, "z": {"a": 1, "a": 2}}', "line 3: 'a' is given twice"),
        ("[1, 2]", "line 3: a row is an object of columns"),
        ('{"x": [1]}', "line 3: column y is missing"),
        ('{"x": [1], "y": null}', "line 3: column y is empty"),
        ('{"x": [1], "y": "a"}', "line 3: column y is 'a', after rows in which it was a number."),
        ('{"x": [1, null], "y": 0}', "line 3: column x has null in a list. Drop or fill it."),
        ('{"x": [[1, null]], "y": 0}', "line 3: column x has null in a list. Drop or fill it."),
        ('{"x": [[1], [1, 2]], "y": 0}', "line 3: column x has lists of different lengths in one row"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": [1], "y": 0}\n\n' + line + '\n{"x": [1], "y": 0}\n')
    with pytest.raises(DtrainError) as error:
        build(tmp_path / "a.jsonl")
    assert sentence in str(error.value)


def test_the_odd_row_is_blamed_though_it_comes_first(tmp_path: Path) -> None:
    for line, sentence in (
        ('{"x": [null], "y": 0}', "line 2: column x has null in a list. Drop or fill it."),
        ('{"x": [1], "y": "NA"}', "line 3: column y is 0, and the text 'NA' in line 2. Drop or fill what is missing."),
    ):
        (tmp_path / "a.jsonl").write_text(f'\n{line}\n{{"x": [1], "y": 0}}\n')
        with pytest.raises(DtrainError) as error:
            build(tmp_path / "a.jsonl")
        assert sentence in str(error.value)


def test_one_array_of_objects_is_read_as_lines_are(tmp_path: Path) -> None:
    """As alpaca_data.json: in one line or many, with what means something in JSON inside of a text."""
    rows = [{"x": [i, i + 1], "y": i % 3, "t": 'a ], [{ "é" \\ ' * i} for i in range(5)]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = build(tmp_path / "l.jsonl")
    for number, text in enumerate(
        (
            json.dumps(rows, ensure_ascii=False),
            "\ufeff" + json.dumps(rows, indent=2),
            json.dumps(rows, indent=1).replace("\n", "\r"),
        )
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        array = build(path)
        for part in ("inputs", "targets"):
            assert array.take(np.arange(5), np.zeros(5, int))[part].equal(
                lines.take(np.arange(5), np.zeros(5, int))[part]
            )
        given = {"path": str(path), "inputs": "x", "targets": "y"}
        assert problem(Reader("jsonl", tmp_path), [str(path)], given, trained=None) == ""
    whole = json.dumps(rows, indent=1)
    for text, sentence in (
        (whole[:-1], "the array is torn or no JSON: a comma or ] is missing"),
        (whole[:-20] + "]", "the array is torn or no JSON"),
        (whole + "{}", "something follows the end of the array"),
        (json.dumps([*rows, {"x": [1, 2]}], indent=1), "line 42: column y is missing"),
        (json.dumps([rows[0], 3]), "line 1: a row is an object of columns"),
    ):
        path = tmp_path / "torn.json"
        path.write_text(text)
        with pytest.raises(DtrainError) as error:
            build(path)
        assert sentence in str(error.value)
    path.write_text(whole[:-1])
    assert "the array has no end" in problem(Reader("jsonl", tmp_path), [str(path)], given, trained=None)
