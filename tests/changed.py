"""`python -m pytest --changed`: only the test files that import, directly or through others, a file that git says is changed.

A file that a string names (`_target_`, the command) counts as imported, and so does each part of conf/ where parts are built.
Where something else than Python of dtrain/ and tests/ is changed, all tests run.
"""

import ast
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BY_NAME = {
    "dtrain.__main__": "dtrain/verb/*.py",
    "dtrain.integrations.importers": "dtrain/integrations/importers/*.py",
    "dtrain.loop.assemble": "conf/**/*.yaml",
    "dtrain.evaluation.session": "conf/**/*.yaml",
    "dtrain.tracing.tracer": "conf/**/*.yaml",
    "dtrain.launcher": "conf/launcher/*.yaml",
    "dtrain.launcher.local": "dtrain/launcher/local/*.py",
    "dtrain.launcher.warm": "dtrain/train.py",
}
"""Modules that import others by names which they read: those of these files, or named in these files."""
OF_ALL = {"dtrain", "conftest", "workers", "changed", "lacking", "tiers"}
"""Modules behind every test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed", nargs="?", const="HEAD", metavar="COMMIT", help="only tests of files changed since COMMIT (HEAD)"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file of tests that no change reaches."""
    commit = config.getoption("--changed")
    if commit is None or not collection_path.name.startswith("test_"):
        return None
    return None if is_reached(collection_path, since(commit)) else True


@cache
def since(commit: str) -> frozenset[str]:
    """Paths, relative to the repository, that differ from a commit, and those that git does not know yet."""
    commands = (["diff", "--name-only", commit, "--"], ["ls-files", "--others", "--exclude-standard"])
    lines = [
        subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for words in commands
    ]
    return frozenset("".join(lines).splitlines())


def is_reached(test: Path, paths: Iterable[str]) -> bool:
    """Whether a change of `paths` can change what a test file does."""
    changed = {module_of(ROOT / path) for path in paths}
    return None in changed or bool(changed & (reach(module_of(test) or "") | OF_ALL))


def module_of(path: Path) -> str | None:
    """The name under which a file of dtrain/ or tests/ is imported; None for another file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if path.suffix != ".py" or parts[0] not in ("dtrain", "tests"):
        return None
    return ".".join(parts if parts[0] == "dtrain" else parts[1:]).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    paths = [*(ROOT / "dtrain").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return {name: path for path in paths if (name := module_of(path))}


def reach(module: str) -> set[str]:
    """A module, and all that it imports, directly or through others."""
    reached, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(imports(name))
    return reached


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of dtrain/ and tests/ that a module names, with the packages they are in."""
    if module not in modules():
        return frozenset()
    tree, names = ast.parse(modules()[module].read_text()), set[str]()
    sentences = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in sentences:
            names.update(named(module, node.value))
    for path in ROOT.glob(BY_NAME.get(module, "")) if module in BY_NAME else ():
        names.update([module_of(path) or ""] if path.suffix == ".py" else dotted(path.read_text()))
    found = {each for name in names for each in packages(name.removeprefix("tests."))}
    return frozenset(found - {"dtrain"} if module.startswith("dtrain") else found)


def named(module: str, text: str) -> set[str]:
    """What a string of a test names, and the command; in the package strings name nothing but the homes of the public names."""
    if module == "dtrain":
        return {text}
    command = {"dtrain.__main__"} if text == "dtrain" or "-m dtrain" in text else set()
    return set() if module.startswith("dtrain.") else dotted(text) | command


def dotted(text: str) -> set[str]:
    return set(re.findall(r"\b[a-z_]\w*(?:\.\w+)+", text))


def packages(name: str) -> list[str]:
    """The modules that importing `name` runs: of `a.b.function` those are `a` and `a.b`. dtrain itself, behind every test, counts where it is meant alone."""
    parts = name.split(".")
    matches = [path for end in range(len(parts)) if (path := ".".join(parts[: end + 1])) in modules()]
    return matches[1:] if matches[:1] == ["dtrain"] and len(matches) > 1 else matches
