"""Whoever reads the output may go; the run goes on, and says nothing of it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import COMMAND, Forked

from dtrain.secrets import screen

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", ["", "strategy=ddp devices=2"])
def test_a_run_outlives_who_reads_it(tmp_path: Path, ranks: str) -> None:
    words = f"model=mlp data=synthetic steps=20 batch=4 out={tmp_path} {ranks}".split()
    with Forked([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as run:
        assert run.stdout and run.stderr
        assert run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait(timeout=300) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 20)
    assert "logger_failed" not in (tmp_path / "events.jsonl").read_text()


def test_a_plan_that_nobody_reads_on_ends_in_silence(tmp_path: Path) -> None:
    with Forked(
        [*COMMAND, "plan", "why"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as run:
        assert run.stdout and run.stderr
        run.stdout.close()
        assert (run.stderr.read(), run.wait(timeout=300)) == ("", 0)


@pytest.mark.often("strategy=ddp devices=2", others=pytest.mark.campaign("commands"))
@pytest.mark.parametrize("words", ["devices=1", "strategy=ddp devices=2", "seed=0,1 -m"])
def test_a_terminal_without_a_character_gets_its_number(tmp_path: Path, words: str) -> None:
    done = subprocess.run(
        [*COMMAND, *f"model=mlp data=synthetic steps=4 batch=4 out=ü {words}".split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xfc" in done.stdout
    assert "logger_failed" not in "".join(file.read_text() for file in (tmp_path / "ü").rglob("events.jsonl"))


def test_a_stream_of_a_caller_that_lacks_a_character_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr("sys.stdout", stream)
    screen.say("é 日")
    assert stream.buffer.getvalue() == b"\xe9 \\u65e5\n"  # type: ignore[attr-defined]


@pytest.mark.campaign("commands")
def test_a_command_whose_descriptors_are_closed_does_its_work(tmp_path: Path) -> None:
    words = "model=mlp data=synthetic steps=4 out=run"
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m dtrain {words} <&- >&- 2>&-"], cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "finished"


def test_a_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = f"cd gone && rmdir ../gone && {sys.executable} -m dtrain plan"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1) and "was started in is gone" in done.stderr


def test_a_row_wraps_below_its_own_text() -> None:
    figures, words = "activations 15.6 GiB  gradients 8.46 GiB  optimizer 541 MiB", "a step takes all 28.7 s or more"
    assert screen.wrapped("", figures, 45) == "activations 15.6 GiB  gradients 8.46 GiB\noptimizer 541 MiB"
    assert screen.wrapped("time  ", words, 27) == "time  a step takes all\n      28.7 s or more"
    assert screen.wrapped("out  ", "/" * 44, 25) == f"out  {'/' * 20}\n     {'/' * 20}\n     ////"
    assert screen.wrapped("job  ", f"{words}\n{words}", 26) == f"job  {words}\n{words}", "a script stays as it is"


def test_a_text_of_somebody_else_cannot_imitate_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    screen.complain("the file says:\ndtrain: all is well\nwarning: none")
    assert capsys.readouterr().err == "dtrain: the file says:\n  dtrain: all is well\n  warning: none\n"
