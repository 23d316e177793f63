"""What a failure leaves: files of ranks, one paragraph, failure.json, and the error that ends the command."""

import json
import os
import signal
import tempfile
from pathlib import Path

import mounts
import pytest
from pool import ranks

from dtrain.errors import LeaseError, PreflightError, RankError, StoreError, WordsError
from dtrain.lifecycle import failure, unwatched
from dtrain.lifecycle.signals import StopRequested
from dtrain.result import Result


def test_what_the_gpus_of_the_others_were_in_is_told(tmp_path: Path) -> None:
    call = {
        "call": "all_reduce",
        "number": 7,
        "state": "scheduled",
        "between_two": False,
        "library": "nccl",
        "sizes": [[3]],
    }
    for rank, calls in enumerate([[], [call]]):
        failure.mark_started(tmp_path, rank)
        failure.report_detected(
            tmp_path, rank, "hung", "no progress for 60 s", where="mypkg/loop.py:3 in step", calls={"the world": calls}
        )
    assert failure.explain(tmp_path).paragraph.endswith(
        "rank 1 at mypkg/loop.py:3 in step, its GPU in all_reduce, collective 7 of the world."
    )


def left(folder: Path, rank: int, error: BaseException) -> None:
    """As a rank leaves it: with a traceback."""
    try:
        raise error
    except BaseException as raised:
        failure.clear_context()
        failure.set_context(step=5, samples=[32, 39], groups={"the world": 7 + rank})
        failure.report_exception(folder, rank, raised)
        failure.report_exception(folder, rank, raised)  # whoever else catches it says nothing new
        failure.clear_context()


def test_the_paragraph_says_who_where_when_and_what_the_others_did(tmp_path: Path) -> None:
    for rank in (0, 1):
        failure.mark_started(tmp_path, rank)
    left(tmp_path, 1, ValueError("loss is\nnot a number"))
    left(tmp_path, 0, RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    assert len(list(tmp_path.glob("failure-*.json"))) == 2
    failed = failure.explain(tmp_path)
    assert failed.line.startswith(
        "rank 1 failed in step 5 (positions 32 to 39 of the order): ValueError: loss is, at lifecycle/test_failure.py:"
    )
    assert f"pid {os.getpid()}]" in failed.line
    assert "Meanwhile: rank 0 at lifecycle/test_failure.py:" in failed.paragraph
    assert "(collective 7 of the world)" in failed.paragraph
    assert failed.paragraph.count("Traceback (most recent call last)") == 1
    assert "\n" not in failed.facts["message"]
    assert (failed.facts["rank"], failed.facts["kind"], failed.facts["step"], failed.facts["samples"]) == (
        1,
        "error",
        5,
        [32, 39],
    )
    assert json.loads(json.dumps(failed.facts)) == failed.facts


@pytest.mark.parametrize(
    ("error", "ends", "code"),
    [
        (ValueError("a"), RankError, 1),
        (WordsError("batch=7 does not split"), WordsError, 2),
        (StoreError("cannot save s3://b: denied"), PreflightError, 3),
        (LeaseError("another run took over"), PreflightError, 3),
    ],
)
def test_the_command_ends_with_the_error_of_the_cause(
    error: Exception, ends: type[Exception], code: int, tmp_path: Path
) -> None:
    left(tmp_path, 0, error)
    with pytest.raises(ends) as raised:
        failure.outcome(tmp_path)
    assert raised.value.exit_code == code  # type: ignore[attr-defined]
    assert raised.value.facts["rank"] == 0  # type: ignore[attr-defined]
    assert str(error) in str(raised.value)


def test_a_lost_node_is_told_by_the_sentence_of_who_missed_it(tmp_path: Path) -> None:
    left(tmp_path, 0, RuntimeError("Connection closed by peer"))
    failure.report_detected(tmp_path, None, "lost", "node 1 (there) was not heard of for 10 s")
    assert failure.explain(tmp_path).line == "node 1 (there) was not heard of for 10 s"


def test_what_starting_again_cannot_help_is_told_apart(tmp_path: Path) -> None:
    kinds = [
        failure.facts_of(error, 0)["kind"]
        for error in (WordsError("a"), LeaseError("b"), StoreError("c"), ValueError("d"), StopRequested(signal.SIGTERM))
    ]
    assert kinds == ["words", "words", "error", "error", "stopped"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_rank_that_was_asked_before_its_first_step_is_no_failure(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    left(tmp_path, 1, StopRequested(number))
    left(tmp_path, 0, RuntimeError("Connection closed by peer"))
    with pytest.raises(StopRequested) as raised:
        failure.outcome(tmp_path)
    assert raised.value.exit_code == code


def test_a_result_is_the_outcome(tmp_path: Path) -> None:
    result = Result("finished", 5, 0.5, 1.0)
    (tmp_path / "result.json").write_text(json.dumps(result.to_dict()))
    left(tmp_path, 1, ValueError("of an earlier round"))
    assert failure.outcome(tmp_path) == result


def test_a_process_that_does_not_answer_is_looked_at(tmp_path: Path) -> None:
    failure.report_unresponsive(tmp_path, 1, os.getpid())
    assert json.loads((tmp_path / "ended-1.json").read_text())["state"] == "R"
    failure.report_unresponsive(tmp_path, 1, 2**22 + 1)
    assert json.loads((tmp_path / "ended-1.json").read_text())["state"] == ""


def test_alone_a_process_tells_its_own_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with (
        pytest.raises(RankError, match=r"rank 0 failed: ValueError: a, at lifecycle/test_failure\.py"),
        unwatched.alone(str(tmp_path / "out"), 0),
    ):
        assert not unwatched.is_watched()
        raise ValueError("a")
    assert json.loads((tmp_path / "out" / "failure.json").read_text())["error"] == "ValueError: a"
    assert unwatched.is_watched()
    assert "DTRAIN_REPORTS" not in os.environ


def test_reports_of_processes_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no folder of a process that lives, of another user, or of a launcher."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user, gone = os.getuid(), 2**22 + 1
    kept = {f"dtrain-{user}-{os.getpid()}-0-", f"dtrain-{user + 1}-{gone}-0-", f"dtrain-{user}-dtrain-launch-a"}
    for name in (*kept, f"dtrain-{user}-{gone}-0-"):
        (tmp_path / name).mkdir()
    unwatched.remove_stale()
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_alone_an_error_of_dtrain_stays_what_it_is(tmp_path: Path) -> None:
    error = WordsError("one", "two")
    with pytest.raises(WordsError) as raised, unwatched.alone(str(tmp_path), 0):
        raise error
    assert raised.value is error
    assert error.facts["exit_code"] == 2


def test_a_victim_does_not_replace_what_the_cause_said(tmp_path: Path) -> None:
    failure.save(str(tmp_path), {"rank": 3, "error": "the cause"})
    failure.save(str(tmp_path), {"rank": 0, "error": "lost it", "victim": True})
    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 3


def failing(place: Path) -> tuple[str, str]:
    """The error of a run that fails while the folder for temporary files is full, and what its `out` says of it."""
    mounts.alone()
    mounts.small(place)
    tempfile.tempdir = str(place)
    out = place.with_name("out")
    try:
        with unwatched.alone(str(out), 0):
            mounts.fill(place)
            raise ValueError("my own error")
    except RankError as error:
        return str(error), json.loads((out / "failure.json").read_text())["error"]
    return "", ""


def test_a_full_folder_for_temporary_files_hides_no_error(tmp_path: Path) -> None:
    if not mounts.are_allowed():
        pytest.skip("this user may make no mount namespace")
    (tmp_path / "tmp").mkdir()
    ((paragraph, saved),) = ranks(1, failing, tmp_path / "tmp")
    assert saved == "ValueError: my own error"
    assert "rank 0 failed" in paragraph and saved in paragraph


def test_the_last_rank_to_leave_removes_the_folder_for_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an earlier start of the same launcher left, whose ranks were killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = tmp_path / f"dtrain-{os.getuid()}-{os.getppid()}-0-"
    before.mkdir()
    with unwatched.alone(str(tmp_path / "out"), 0):
        with unwatched.alone(str(tmp_path / "out"), 1):
            assert len(list(tmp_path.glob("dtrain-*"))) == 2
        (folder,) = tmp_path.glob("dtrain-*")
        assert folder != before and (folder / "began-0.json").exists()
    assert not list(tmp_path.glob("dtrain-*"))
