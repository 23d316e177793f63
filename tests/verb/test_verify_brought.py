"""Code that users bring: verify finds the fault and its cause, and passes what is right."""

from pathlib import Path

import pytest
from brought import FAULTS, RIGHT
from verifying import verified

TRUST = "trust=[brought,wrong_models]"


@pytest.mark.campaign("commands")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_cause(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, kind = FAULTS[name]
    report = verified(tmp_path / "run", f"{words} {TRUST}", monkeypatch, fresh=True)
    assert not report["same"], f"{name} is not noticed"
    assert [*dict(report.get("kinds", ()))] == [kind], (report["first"], report.get("kinds"), report.get("error"))


@pytest.mark.campaign("commands")
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = verified(tmp_path / "run", f"{RIGHT[name]} {TRUST}", monkeypatch, fresh=True)
    assert report["same"], (report["first"], report.get("kinds"), report.get("error"), report["rows"])
