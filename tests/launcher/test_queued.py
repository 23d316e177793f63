"""A job that waits: why, as its scheduler says it, once each time that it changes; and how its user ended it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.errors import PreflightError
from dtrain.launcher import detached, queued, slurm
from dtrain.launcher.queued import Watch
from dtrain.launcher.slurm import Slurm


class Scheduler:
    """One that answers in turn: an error, or why job 7 waits."""

    def __init__(self, *answers: str | None) -> None:
        self._answers = iter(answers)

    def jobs(self, out: str) -> list[str]:
        self._answer = next(self._answers)
        if self._answer is None:
            raise PreflightError("launcher=slurm: squeue: Unable to contact slurm controller.")
        return ["7"] if self._answer != "gone" else []

    def waiting(self, job: str) -> str:
        return self._answer or ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(queued.time, "monotonic", lambda: now[0])
    yield now


def test_why_a_job_waits_is_told_when_it_changes_and_every_half_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = "job 7 is queued (Priority); at 9", "job 7 is queued (Resources); at 8"
    answers = [first, "job 7 is queued (Priority); at 10", first, first, other, None, None, "", "", other, "gone"]
    watch = Watch(Scheduler(*answers), "out", "7")  # type: ignore[arg-type]
    seen = []
    for _ in answers:
        seen.append(watch.is_there())
        clock[0] += 10
    unknown = "the scheduler of job 7 cannot be reached; launcher=slurm: squeue: Unable to contact slurm controller."
    said = capsys.readouterr().err.splitlines()
    assert said == [f"note: {sentence}" for sentence in (first, first, other, unknown, other)]
    assert seen == [True] * 10 + [False]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([("PENDING", "Resources", "2026-11-28T18:40:00", "0")], "job 7 is queued (Resources); Slurm expects it to begin at 2026-11-28T18:40:00"),
        ([("PENDING", "BeginTime", "2026-11-28T18:40:00", "2")], "job 7 is queued again (BeginTime); Slurm expects it to begin at 2026-11-28T18:40:00"),
        ([("PENDING", "None", "N/A", "0")], "job 7 is queued; Slurm cannot say when it begins"),
        ([("CONFIGURING", "None", "N/A", "0")], "job 7 is waiting for its nodes to boot; Slurm cannot say when it begins"),
        ([("RUNNING", "None", "2026-11-28T18:40:00", "1")], ""),
        ([("PENDING", "Resources", "N/A", "0"), ("RUNNING", "None", "N/A", "0")], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_what_squeue_says_is_a_sentence(
    rows: list[tuple[str, ...]], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join("".join(each.ljust(40) for each in row) + "\n" for row in rows)
    monkeypatch.setattr(slurm, "answer", lambda *_, **__: lines)
    launcher = Slurm(
        partition=None, account=None, qos=None, time=None, more=[], setup=[], python=None, save_before=0, detach=False,
        restarts=0, silence=1.0, wait=1.0, address=None,
    )  # fmt: skip
    assert launcher.waiting("7") == sentence


def test_interrupted_stopped_and_preempted_are_three_words(tmp_path: Path) -> None:
    out = str(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({"job": "7"}))
    assert detached.ended(out, "preempted") == "preempted"

    class Launcher:
        def cancel(self, job: str, *, save: bool) -> None:
            assert (job, save) == ("7", True)

    for word in detached.HOW:
        detached.ask_to_stop(Launcher(), out, "7", word)  # type: ignore[arg-type]
        assert detached.ended(out, "preempted") == word and detached.ended(out, "finished") == "finished"
