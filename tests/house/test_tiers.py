"""Which tests wait for CI: those marked `campaign`, each for one of seven reasons; and which tests a change reaches."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed import ROOT, imports, is_reached

REASONS = {"kills", "signals", "network", "fuzz", "documents", "commands", "8 ranks"}


def campaigns(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the arguments of each `mark.campaign` in a file."""
    tree = ast.parse(path.read_text())
    calls = {id(node.func): node.args for node in ast.walk(tree) if isinstance(node, ast.Call) and not node.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "campaign":
            yield node.lineno, ", ".join(str(ast.literal_eval(argument)) for argument in calls.get(id(node), []))


def test_a_campaign_has_one_of_the_reasons() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "campaign" in path.read_text()]
    wrong = [(str(path), line, reason) for path in files for line, reason in campaigns(path) if reason not in REASONS]
    assert not wrong, f'type @pytest.mark.campaign("...") with one of {sorted(REASONS)}'


@pytest.mark.parametrize(
    ("path", "tests", "reached"),
    [
        ("dtrain/optim/muon.py", "optim/test_muon.py", True),
        ("dtrain/optim/muon.py", "test_train.py", True),  # built by its name in conf/
        ("dtrain/optim/muon.py", "storage/test_disk.py", False),
        ("dtrain/verb/diff.py", "verb/test_diff.py", True),
        ("dtrain/verb/diff.py", "launcher/test_local.py", True),  # which runs the command
        ("dtrain/verb/diff.py", "optim/test_muon.py", False),
        ("dtrain/secrets/__init__.py", "optim/test_muon.py", True),
        ("tests/pool.py", "optim/test_muon.py", True),
        ("tests/optim/test_muon.py", "optim/test_sgd.py", False),
        ("tests/conftest.py", "storage/test_jsonl.py", True),
        ("conf/optim/muon.yaml", "storage/test_jsonl.py", True),
    ],
)  # fmt: skip
def test_a_change_reaches_the_tests_that_import_it(path: str, tests: str, reached: bool) -> None:
    assert is_reached(ROOT / "tests" / tests, [path]) is reached


def test_a_name_in_a_string_is_an_import() -> None:
    assert "dtrain.model.moe" in imports("compile.test_blocks")
    assert "dtrain.verb.diff" in imports("dtrain.__main__")
