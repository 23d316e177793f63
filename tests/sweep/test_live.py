"""The screen of a sweep: a table on a terminal, a line for each job elsewhere; a job's output cannot imitate either."""

import os
import pty
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import COMMAND, Forked

from dtrain.sweep import live
from dtrain.sweep.folder import Job
from dtrain.sweep.log import Log
from dtrain.sweep.proposer import Ended
from dtrain.sweep.study import Study

STUDY = Study(metrics=("eval_loss",), goals=("min",))


@dataclass
class InSlot:
    job: Job
    log: Any
    began: float = 0.0


@dataclass
class Output:
    line: str = ""
    asked: list[bytes] = field(default_factory=list)

    def newest(self, begin: bytes) -> str:
        self.asked.append(begin)
        return self.line


def job(number: int) -> Job:
    return Job({"seed": number}, (), f"seed-{number}-0123abcd")


def picture(table: live.Table, running: list[InSlot]) -> str:
    from rich.console import Console

    console = Console(width=100, file=open(os.devnull, "w"), record=True)  # noqa: SIM115, PTH123
    console.print(table._picture(running))
    text = console.export_text()
    console.file.close()
    return text


def test_the_table_has_what_runs_and_what_came_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    table = live.Table("runs/s", 10, 2, STUDY)
    clock[0] += 30
    table.ended(job(1), Ended("finished", metrics={"eval_loss": 2.5}), 3.0)
    table.ended(job(2), Ended("finished", metrics={"eval_loss": 1.5}), 3.0)
    table.ended(job(3), Ended("failed", error="ValueError: planned"), 3.0)
    running = [InSlot(job(4), Output("step 40/100  loss 1.25  80 samples/s"), 1020.0), InSlot(job(5), Output(), 1029.0)]
    lines = [" ".join(line.split()) for line in picture(table, running).splitlines()]
    assert lines == [
        "runs/s · 4 of 10 finished · 2 running · 1 failed · 6 jobs a minute · left 0:00:50",
        "best · eval_loss 1.5 · seed=2", "seed=4 40/100 loss 1.25 80 samples/s 0:00:10", "seed=5 0:00:01",
    ]  # fmt: skip
    assert capsys.readouterr().err == "dtrain: seed=3 failed: ValueError: planned\n"


def test_many_jobs_and_hostile_output_fit() -> None:
    table = live.Table("s", 100, 0, STUDY)
    running = [
        InSlot(job(number), Output("step 1/2  [red]\x1b[2J\x07" + "x" * 500)) for number in range(live.MOST_ROWS + 3)
    ]
    lines = picture(table, running).splitlines()
    assert len(lines) == live.MOST_ROWS + 2 and lines[-1].strip() == "and 3 more"
    assert "\x1b" not in "".join(lines) and "[red]\\x1b[2J\\x07" in lines[1]


def test_it_draws_no_more_than_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    table, output = live.Table("s", 10, 0, STUDY), Output()
    for _ in range(100):  # of a tenth of a second
        clock[0] += 0.1
        table.tick([InSlot(job(1), output)])
    assert len(output.asked) <= 20


def test_the_newest_line_of_a_job_is_a_whole_one(tmp_path: Path) -> None:
    log = Log(tmp_path / "pipe", str(tmp_path / "log.txt"))
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    for text, newest in (
        (b"hello\nstep 1/9  loss 3\nother\n", "step 1/9  loss 3"),
        (b"step 2/9  lo", "step 1/9  loss 3"),
        (b"ss 2\n", "step 2/9  loss 2"),
    ):
        os.write(writer, text)
        log.read()
        assert log.newest(b"step ") == newest
    os.close(writer)
    log.close(keep=False)


def test_on_a_terminal_and_elsewhere(tmp_path: Path) -> None:
    words = [
        "model=mlp",
        "data=synthetic",
        "data.samples=64",
        "objective=regression",
        "steps=4",
        "hook=[]",
        "logger=[]",
        "seed=0,1",
    ]
    ours, its = pty.openpty()
    running = Forked(
        [*COMMAND, "-m", *words, "sweep.out=s"],
        stdout=its,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(its)
    output = b""
    while True:
        try:
            output += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert running.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    assert re.search(r"s · \d of 2 finished · \d running", text) and "[1/2]" not in text
    elsewhere = commands.run("-m", *words, "sweep.out=t", cwd=tmp_path).stdout
    assert "[1/2] finished seed=" in elsewhere and "[2/2] finished seed=" in elsewhere and "running" not in elsewhere
