"""How often a run may be started again: failures in a row, without a new step between them."""

import json
import struct
from pathlib import Path

import pytest

from dtrain.launcher.local.restarts import RestartLog


def round_of(scratch: Path, number: int, step: int, *, kept: bool = False) -> None:
    folder = scratch / f"round-{number}"
    folder.mkdir()
    if kept:  # by a rank that was killed: what it had in memory
        (folder / "step-0").write_bytes(struct.pack("<qq", step, 8 * step))
    else:
        (folder / "report-1.json").write_text(json.dumps({"rank": 1, "step": step}))


@pytest.mark.parametrize("kept", [True, False])
def test_a_step_that_no_round_had_reached_begins_the_count_anew(kept: bool, tmp_path: Path) -> None:
    book, counts = RestartLog(), []
    for number, step in enumerate([5, 5, 4, 9, 9]):
        round_of(tmp_path, number, step, kept=kept)
        book.round = number
        counts.append((book.failed(tmp_path, "killed"), book.restarts))
    assert counts == [(True, 1), (False, 2), (False, 3), (True, 1), (False, 2)]


def test_a_failure_in_the_first_step_is_no_progress(tmp_path: Path) -> None:
    round_of(tmp_path, 0, 1)
    (tmp_path / "round-0" / "failure-1-5.json").write_text(json.dumps({"step": None}))
    book = RestartLog(round=0)
    assert not book.failed(tmp_path, "an error while building")


def test_the_next_server_reads_it(tmp_path: Path) -> None:
    assert RestartLog.read(tmp_path) == RestartLog()
    RestartLog(3, 2, 7, "rank 1 was killed").write(tmp_path)
    assert RestartLog.read(tmp_path) == RestartLog(3, 2, 7, "rank 1 was killed")
