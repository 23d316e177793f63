"""What a run leaves where another one has taken its place, and commands that submit its job."""

import json
import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from launching import plan_of

from dtrain.errors import LeaseError
from dtrain.launcher import process, run
from dtrain.lifecycle import signals
from dtrain.planned import Plan
from dtrain.storage import lease


class Scheduler:
    """One whose queue is a file. `hurried`: Ctrl-C comes while a job is submitted."""

    def __init__(self, queue: Path, *, hurried: bool = False) -> None:
        self.detach, self._queue, self._hurried = True, queue, hurried
        queue.touch()

    def submit(self, plan: Plan, environment: Mapping[str, str]) -> str:
        if self._hurried:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        with self._queue.open("a") as queue:
            queue.write(f"job-{os.getpid()}\n")
        return f"job-{os.getpid()}"

    def jobs(self, out: str) -> Collection[str]:
        return self._queue.read_text().split()

    def waiting(self, job: str) -> str:
        return ""

    def cancel(self, job: str, *, save: bool) -> None:
        self._queue.write_text("")

    def log(self, out: str, job: str) -> Path:
        return Path(out, "log")

    def reading(self, out: str, job: str) -> AbstractContextManager[object]:
        return nullcontext()


def test_two_commands_at_once_submit_one_job(tmp_path: Path) -> None:
    plan, scheduler = plan_of(tmp_path / "run", "nodes=2", "devices=2"), Scheduler(tmp_path / "queue")

    def command() -> None:
        result = run._submit(plan, "", scheduler)  # type: ignore[arg-type]
        (tmp_path / f"{os.getpid()}.said").write_text(result.reason if result else "nothing")

    for pid in [process.fork(command) for _ in range(2)]:
        assert os.waitpid(pid, 0)[1] == 0
    (job,) = scheduler.jobs(plan.out)
    assert [path.read_text() for path in tmp_path.glob("*.said")] == [f"job {job}"] * 2


def test_ctrl_c_while_a_job_is_submitted_stops_that_job(tmp_path: Path) -> None:
    plan, scheduler = plan_of(tmp_path / "run", "nodes=2", "devices=2"), Scheduler(tmp_path / "queue", hurried=True)
    with pytest.raises(signals.StopRequested):
        run._submit(plan, "", scheduler)  # type: ignore[arg-type]
    assert not scheduler.jobs(plan.out)
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["job"] == f"job-{os.getpid()}"


def test_a_run_that_lost_its_lease_leaves_no_failure(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with lease.hold(out) as token:
        lease._write(out, token + 1, {**lease._record(), "id": "another run"})
        with pytest.raises(LeaseError, match="taken over by another run"):
            run._leave(out, {"error": "of the run before"})
    assert not (tmp_path / "run" / "failure.json").exists()
