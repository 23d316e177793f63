"""JSON lines: whole after any death, everywhere."""

import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pool import ranks

from dtrain.errors import LeaseError, StoreError
from dtrain.storage import lease, store
from dtrain.storage.jsonl import Journal


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


@pytest.mark.parametrize("root", ["folder", "memory://wide"])
def test_columns_that_come_later_are_in_the_newest_row_and_nowhere_else(tmp_path: Path, root: str) -> None:
    url = store.join(str(tmp_path) if root == "folder" else root, "rows.jsonl")
    journal = Journal(url, by_step=True)
    journal.append({"step": 1}, {"step": 2, "loss": 0.1})
    journal.durable()
    journal.widen({"first": math.nan})
    journal.widen({"second": 2.5})
    journal.durable()
    assert rows(url) == [{"step": 1}, {"step": 2, "loss": 0.1, "first": None, "second": 2.5}]
    journal.append({"step": 3})
    journal.close()
    assert [row["step"] for row in rows(url)] == [1, 2, 3]
    store.remove(url)


@pytest.mark.parametrize("deed", ["removed", "replaced", "cut"])
def test_columns_that_come_after_the_file_was_removed_are_written_with_all_rows(tmp_path: Path, deed: str) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(str(path), by_step=True)
    journal.append({"step": 1}, {"step": 2})
    if deed == "replaced":
        (tmp_path / "other").write_text('{"step": 1}\n')
        (tmp_path / "other").replace(path)
    elif deed == "cut":
        path.write_text("")
    else:
        path.unlink()
    journal.widen({"first": 1})
    journal.close()
    assert rows(str(path)) == [{"step": 1}, {"step": 2, "first": 1}]


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


def test_of_two_rows_of_a_step_one_stays(tmp_path: Path) -> None:
    """As of a file that somebody joined from two."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 3, 2, 2, 3)))
    journal = Journal(str(tmp_path / "rows.jsonl"), by_step=True)
    journal.keep(lambda row: True)
    journal.close()
    assert [row["step"] for row in rows(str(tmp_path / "rows.jsonl"))] == [1, 2, 3]


def test_rows_of_an_older_file_at_its_place_do_not_replace_those_of_now(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(str(path), by_step=True)
    journal.append({"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0})
    path.unlink()
    path.write_text("".join(f'{{"step": {step}, "loss": 9.0}}\n' for step in (1, 2)))
    journal.append({"step": 3, "loss": 2.0})
    journal.close()
    assert rows(str(path)) == [{"step": step, "loss": 2.0} for step in (1, 2, 3)]


def test_what_follows_a_line_that_is_none_is_dropped(tmp_path: Path) -> None:
    """A power cut fills the end of a file with zeros."""
    (tmp_path / "rows.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + bytes(9) + b'\n{"step": 4}\n')
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.keep(lambda row: True)
    journal.append({"step": 3})
    journal.close()
    assert [row["step"] for row in rows(str(tmp_path / "rows.jsonl"))] == [1, 2, 3]


def test_rows_are_synced_when_they_must_last_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(store, "fsync", lambda path: synced.append(path.read_text()))
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.append({"a": 1})
    assert synced == []
    journal.durable()
    journal.durable()
    assert synced == ['{"a": 1}\n']
    journal.close()


def test_rows_that_must_last_are_on_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a put failed before: the loop heard nothing of it, the save does."""
    url = "memory://durable/rows.jsonl"
    journal = Journal(url)
    journal.append({"a": 1})
    with monkeypatch.context() as patch:

        def fails(*_: object) -> None:
            raise StoreError("the network is down")

        patch.setattr(store, "write", fails)
        with pytest.raises(StoreError, match="the network is down"):
            journal.durable()
    journal.append({"a": 2})
    journal.durable()
    assert rows(url) == [{"a": 1}, {"a": 2}]
    journal.close()
    store.remove(url)


def test_rows_are_whole_however_many_threads_make_them_last(tmp_path: Path) -> None:
    """The loop appends while a save makes durable what is there."""
    url, seen = "memory://threads/rows.jsonl", []
    journal = Journal(url)

    def save() -> None:
        for _ in range(20):
            journal.durable()
            seen.append([row["n"] for row in rows(url)])

    journal.append({"n": 0})
    threads = [threading.Thread(target=save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 300):
        journal.append({"n": number})
    for thread in threads:
        thread.join()
    journal.close()
    assert all(steps == list(range(len(steps))) for steps in seen)
    assert len(rows(url)) == 300
    store.remove(url)


def test_numbers_without_a_word_in_json_become_null(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "rows.jsonl"))
    journal.append({"loss": float("nan"), "norm": float("inf"), "deep": {"x": [float("-inf"), 2]}, "step": 1})
    journal.close()
    assert rows(str(tmp_path / "rows.jsonl")) == [{"loss": None, "norm": None, "deep": {"x": [None, 2]}, "step": 1}]
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


def test_rows_go_to_no_file_of_another_run_that_has_come_to_the_place(tmp_path: Path) -> None:
    """As on a disk that is mounted, while a run writes, over the folder in which it began."""
    out, theirs = str(tmp_path / "out"), str(tmp_path / "theirs")
    with lease.hold(theirs):
        Journal(store.join(theirs, "rows.jsonl")).append({"theirs": 1})
    with pytest.raises(LeaseError, match="another run"), lease.hold(out):
        journal = Journal(store.join(out, "rows.jsonl"))
        journal.append({"step": 1})
        (tmp_path / "out").rename(tmp_path / "ours")
        (tmp_path / "theirs").rename(tmp_path / "out")
        journal.append({"step": 2})
    assert rows(store.join(out, "rows.jsonl")) == [{"theirs": 1}]


def changed(
    tmp_path: Path, *, by_step: bool, ours: Iterable[int], then: Iterable[int], theirs: Iterable[int]
) -> list[int]:
    """The steps in the file, when another one with rows of `theirs` comes to the place of that with `ours`, and goes on with `then`."""
    (tmp_path / "other").write_text("".join(f'{{"step": {step}, "of": "theirs"}}\n' for step in theirs))
    journal = Journal(str(tmp_path / "rows.jsonl"), by_step=by_step)
    if by_step:
        journal.keep(lambda row: row["step"] <= max(ours, default=0))
    journal.append(*({"step": step} for step in ours))
    (tmp_path / "other").replace(tmp_path / "rows.jsonl")
    for step in then:
        journal.append({"step": step})
    journal.close()
    return [int(str(row["step"])) for row in rows(str(tmp_path / "rows.jsonl"))]


@pytest.mark.parametrize(
    ("ours", "then", "theirs", "left"),
    [
        ((1, 2, 3), (4,), (1, 2), (1, 2, 3, 4)),
        ((1, 2, 3), (4,), (1, 2, 3, 4, 5, 6), (1, 2, 3, 4)),
        ((), (1, 2), (1, 2, 3), (1, 2)),
        ((5, 6), (7,), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7)),
        ((1, 2, 5), (6,), (1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6)),
    ],
)
def test_a_step_has_one_row_whatever_file_comes_to_the_place(
    tmp_path: Path, ours: Any, then: Any, theirs: Any, left: Any
) -> None:
    assert changed(tmp_path, by_step=True, ours=ours, then=then, theirs=theirs) == [*left]


def test_events_of_both_stay_when_another_file_comes_to_the_place(tmp_path: Path) -> None:
    assert changed(tmp_path, by_step=False, ours=(1, 2), then=(3,), theirs=(1, 2)) == [1, 2, 1, 2, 3]
