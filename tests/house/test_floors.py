"""Imports only go down. A unit is a folder or a single file of dtrain/, or a folder of dtrain/integrations/, on which the core never stands; folders may stand
on a folder of their own floor, files may not."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from lacking import is_here

import dtrain

ROOT = Path(dtrain.__file__).parent

FLOORS = (
    ("secrets",),
    ("errors",),
    ("config",),
    ("cluster", "planned", "result"),
    ("storage",),
    ("files",),
    ("build", "chat", "weights", "tokenizer"),
    ("recipe", "predict", "resolve", "report", "testing"),
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
    (
        "integrations/importers",
        "integrations/kubernetes",
        "integrations/lm_eval",
        "integrations/mpi",
        "integrations/ray",
    ),
    ("verb",),
    ("api",),
    ("integrations/spark",),
    ("__main__",),
)
NAMED_BY_VERBS = {"dtrain.verb.import", "dtrain.verb.completion", "dtrain.verb.evaluate"}
"""Of the core, what imports an integration: importers of configs, and the tasks of lm_eval."""
WITHOUT_TORCH = (
    "__main__", "api", "build", "chat", "cluster", "compose", "config", "doctor", "errors", "files", "integrations", "launcher", "lifecycle", "planned", "predict", "recipe", "report",
    "resolve", "result", "secrets", "storage", "sweep", "tokenizer", "tracing", "verb", "weights",
)  # fmt: skip
"""The rooms that the parent uses before any rank exists, and of the others none."""
IN_RANKS = {
    "doctor.bandwidth",
    "doctor.speed",
    "integrations.lm_eval.benchmark",
    "integrations.lm_eval.scoring",
    "integrations.lm_eval.spoken",
    "integrations.mpi.backend",
    "integrations.mpi.group",
    "integrations.mpi.loop",
    "integrations.ray.data",
    "integrations.spark.data",
    "integrations.spark.frames",
    "lifecycle.recorder",
    "lifecycle.stop",
    "lifecycle.watchdog",
    "tracing.blocks",
    "tracing.notes",
    "tracing.operations",
    "tracing.stand_ins",
    "tracing.tensors",
    "tracing.tracer",
}
"""Their files that are imported where torch is wanted."""
OF_OPTUNA = {"sweep.cma", "sweep.tpe"}
"""Files that import what the extra `optuna` installs."""


def floor(unit: str) -> int:
    return next(number for number, units in enumerate(FLOORS) if unit in units)


@cache
def units() -> set[str]:
    paths = [*ROOT.iterdir(), *(ROOT / "integrations").iterdir()]
    rooms = {path for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    return {unit_of(path) for path in rooms if path.stem != "__init__"} - {"integrations"}


def unit_of(path: Path) -> str:
    """The unit of a file or a folder of dtrain/."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "/".join(parts[: 2 if parts[0] == "integrations" else 1])


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
            found |= {unit_of(ROOT.parent / name.replace(".", "/")) for name in names if name.startswith("dtrain.")}
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


def file_imports() -> dict[str, set[str]]:
    """Of each file of dtrain/ the files that it imports, anywhere in it, by their dotted names."""
    paths = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    named = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {}
    for name, path in named.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        full = {f"{node.module}.{alias.name}": str(node.module) for node in nodes for alias in node.names}
        graph[name] = {each if each in named else module for each, module in full.items() if module in named} - {name}
    return graph


def test_files_do_not_stand_on_each_other() -> None:
    TopologicalSorter(file_imports()).prepare()  # raises CycleError


def test_the_core_imports_no_integration() -> None:
    graph = {name: names for name, names in file_imports().items() if not name.startswith("dtrain.integrations")}
    importing = {name for name, names in graph.items() if any(each.startswith("dtrain.integrations") for each in names)}
    assert importing == NAMED_BY_VERBS, "words name an integration by its _target_"


def without_torch() -> list[str]:
    files = [
        path
        for room in WITHOUT_TORCH
        for path in ((ROOT / room).rglob("*.py") if (ROOT / room).is_dir() else [ROOT / f"{room}.py"])
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    return sorted(names - IN_RANKS)


def test_the_parent_stays_free_of_torch() -> None:
    names = [name for name in without_torch() if name not in OF_OPTUNA or is_here("cmaes")]
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(f'dtrain.{name}'); assert 'torch' not in sys.modules, name"
    ran = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT.parent, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
