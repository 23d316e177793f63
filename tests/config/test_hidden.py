"""A file of the working folder that takes the place of a module is named."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dtrain.config import hidden

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["difflib", "random", "selectors"])
def test_a_command_names_the_file_that_hides_a_module(name: str, tmp_path: Path) -> None:
    """In an interpreter of its own, which has none of them yet."""
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "dtrain", "plan"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    sentence = f"dtrain: {tmp_path}/{name}.py hides the module {name} that Python or dtrain needs. Rename it.\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", sentence)


@pytest.mark.parametrize(
    ("name", "place", "named"),
    [("torch", "torch.py", True), ("torch", "torch/__init__.py", True), ("mine", "mine.py", False), ("torch", "site/torch.py", False)],
)  # fmt: skip
def test_only_a_file_of_the_working_folder_hides_a_module(
    name: str, place: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(name)
    module.__file__ = str(tmp_path / place)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    error = ModuleNotFoundError(f"No module named '{name}._dynamo'", name=f"{name}._dynamo")
    assert (str(tmp_path / place) in hidden.by_a_file(error)) == named
    assert not hidden.by_a_file(ModuleNotFoundError("No module named 'other'", name="other"))
