"""data=jsonl: tests/data/test_rows.py for what the formats have in common; here the lines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_rows import BUILD

from dtrain.errors import DtrainError


def build(path: Path) -> object:
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
        ('{"x": [1], "y": "a"}', "line 3: column y is 'a', after rows in which it was a number"),
        ('{"x": [[1], [1, 2]], "y": 0}', "line 3: column x has lists of different lengths in one row"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": [1], "y": 0}\n\n' + line + '\n{"x": [1], "y": 0}\n')
    with pytest.raises(DtrainError) as error:
        build(tmp_path / "a.jsonl")
    assert sentence in str(error.value)
