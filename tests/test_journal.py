"""JSON lines: whole after any death, everywhere."""

import json
from pathlib import Path

import pytest
from pool import ranks

from dtrain import store
from dtrain.journal import Journal


def rows(url: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in store.read(url).decode().splitlines()]


@pytest.mark.parametrize("root", ["folder", "memory://journal"])
def test_rows_of_two_lives_follow_each_other(tmp_path: Path, root: str) -> None:
    url = store.join(str(tmp_path) if root == "folder" else root, "deep", "rows.jsonl")
    for start in (0, 2):
        journal = Journal(url)
        journal.append({"step": start}, {"step": start + 1})
        journal.close()
    assert [row["step"] for row in rows(url)] == [0, 1, 2, 3]
    store.remove(url)


def test_a_row_is_there_as_soon_as_it_is_said(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.append({"a": 1})
    assert rows(str(tmp_path / "rows.jsonl")) == [{"a": 1}]
    journal.close()


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.append({"step": 3})
    journal.close()
    assert [row["step"] for row in rows(str(tmp_path / "rows.jsonl"))] == [1, 2, 3]


def test_a_file_that_is_half_a_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"st')
    Journal(str(tmp_path / "rows.jsonl")).close()
    assert rows(str(tmp_path / "rows.jsonl")) == []


def test_rows_that_will_be_written_again_are_dropped(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.append(*({"step": step} for step in range(5)))
    journal.keep(lambda row: row["step"] <= 2)
    journal.append({"step": 3, "again": True})
    journal.close()
    assert [row["step"] for row in rows(str(tmp_path / "rows.jsonl"))] == [0, 1, 2, 3]


def test_numbers_without_a_word_in_json_become_null(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.append({"loss": float("nan"), "norm": float("inf"), "deep": {"x": float("-inf")}, "step": 1})
    journal.close()
    assert rows(str(tmp_path / "rows.jsonl")) == [{"loss": None, "norm": None, "deep": {"x": None}, "step": 1}]
    assert "NaN" not in (tmp_path / "rows.jsonl").read_text()


def on_s3(url: str) -> list[dict[str, object]]:
    for step in (1, 2):
        journal = Journal(url)
        journal.append({"step": step})
        if step == 2:
            journal.keep(lambda row: row["step"] != 1)
        journal.close()
    return rows(url)


def test_s3_cannot_append_and_has_the_rows_all_the_same(s3: str) -> None:
    assert ranks(1, on_s3, f"{s3}/journal/rows.jsonl") == [[{"step": 2}]]
