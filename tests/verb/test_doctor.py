"""The command: what it says of this machine, a storage and ranks, its exit codes, and that it leaves nothing."""

import json
from collections.abc import Iterable
from pathlib import Path

import commands
import pytest

from dtrain.__main__ import main
from dtrain.doctor import Case, Finding, loading
from dtrain.verb import doctor

FINE = {"version": "2.13.0", "seconds": 1.0, "cuda": None, "nccl": None, "gloo": True, "gpus": 0}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has been asked already, and plugins, which are all imported for that, are not."""
    monkeypatch.setattr(loading, "begin", lambda code: lambda: FINE)
    monkeypatch.setattr(doctor, "CHECKS", [check for check in doctor.CHECKS if check is not loading.plugins])


def dtrain(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["doctor", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_it_runs_whole_on_two_ranks(tmp_path: Path) -> None:
    """As a user types it; and nothing under `out` afterwards."""
    words = ["model=mlp", "data=synthetic", "objective=regression", "devices=2", "strategy=ddp", f"out={tmp_path}/run"]
    done = commands.run("doctor", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok    ranks        2 met, on ") for line in lines)
    assert any(line.split()[:4] == ["world", "2", "gloo", "16"] for line in lines)
    assert "nothing would stop a run" in lines[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_json_says_the_same_for_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = dtrain(capsys, "json", f"out={tmp_path}/run")
    report = json.loads(output)
    assert (code, report["exit_code"]) == (0, 0)
    assert {"packages", "gpu", "storage", "speed", "torch", "ranks"} <= {
        finding["check"] for finding in report["findings"]
    }
    assert all(finding["verdict"] in ("ok", "note", "stop") for finding in report["findings"])


@pytest.mark.usefixtures("quick")
def test_what_would_stop_a_run_is_exit_code_3_and_says_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    code, output = dtrain(capsys, f"out={tmp_path}/file/run", "data.path=/no/such/place")
    assert code == 3
    assert "STOP  words        data.path=/no/such/place" in output
    stop = next(index for index, line in enumerate(output.splitlines()) if line.startswith("STOP  storage"))
    assert output.splitlines()[stop + 1].strip().startswith("-> ")
    assert "would stop a run" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_wrong_words_are_refused_before_anything_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = dtrain(capsys, "strategy=fdsp")
    assert code == 2
    assert output.startswith("dtrain: strategy=fdsp")


def test_among_ranks_of_somebody_else_it_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, output = dtrain(capsys)
    assert code == 2
    assert "unset RANK" in output


@pytest.mark.usefixtures("quick")
def test_a_check_that_fails_itself_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def shaky(case: Case) -> Iterable[Finding]:
        yield Finding("shaky", "ok", "so far")
        raise RuntimeError("secret at s3://user:hidden@host/b\nand more")

    monkeypatch.setattr(doctor, "CHECKS", (shaky,))
    code, output = dtrain(capsys, f"out={tmp_path}")
    assert code == 0
    assert "note  shaky        this check failed: RuntimeError: secret at s3://***@host/b" in output
    assert "hidden" not in output


def test_a_plugin_that_breaks_the_reading_of_words_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(words: object) -> None:
        raise AttributeError("no_such_thing")

    monkeypatch.setattr(doctor, "compose", broken)
    monkeypatch.setattr(
        loading,
        "plugins",
        lambda case=None: [Finding("plugins", "note", "hydra_plugins.bad cannot be loaded", "pip uninstall bad")],
    )
    code, output = dtrain(capsys)
    assert code == 3
    assert "STOP  plugins      hydra_plugins.bad" in output
    assert "-> pip uninstall bad" in output
