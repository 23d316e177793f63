"""The table of faults still fits the code; which tests notice them is what `python -m tests.planting` finds out."""

import ast
from pathlib import Path

import planting
import pytest
from planting import Fault

import dtrain

ROOT, TESTS = Path(dtrain.__file__).parent, Path(__file__).parent
CORE = {
    "train.py", "build.py", "loop", "mesh", "parallel", "strategy", "precision", "remat", "compile", "backend", "model", "adapter", "data",
    "objective", "optim", "schedule", "checkpoint", "storage", "lifecycle", "launcher", "files", "logger", "hook", "metric", "evaluation", "config",
    "compose", "resolve", "predict", "tracing", "recipe", "secrets", "sweep", "report", "doctor", "integrations", "verb", "cluster", "weights",
}  # fmt: skip


def test_every_fault_can_be_planted() -> None:
    wrong = []
    for fault in planting.faults():
        try:
            ast.parse(fault.planted((ROOT / fault.module).read_text()))
        except (ValueError, SyntaxError) as error:
            wrong.append(f"{fault.module}: {error}")
        wrong += [f"{fault.module}: {name}" for name in fault.by if not (TESTS / name).is_file()]
    assert not wrong, "type the text as it stands now into tests/planting.yaml"


def test_every_room_of_the_core_has_one() -> None:
    assert {fault.module.split("/")[0] for fault in planting.faults()} == CORE


def test_a_text_that_stands_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="2 times"):
        Fault("a.py", "x", "y", "").planted("x + x")


def test_the_tests_of_its_own_name_come_first() -> None:
    muon, train = Fault("optim/muon.py", "", "", "", by=("test_train.py",)), Fault("train.py", "", "", "")
    assert planting.tests_of(muon, "own") == ["tests/optim/test_muon.py", "tests/test_train.py"]
    assert "tests/optim/test_sgd.py" in planting.tests_of(muon, "near")
    assert planting.tests_of(train, "own") == ["tests/test_train.py"] and not planting.tests_of(train, "near")
