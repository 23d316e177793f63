"""Imports only go down. A unit is a folder or a single file of dtrain/; folders may stand on a folder of their own floor, files may not."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dtrain

ROOT = Path(dtrain.__file__).parent

FLOORS = (
    ("secrets",),
    ("errors",),
    ("config",),
    ("cluster", "planned", "result"),
    ("storage",),
    ("build", "chat", "weights", "tokenizer"),
    ("recipe", "predict", "resolve", "dialect", "report", "testing"),
    ("mesh", "compose", "lifecycle"),
    ("backend", "model", "logger"),
    ("adapter", "data", "optim", "precision", "remat", "compile"),
    ("objective", "schedule", "strategy", "checkpoint"),
    ("parallel", "hook", "metric"),
    ("loop",),
    ("evaluation", "tracing"),
    ("train",),
    ("launcher",),
    ("doctor", "sweep"),
    ("verb",),
    ("api",),
    ("spark",),
    ("__main__",),
)
WITHOUT_TORCH = (
    "__main__", "api", "build", "chat", "cluster", "compose", "config", "dialect", "doctor", "errors", "launcher", "lifecycle", "planned", "predict", "recipe", "report",
    "resolve", "result", "secrets", "storage", "sweep", "tokenizer", "tracing", "verb", "weights",
)  # fmt: skip
"""The rooms that the parent uses before any rank exists, and of the others none."""
IN_RANKS = {
    "doctor.bandwidth",
    "doctor.speed",
    "lifecycle.recorder",
    "lifecycle.stop",
    "lifecycle.watchdog",
    "tracing.blocks",
    "tracing.notes",
    "tracing.operations",
    "tracing.stand_ins",
    "tracing.tracer",
}
"""Their files that are imported where torch is wanted."""


def floor(unit: str) -> int:
    return next(number for number, units in enumerate(FLOORS) if unit in units)


@cache
def units() -> set[str]:
    return {
        path.stem
        for path in ROOT.iterdir()
        if path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }


@cache
def imports(unit: str) -> set[str]:
    """Units that a unit imports, anywhere in it: an import inside a function stands on the other unit just as much."""
    folder = ROOT / unit
    found = set()
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, (
                    f"{path.name}:{node.lineno}: imports are absolute, so that a floor can be read off them"
                )
                names = (
                    [f"{node.module}.{alias.name}" for alias in node.names]
                    if node.module == "dtrain"
                    else [str(node.module)]
                )
            found |= {name.split(".")[1] for name in names if name.startswith("dtrain.")}
    return found & units() - {unit}


def test_every_unit_has_one_floor() -> None:
    listed = [unit for level in FLOORS for unit in level]
    assert len(listed) == len(set(listed))
    assert units() <= set(listed), "a new file of dtrain/ gets a floor in this table"


@pytest.mark.parametrize("unit", sorted(units()))
def test_imports_go_down(unit: str) -> None:
    for other in imports(unit):
        beside = floor(other) == floor(unit) and (ROOT / unit).is_dir() and (ROOT / other).is_dir()
        assert floor(other) < floor(unit) or beside, (
            f"{unit} (floor {floor(unit)}) imports {other} (floor {floor(other)})"
        )


def test_folders_of_one_floor_do_not_stand_on_each_other() -> None:
    TopologicalSorter({unit: imports(unit) for unit in units()}).prepare()  # raises CycleError


def without_torch() -> list[str]:
    files = [
        path
        for room in WITHOUT_TORCH
        for path in ((ROOT / room).rglob("*.py") if (ROOT / room).is_dir() else [ROOT / f"{room}.py"])
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    return sorted(names - IN_RANKS)


def test_the_parent_stays_free_of_torch() -> None:
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(f'dtrain.{name}'); assert 'torch' not in sys.modules, name"
    ran = subprocess.run(
        [sys.executable, "-c", code, *without_torch()], cwd=ROOT.parent, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
