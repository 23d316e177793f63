"""Imports only go down. A unit is a folder or a single file of dtrain/; folders may stand on a folder of their own floor, files may not."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dtrain

ROOT = Path(dtrain.__file__).parent

FLOORS = (
    ("secrets", "screen", "shapes", "web", "gpu_faults"),
    ("errors", "plan", "result", "disk", "cause", "clients", "hub", "recorder", "kernel_log"),
    ("config", "started", "network", "waiting", "store", "build", "sharding", "signals", "frames"),
    ("words", "cluster"),
    ("options", "predict", "testing", "trust", "attempts", "loading", "tokenfile"),
    ("recipe", "resolve", "dialect", "preflight", "lease", "blame"),
    ("failure", "provenance", "runs"),
    ("compose", "rendezvous"),
    ("slowdown", "backend", "mesh", "journal", "clip", "ema", "compile"),
    ("model", "data", "objective", "optim", "schedule", "precision", "logger", "remat"),
    ("seeds", "stop", "watchdog", "log", "agreement"),
    ("strategy", "state", "sampling"),
    ("parallel", "checkpoint"),
    ("step", "built"),
    ("tracing",),
    ("guard",),
    ("hook", "heldout", "looking", "verify", "record"),
    ("observe",),
    ("train", "evaluate", "generate"),
    ("launcher",),
    ("doctor",),
    ("sweep", "verb"),
    ("__main__",),
)
WITHOUT_TORCH = (
    "__main__", "secrets", "shapes", "provenance", "errors", "plan", "result", "words", "config", "cluster", "started", "network", "waiting", "disk", "cause", "clients", "web", "store", "hub", "build", "options", "recipe", "predict", "resolve", "dialect", "preflight",
    "tracing", "failure", "blame", "gpu_faults", "kernel_log", "frames", "lease", "attempts", "runs", "signals", "tokenfile", "compose", "launcher", "doctor", "verb", "trust",
)  # fmt: skip
"""What the parent imports before any rank exists."""


def floor(unit: str) -> int:
    return next(number for number, units in enumerate(FLOORS) if unit in units)


def units() -> set[str]:
    return {path.stem for path in ROOT.iterdir() if path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").exists())}


def imports(unit: str) -> set[str]:
    """Units that a unit imports, anywhere in it: an import inside a function stands on the other unit just as much."""
    folder = ROOT / unit
    found = set()
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute, so that a floor can be read off them"
                names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "dtrain" else [str(node.module)]
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
        assert floor(other) < floor(unit) or beside, f"{unit} (floor {floor(unit)}) imports {other} (floor {floor(other)})"


def test_folders_of_one_floor_do_not_stand_on_each_other() -> None:
    TopologicalSorter({unit: imports(unit) for unit in units()}).prepare()  # raises CycleError


def test_the_parent_stays_free_of_torch() -> None:
    modules = ["dtrain.verb.train", "dtrain.verb.plan", "dtrain.launcher.inline", "dtrain.launcher.local", "dtrain.launcher.external"]
    modules += [f"dtrain.{unit}" for unit in WITHOUT_TORCH]
    code = f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0
