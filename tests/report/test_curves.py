"""Journals become curves: means of equal parts, whatever is missing or damaged in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.report import curves


def journal(folder: Path, rows: list[Any], name: str = "metrics.jsonl") -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n")
    return str(folder)


def test_a_part_has_the_mean_the_lowest_and_the_highest_of_its_steps(tmp_path: Path) -> None:
    url = journal(tmp_path, [{"step": step, "loss": step * 1.0} for step in range(1, 9)])
    table = curves.metrics(url, points=4, parts=8)
    assert (table.first, table.last) == (1, 8)
    assert table.curves["loss"] == curves.Curve([1.5, 3.5, 5.5, 7.5], [1, 3, 5, 7], [2, 4, 6, 8])
    assert [table.step(part, 4) for part in range(4)] == [1.5, 3.5, 5.5, 7.5]


def test_a_step_that_was_done_twice_has_its_last_row_and_a_gap_is_none(tmp_path: Path) -> None:
    url = journal(tmp_path, [{"step": 1, "loss": 9.0}, {"step": 4, "loss": 2.0}, {"step": 1, "loss": 3.0}])
    assert curves.metrics(url, points=10, parts=8).curves["loss"].means == [3.0, None, None, 2.0]


HOSTILE = [
    "not json", '{"step": 3', "[1]", "null", '{"step": "4", "loss": 1}', '{"step": -1, "loss": 1}', '{"step": 1e3, "loss": 1}', '{"loss": 1}',
    f'{{"step": {10**400}, "loss": 1}}', '{"step": 2, "loss": NaN, "norm": Infinity, "lr": true, "x": "text", "y": [1]}', "[" * 100_000,
    f'{{"step": 2, "loss": {10**400}}}', "\x00\x1b", "",
]  # fmt: skip


def test_what_is_no_row_with_finite_numbers_is_left_out(tmp_path: Path) -> None:
    url = journal(tmp_path, [*HOSTILE, {"step": 5, "loss": 7.0}])
    table = curves.metrics(url, points=10, parts=8)
    assert list(table.curves) == ["loss"]
    assert [value for value in table.curves["loss"].means if value is not None] == [7.0]
    assert curves.metrics(str(tmp_path / "none"), points=10, parts=8) == curves.Metrics(0, 0, {})


def test_of_a_long_journal_parts_are_read_from_its_beginning_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 20_000
    url = journal(tmp_path, [{"step": step, "loss": 1 / step, "padding": 0.5} for step in range(1, steps + 1)])
    read, real = list[int](), curves.store.parts
    monkeypatch.setattr(
        curves.store, "parts", lambda url, begins, count: read.append(len(begins) * count) or real(url, begins, count)
    )
    table = curves.metrics(url, points=100, parts=32, names=("loss",))
    assert (table.first, table.last) == (1, steps)
    assert read == [32 * curves.PART]
    known = [(table.step(part, 100), mean) for part, mean in enumerate(table.curves["loss"].means) if mean is not None]
    assert len(known) >= 32
    assert all(mean == pytest.approx(1 / step, rel=0.2) for step, mean in known[5:])


def test_a_hostile_journal_has_not_more_columns_than_a_page_shows(tmp_path: Path) -> None:
    url = journal(tmp_path, [{"step": 1, **{f"column{number}": 1.0 for number in range(1000)}}])
    assert len(curves.metrics(url, points=10, parts=8).curves) == curves.MOST_COLUMNS


def test_evaluations_keep_the_last_one() -> None:
    events = [{"event": "evaluated", "step": step, "eval_loss": float(step), "other": 1.0} for step in range(1, 101)]
    assert curves.evaluations(events, points=10) == {"eval_loss": [(step, float(step)) for step in range(10, 101, 10)]}
    assert curves.evaluations([{"event": "evaluated", "step": "x", "eval_loss": 1.0}], points=10) == {}


def test_the_clock_runs_between_events_and_stands_while_a_run_is_down() -> None:
    events = [
        {"event": "started", "step": 0, "time": 100.0},
        {"event": "committed", "step": 10, "time": 110.0},
        {"event": "evaluated", "step": 15, "time": 115.0},
        {"event": "started", "step": 10, "time": 200.0},
        {"event": "finished", "step": 20, "time": 210.0},
        {"event": "caveat", "time": 205.0},
        {"event": "committed", "step": 12, "time": "soon"},
    ]
    assert curves.clock(events, [5, 10, 11, 20, 22]) == [105.0, 110.0, 201.0, 210.0, 212.0]
    assert curves.clock([], [5]) == [None]
