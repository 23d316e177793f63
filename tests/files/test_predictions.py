"""Rows in durable parts: joined or kept, continued, and never mixed with others."""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from dtrain.errors import WordsError
from dtrain.files.predictions import Predictions
from dtrain.storage import store

FACTS = {"checkpoint": "step-1/a", "rows": 5}
PARTS = [{"row": [0, 1], "p": [0.5, float("nan")]}, {"row": [2, 3], "p": [1.0, 2.0]}, {"row": [4], "p": [3.0]}]


def filled(to: str) -> Predictions:
    made = Predictions(to)
    assert made.begin(FACTS) == 0
    for number, part in enumerate(PARTS):
        made.write(number, part)
    made.finish(FACTS, 3)
    return made


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_file_is_made_of_its_parts(place: str, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{tmp_path.name}"
    made = filled(f"{root}/a.jsonl")
    read = [json.loads(line) for line in store.read(f"{root}/a.jsonl").decode().splitlines()]
    assert [row["row"] for row in read] == [0, 1, 2, 3, 4] and read[1]["p"] is None
    assert not store.exists(f"{root}/a.jsonl.parts/part-000000.jsonl")
    assert made.look(FACTS) == "done" and made.begin(FACTS) is None


def test_parquet_has_types(tmp_path: Path) -> None:
    filled(f"{tmp_path}/a.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table["row"].to_pylist() == [0, 1, 2, 3, 4] and str(table["p"].type) == "double"


def test_a_folder_keeps_its_parts(tmp_path: Path) -> None:
    filled(f"{tmp_path}/rows.parquet/")
    assert pyarrow.parquet.read_table(sorted((tmp_path / "rows.parquet").glob("*.parquet"))[2])["row"].to_pylist() == [
        4
    ]
    filled(f"{tmp_path}/rows/")
    assert (tmp_path / "rows" / "part-000002.jsonl").read_text() == '{"row": 4, "p": 3.0}\n'


def test_it_goes_on_behind_the_parts_that_are_there(tmp_path: Path) -> None:
    made = Predictions(f"{tmp_path}/a.jsonl")
    made.begin(FACTS)
    made.write(0, PARTS[0])
    assert made.look(FACTS) == "begun" and Predictions(made.to).begin(FACTS) == 1
    made.write(2, PARTS[2])
    assert made.begin(FACTS) == 1, "a part without the one before it does not count"


def test_a_kill_after_the_join_joins_again(tmp_path: Path) -> None:
    made = Predictions(f"{tmp_path}/a.jsonl")
    made.begin(FACTS)
    for number, part in enumerate(PARTS):
        made.write(number, part)
    store.write(made.to, b"joined, and killed before the record said so")
    assert made.begin(FACTS) == 3
    made.finish(FACTS, 3)
    assert len(Path(made.to).read_text().splitlines()) == 5


def test_other_rows_are_refused(tmp_path: Path) -> None:
    made = filled(f"{tmp_path}/a.jsonl")
    with pytest.raises(WordsError, match=r"holds other rows \(rows 5 there, 6 here\). Type predict.to=<another place>"):
        made.begin({**FACTS, "rows": 6})
    (tmp_path / "b.jsonl").write_text("mine")
    with pytest.raises(WordsError, match=r"b.jsonl exists, and dtrain predict did not write it"):
        Predictions(f"{tmp_path}/b.jsonl").begin(FACTS)
    (tmp_path / "a.jsonl.predict.json").write_text("{torn")
    with pytest.raises(WordsError, match="holds other rows"):
        made.begin(FACTS)


def test_a_place_says_what_it_is() -> None:
    with pytest.raises(WordsError, match=r"a file ends in \.jsonl or \.parquet, a folder of parts in /"):
        Predictions("rows.txt")
