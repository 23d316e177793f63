"""A sweep of which a process is killed at every operation on its disk ends with all results, and begins none again."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from sweep.test_engine import SMALL, finished, jobs, result, starts
from sweep.test_searches import KNOWN, SPACE, best, drawn

from dtrain.storage import store
from dtrain.storage.disk import Disk

pytestmark = pytest.mark.campaign("kills")

MOST = 110
"""More than a job has operations."""


class Killing(Disk):
    """Kills the command before its `at`-th operation, or without `at` a job before the one that its seed counts. Once:
    `marks` gets a file for each kill, with the operation."""

    def __init__(self, marks: Path, at: int | None = None) -> None:
        self._marks, self._at, self._test = marks, at, os.getpid()
        self._pid, self._count, self._seed = 0, 0, 0

    def before(self, name: str, place: Any) -> None:
        if self._pid != os.getpid():
            self._pid, self._count = os.getpid(), 0
        seed = re.search(r"seed-(\d+)-", str(place))
        self._seed = int(seed[1]) if seed else self._seed
        self._count += 1
        is_command = os.getppid() == self._test
        if is_command == (self._at is not None) and self._count == (self._at if is_command else self._seed):
            mark = self._marks / f"{self._at or self._seed}"
            if not mark.exists():
                mark.write_text(f"{name} {place}")
                os.kill(os.getpid(), signal.SIGKILL)


def _counted(name: str) -> Any:
    def act(self: Killing, *arguments: Any) -> Any:
        self.before(name, arguments[-1] if isinstance(arguments[-1], Path) else "")
        return getattr(Disk, name)(self, *arguments)

    return act


for _name in ("mkdir", "create", "write", "fsync", "link", "replace", "unlink", "rmdir", "sync"):
    setattr(Killing, _name, _counted(_name))


def test_a_job_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many jobs is killed at another one, and tried again."""
    words = ["-m", *SMALL, "checkpoint.every=2", f"seed=range(1,{MOST})"]
    calm = commands.run(*words, "sweep.out=calm", cwd=tmp_path, timeout=400)
    assert calm.returncode == 0, calm.stderr
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setattr(store, "disk", Killing(marks))
    done = commands.run(*words, "sweep.out=killed", cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    operations = {path.read_text().split()[0] for path in marks.iterdir()}
    assert operations >= {"mkdir", "create", "write", "fsync", "link", "replace", "unlink", "sync"}
    killed, before = jobs(tmp_path / "killed"), jobs(tmp_path / "calm")
    kills = {int(path.name) for path in marks.iterdir()}
    assert len(finished(tmp_path / "killed")) == MOST - 1
    assert kills == set(range(2, max(kills) + 1)), "the first operation is on the folder of the sweep"
    assert max(kills) < MOST - 1, "a job has more operations than there are jobs"
    for name, job in killed.items():
        assert result(job)[0] == result(before[name])[0] and result(job)[1][-1] == result(before[name])[1][-1], name
        # a kill between the event and result.json begins it again
        assert (job / "events.jsonl").read_text().splitlines()[-1].count('"event": "finished"') == 1
        assert starts(job) <= 2


@pytest.mark.slow
def test_the_command_of_a_search_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", *KNOWN, *SPACE, "sweep.search=tpe", "sweep.trials=3", "sweep.parallel=2"]
    calm = commands.run(*words, "sweep.out=calm", cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    winner, trials = best(tmp_path, "calm"), drawn(tmp_path / "calm")
    marks = tmp_path / "marks"
    marks.mkdir()
    for at in _until_done(marks):
        out = f"killed-{at}"
        with monkeypatch.context() as patch:
            patch.setattr(store, "disk", Killing(marks, at))
            killed = commands.run(*words, f"sweep.out={out}", cwd=tmp_path)
        assert killed.returncode == (-signal.SIGKILL if (marks / f"{at}").exists() else 0), killed.stderr
        events = {job: (job / "events.jsonl").read_bytes() for job in finished_jobs(tmp_path / out)}
        again = commands.run(*words, f"sweep.out={out}", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert drawn(tmp_path / out) == trials and best(tmp_path, out) == winner, at
        assert len(finished(tmp_path / out)) == 3
        for job, text in events.items():
            assert (job / "events.jsonl").read_bytes() == text, f"{job} was begun again after it had finished"
    operations = {path.read_text().split()[0] for path in marks.iterdir()}
    assert operations >= {"mkdir", "create", "write", "fsync", "link", "replace", "unlink", "sync"}


def _until_done(marks: Path) -> Iterator[int]:
    """Numbers of operations, until the command has fewer."""
    for at in range(1, 1000):
        yield at
        if not (marks / f"{at}").exists():
            return


def finished_jobs(root: Path) -> list[Path]:
    return [path.parent for path in finished(root)]
