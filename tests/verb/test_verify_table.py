"""Faults of users' models are caught and told apart, and right models pass: the whole tables are slow, a sample is not."""

from pathlib import Path

import pytest
from right_models import RIGHT
from verifying import verified
from wrong_models import WRONG, net

FAST_WRONG = (
    "a mean over the tokens of a microbatch",
    "a forward that normalises by its batch",
    "padding that is read",
    "functional dropout",
    "a generator of its own",
    "random bytes of the system",
    "data that counts what it was asked for",
)
FAST_RIGHT = ("gradients of all sizes", "targets that do not count")


def caught(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, kind, first = WRONG[name]
    report = verified(out, words, monkeypatch)
    assert not report["same"], f"{name} is not noticed"
    assert kind in dict(report["kinds"]), report["kinds"]
    assert kind == "mesh" or "mesh" not in dict(report["kinds"]), report["kinds"]
    assert report["first"].startswith(first), report["first"]


def passes(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers") if "right_models.hf" in RIGHT[name] or "zoo.mixtral" in RIGHT[
        name
    ] or "zoo.llama" in RIGHT[name] else None
    report = verified(out, RIGHT[name], monkeypatch)
    assert report["same"], (report["first"], report.get("kinds"), report.get("error"), report["rows"])


@pytest.mark.parametrize("name", FAST_WRONG)
def test_a_fault_is_caught_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught(name, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("name", FAST_RIGHT)
def test_a_right_model_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes(name, tmp_path / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WRONG if name not in FAST_WRONG])
def test_more_faults_are_caught_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught(name, tmp_path / "run", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RIGHT if name not in FAST_RIGHT])
def test_more_right_models_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes(name, tmp_path / "run", monkeypatch)


def test_what_does_not_fit_in_the_memory_of_one_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = verified(tmp_path / "run", net("Huge", "strategy=ddp devices=2 microbatch=2"), monkeypatch)
    assert report["same"] and report["whole"] == 4, "the largest part of the batch that fits"
    assert "8 samples at once do not fit in the memory of one process" in capsys.readouterr().out
