"""Trackers: what they get of a run that is killed, undone and started again, while their server comes and goes."""

import csv
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from launching import plan_of
from small import plan
from tracked import Files
from until import until

from dtrain.launcher import trackers
from dtrain.logger import again
from dtrain.logger.comet import Comet
from dtrain.logger.csv import Csv
from dtrain.logger.facts import facts
from dtrain.logger.journals import Journals, Row
from dtrain.logger.sender import KILLED, Sender
from dtrain.logger.tracker import Run, Tracker, nested
from dtrain.logger.wandb import Wandb
from dtrain.secrets import MASK

KEYS = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "COMET_API_KEY")


class Fake(Tracker):
    """Keeps rows in a list that outlives it, and raises while `away`."""

    server: list[Row]
    away = False

    def connect(self, run: Run) -> int:
        self.answer()
        return max((row.step for row in self.server), default=0)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.server.append(row)
            if row.step == 25 and not self.away:  # it breaks in the middle of a batch
                type(self).away = True
        self.answer()

    def finish(self, result: Mapping[str, Any]) -> str:
        self.answer()
        return f"ended {result['status']}"

    def answer(self) -> None:
        if self.away:
            raise ConnectionError("no route to host")


def test_every_row_is_there_once_whatever_is_killed_and_away(files: Files) -> None:
    server, told = list[Row](), list[dict[str, str]]()
    Fake.server, Fake.away = server, False
    for begin, end in (0, 12), (10, 23), (20, 41), (40, 60):  # each is killed, and goes on after its newest checkpoint
        sender = Sender(Fake(out=str(files.out), steps=60), asdict(files.facts()), lambda **said: told.append(said))
        sender.back(begin)
        files.train(begin, end, evaluate=(7, 20, 40, 60))
        for _ in range(3):
            sender.look()
            Fake.away = False
        assert sender.look({"status": "finished"} if end == 60 else KILLED)
        sender.close()
    assert [row.step for row in server] == [5, 7, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60]
    assert {row.step for row in server if "eval_loss" in row.values} == {7, 20, 40, 60}, "whole rows"
    assert all(row.values["seen"] == 8 * row.step and row.values["step"] == row.step for row in server)
    assert told.count({"trouble": "ConnectionError: no route to host"}) == 1 == told.count({"say": "it works again"})
    assert told[-1] == {"say": "ended finished"}


def test_a_row_waits_until_its_evaluation_is_known(files: Files) -> None:
    journals = Journals(files.rows, files.events, every=2)
    files.train(0, 4)
    files.event("sample", 3, text="def f")
    journals.read()
    assert [row.step for row in journals.ready(0, whole=False)] == [2, 3], "a text makes step 3 one that is wanted"
    assert [row.step for row in journals.ready(0, whole=True)] == [2, 3, 4]
    assert journals.texts(3) == {"sample": [(3, "def f")]} and journals.texts(2) == {}
    files.train(1, 3)
    journals.read()
    journals.close()
    assert [row.step for row in journals.ready(0, whole=True)] == [2, 3], "rows of steps that were undone are gone"


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_could_not_be_sent_is_told_and_sent_later(files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    files.train(0, 20)
    (files.out / "metrics.new").mkdir()  # the file cannot be written
    tracker = Csv(out=str(files.out), steps=20)
    tracker.begin(files.facts())
    tracker.back(0)
    assert tracker._process
    until(lambda: tracker.scalars(20, {}) or "IsADirectoryError" in tracker._told)
    os.killpg(tracker._process.pid, signal.SIGKILL)
    tracker.end({"status": "finished", "step": 20})
    assert f"dtrain runs send {files.out} sends what is missing" in capfd.readouterr().out
    (files.out / "metrics.new").rmdir()
    assert again.send(str(files.out)) == {"csv": ""}
    assert [row["step"] for row in rows_of(files.out)] == ["5", "10", "15"], "it may go on, so the last row waits"


def test_its_file_of_the_run_holds_no_secret(files: Files) -> None:
    fake = Fake(out=str(files.out), steps=60, name="https://me:hunter2hunter2@host/x")
    Fake.server, Fake.away = [], False
    sender = Sender(fake, asdict(files.facts()), lambda **said: None)
    sender.back(0)
    assert sender.look(KILLED)
    sender.close()
    (noted,) = (files.out / "trackers").iterdir()
    assert "hunter2" not in noted.read_text() and MASK in noted.read_text()


def test_a_job_of_a_sweep_is_called_by_its_values_and_the_sweep_is_its_group(tmp_path: Path) -> None:
    (tmp_path / "tune/lr-0.5-abc").mkdir(parents=True)
    (tmp_path / "tune/sweep.yaml").write_text("spaces: [{optim.lr: [0.5], seed: [0]}]")
    (tmp_path / "tune/lr-0.5-abc/config.yaml").write_text(
        "seed: 3  # command line\noptim:\n  lr: 0.5  # command line\n"
    )
    told = facts(plan(f"out={tmp_path}/tune/lr-0.5-abc", "optim.lr=0.5", "seed=3"))
    assert (told.name, told.group) == ("optim.lr=0.5 seed=3", "tune")
    assert told.words == {"seed": "3", "optim.lr": "0.5"} and told.settings["optim.lr"] == 0.5
    alone = facts(plan(f"out={tmp_path}/tune"))
    assert (alone.name, alone.group) == ("tune", "")
    assert nested({"a.b": 1, "a.c": 2, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def keyless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    yield


@pytest.mark.usefixtures("keyless")
def test_a_tracker_without_a_key_is_refused_with_its_offline_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"out": str(tmp_path), "steps": 1}
    assert "logger.wandb.mode=offline" in Wandb(**here).lacks()
    assert "logger.comet.mode=offline" in Comet(**here).lacks()
    assert Wandb(**here, mode="offline").lacks() == "" == Comet(**here, mode="offline").lacks()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert Wandb(**here).lacks() == ""
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:8080")
    assert Wandb(**here).lacks()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert Wandb(**here).lacks() == ""


def test_a_tracker_without_its_package_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ("wandb", "mlflow", "trackio", "aim", "comet", "csv")
    problems = [*trackers.problems(plan_of(tmp_path, f"logger=[{','.join(words)}]"))]
    installs = [re.findall(r"pip install 'dtrain\[(\w+)\]'", text) for text in problems]
    assert installs == [[word] for word in words[:-1]]
