"""What one person can read: the marks of the house, measured."""

import ast
import re
from functools import cache
from pathlib import Path

import dtrain

ROOT = Path(dtrain.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
LONGEST = {"train": 108}
"""The loop is one function on purpose: it is read top to bottom, and nothing is decided in it."""


@cache
def nodes(name: str) -> list[ast.AST]:
    """The syntax tree of a file of dtrain/, the module first."""
    return [*ast.walk(ast.parse(SOURCES[name]))]


def test_the_loop_file_stays_under_150_lines() -> None:
    assert len(SOURCES["train.py"].splitlines()) < 150


def test_no_file_is_over_400_lines_or_120_columns() -> None:
    lines = {name: source.splitlines() for name, source in SOURCES.items()}
    assert not [name for name in lines if len(lines[name]) > 400]
    assert not [(name, line) for name in lines for line in lines[name] if len(line) > 120]


def test_no_function_is_over_60_lines() -> None:
    lengths = {
        f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1 - LONGEST.get(node.name, 60)
        for name in SOURCES
        for node in nodes(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {place: over for place, over in lengths.items() if over > 0}


UNPICKLES = re.compile(r"\b(pickle|marshal|shelve|dill|torch\.load)\b|_object(_list)?\(")


def test_nothing_that_comes_over_a_network_or_from_a_file_is_unpickled() -> None:
    """`all_gather_object` and its like run what is sent. Loading processes of a dataset are this process's own children.
    The pickles of others are read with a class that calls nothing of theirs: tests/weights/test_pickles.py.
    """
    unpickling = {name for name, source in SOURCES.items() if UNPICKLES.search(source)}
    reading = {"weights/__init__.py", "weights/pickles.py", "weights/torchfile.py", "weights/dcp.py"}
    assert unpickling <= {"data/workers.py", "checkpoint/sharded.py"} | reading
    calls = re.compile(r"\b(pickle\.loads?|torch\.load|marshal|dill)\(")
    assert not [name for name in reading if calls.search(SOURCES[name].replace("torch.load(..., weights_only", ""))]


def test_every_file_begins_with_a_docstring() -> None:
    modules = {name: node for name in SOURCES if isinstance(node := nodes(name)[0], ast.Module)}
    assert modules.keys() == SOURCES.keys()
    assert not [name for name, module in modules.items() if not ast.get_docstring(module)]


OWN = re.compile(r'"DTRAIN_[A-Z_]+"')


def test_environment_variables_of_ours_stand_in_one_table() -> None:
    assert [name for name, source in SOURCES.items() if OWN.search(source)] == ["config/environment.py"]


def test_no_docstring_begins_with_what() -> None:
    """A docstring says what a thing is or does, subject first."""
    texts = [
        (name, node.value.value.lstrip())
        for name in SOURCES
        for node in nodes(name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert not [(name, text[:60]) for name, text in texts if text.startswith("What ")]


def test_a_conditional_expression_holds_no_other() -> None:
    nested = [
        f"{name}:{node.lineno}"
        for name in SOURCES
        for node in nodes(name)
        if isinstance(node, ast.IfExp)
        and any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))
    ]
    assert not nested
