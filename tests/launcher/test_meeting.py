"""The file by which processes without an address meet: only what this start's first process wrote is taken."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.cluster.allocation import External, external
from dtrain.errors import PreflightError
from dtrain.launcher.meeting import meeting, url

SRUN = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"
}  # fmt: skip
START = "0" * 32


def place(**more: str) -> External:
    seen = external({**SRUN, **more})
    assert seen
    return seen


FIRST, SECOND = place(), place(SLURM_PROCID="1", SLURM_LOCALID="1")


@pytest.fixture
def door() -> Iterator[int]:
    """A port where somebody answers with the id of a start."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    with server.accept()[0] as visitor:
                        visitor.sendall(START.encode())
                except OSError:
                    return

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def left(out: Path, **more: Any) -> None:
    """A file that no living process wrote, unless `door` says otherwise."""
    facts = {
        "address": "127.0.0.1",
        "port": 9,
        "door": 9,
        "job": f"srun {FIRST.job} 2",
        "start": START,
        "signature": "",
    }
    (out / "meeting.json").write_text(json.dumps({**facts, **more}))


def found(out: Path, outer: External = SECOND, wait: float = 0.5) -> tuple[str, int]:
    with meeting(str(out), outer, on_one_host=True, wait=wait) as where:
        return where


def test_the_others_find_the_first_one_for_as_long_as_it_lives(tmp_path: Path) -> None:
    with meeting(str(tmp_path), FIRST, on_one_host=True, wait=1) as where:
        assert [found(tmp_path), found(tmp_path)] == [where, where]
        assert where[0] == "127.0.0.1"
    assert not Path(url(str(tmp_path))).exists()
    with pytest.raises(
        PreflightError, match=r"rank 1 has waited 0\.5 s for rank 0, .*meeting\.json: it does not exist"
    ):
        found(tmp_path)


def test_the_file_of_an_earlier_start_is_not_taken_and_the_next_one_is(tmp_path: Path) -> None:
    left(tmp_path)
    with pytest.raises(PreflightError, match="an earlier start left it"):
        found(tmp_path)
    waiting = dict[str, tuple[str, int]]()
    thread = threading.Thread(target=lambda: waiting.update(where=found(tmp_path, wait=60)))
    thread.start()
    with meeting(str(tmp_path), FIRST, on_one_host=True, wait=1) as where:
        thread.join(60)
    assert waiting["where"] == where


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"address": "evil.example.org"}, "is not an address"), ({"address": "127.0.0.1\nMASTER"}, "is not an address"), ({"port": "80"}, "port is '80', not a port"),
        ({"port": 1 << 16}, "not a port"), ({"start": "../" * 10}, "not an id"), ({"job": "srun other 2"}, "another job wrote it"),
        ({"start": "1" * 32}, "another process answers"), ({"signature": "0" * 64}, "signed with another DTRAIN_SECRET"), ({"signature": "é"}, "signed with another"),
    ],
)  # fmt: skip
def test_what_the_first_process_cannot_have_written_is_refused(
    wrong: dict[str, Any], reason: str, tmp_path: Path, door: int
) -> None:
    left(tmp_path, door=door)
    assert found(tmp_path) == ("127.0.0.1", 9), "without the mistake it is taken"
    left(tmp_path, door=door, **wrong)
    with pytest.raises(PreflightError) as refused:
        found(tmp_path)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"address": 1}', "[" * 4000, "x" * 9000, "\x00"])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "meeting.json").write_text(text)
    with pytest.raises(PreflightError, match=r"meeting\.json: "):
        found(tmp_path, wait=0.1)


def test_with_a_secret_the_file_is_signed_and_does_not_hold_it(
    tmp_path: Path, door: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_SECRET", "a secret of sixteen letters")
    left(tmp_path, door=door)
    with pytest.raises(PreflightError, match="signed with another DTRAIN_SECRET, or with none"):
        found(tmp_path)
    with meeting(str(tmp_path), FIRST, on_one_host=True, wait=1) as where:
        assert found(tmp_path) == where
        assert "sixteen" not in (tmp_path / "meeting.json").read_text()
        monkeypatch.setenv("DTRAIN_SECRET", "another secret of as many")
        with pytest.raises(PreflightError, match="another DTRAIN_SECRET"):
            found(tmp_path)


def test_memory_that_no_other_process_sees_is_refused_at_once() -> None:
    with pytest.raises(PreflightError, match=r"Type out=<a folder that they share>, or set MASTER_ADDR"):
        meeting("memory://x", FIRST, on_one_host=True, wait=1).__enter__()
