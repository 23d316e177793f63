"""What one person can read: the marks of the house, measured."""

import ast
import re
from pathlib import Path

import pytest

import dtrain

ROOT = Path(dtrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST = {"train": 105}
"""The loop is one function on purpose: it is read top to bottom, and nothing is decided in it."""


def test_the_loop_file_stays_under_150_lines() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 150


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_over_400_lines_or_120_columns_and_no_function_over_60(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 400
    assert max(map(len, source.splitlines())) <= 120
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {
        function.name: lines
        for function in functions
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > LONGEST.get(function.name, 60)
    }
    assert not long


UNPICKLES = re.compile(r"\b(pickle|marshal|shelve|dill|torch\.load)\b|_object(_list)?\(")


def test_nothing_that_comes_over_a_network_or_from_a_file_is_unpickled() -> None:
    """`all_gather_object` and its like run what is sent. Loading processes of a dataset are this process's own children."""
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        for line in path.read_text().splitlines()
        if UNPICKLES.search(line)
    }
    assert found <= {"data/dataset.py", "checkpoint/sharded.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_says_what_it_decides(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module begins with a docstring"


OWN = re.compile(r'"DTRAIN_[A-Z_]+"')


def test_environment_variables_of_ours_stand_in_one_table() -> None:
    places = {path for path in FILES if OWN.search(path.read_text())}
    assert places == {ROOT / "config" / "environment.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_docstring_begins_with_what(path: Path) -> None:
    """A docstring says what a thing is or does, subject first."""
    texts = [
        node.value.value.lstrip()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert not [text[:60] for text in texts if text.startswith("What ")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_conditional_expression_holds_no_other(path: Path) -> None:
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.IfExp)
        and any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))
    ]
    assert not lines
