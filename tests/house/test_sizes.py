"""What one person can read: the marks of the house, measured."""

import ast
from pathlib import Path

import pytest

import dtrain

ROOT = Path(dtrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST = {"train": 95}
"""The loop is one function on purpose: it is read top to bottom, and nothing is decided in it."""


def test_the_loop_file_stays_under_150_lines() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 150


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_over_400_lines_and_no_function_over_60(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {
        function.name: lines for function in functions if (lines := (function.end_lineno or 0) - function.lineno + 1) > LONGEST.get(function.name, 60)
    }
    assert not long


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_decides(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module begins with a docstring"
