"""README and docs tell the truth: their commands and examples run, their words exist, the mistake is answered as shown."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.config.schema import GROUPS, Schema
from dtrain.recipe import folder

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "getting-started.md").read_text()
TOUR = re.search(r"## A tour.*?```sh\n(.*?)```", START, re.DOTALL)[1].splitlines()  # type: ignore[index]
PLANS = re.search(r"## A plan.*?```sh\n(.*?)```", README, re.DOTALL)[1].splitlines()  # type: ignore[index]
SMALL = ["steps=4", "model.layers=2", "model.width=32", "data.sequence=16", "hook=[]", "evaluate.samples=8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the whole tour: later commands build on earlier ones."""
    return tmp_path_factory.mktemp("tour")


@pytest.mark.parametrize("line", TOUR, ids=lambda line: line.split("#")[0].strip().removeprefix("python -m dtrain "))
def test_the_tour_runs(line: str, place: Path, corpus: Path) -> None:
    words = shlex.split(line, comments=True)[3:]
    text = "model=mlp" not in words
    small = [*SMALL, f"data.path={corpus}"] if text else ["steps=4"]
    if words[0] in ("evaluate", "generate"):
        small = ["generate.tokens=5"]
    elif words[0] in ("checkpoint", "diff", "runs", "recipes", "import", "completion") or "--help" in words:
        small = []
        (place / "ds_config.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    elif any(word.startswith("recipe=") for word in words):
        small = ["steps=4"]
    elif words[0] != "plan" and text:
        shared = place / "corpus"
        if not shared.exists():
            corpus.rename(shared)
        small = [*SMALL, f"data.path={shared}"]
    env = {**os.environ, "XDG_CACHE_HOME": str(place / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", *words, *small],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=place,
        env=env,
        check=False,
    )
    assert done.returncode == (1 if words[0] == "diff" else 0), done.stdout + done.stderr


@pytest.mark.parametrize("line", PLANS)
def test_the_plans_are_made(line: str) -> None:
    done = subprocess.run([sys.executable, *line.split()[1:]], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "peak " in done.stdout, done.stderr


def test_the_example_of_a_model_trains(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "finished after 200 steps" in done.stdout


def test_pages_that_are_linked_are_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


def test_the_readme_is_one_that_people_read() -> None:
    assert len(README.splitlines()) <= 160


def test_the_example_of_a_mistake_is_real() -> None:
    block = re.search(r"```text\n\$ python -m dtrain (.*?)\n(.*?)```", README, re.DOTALL)
    assert block
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", *block[1].split()], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == block[2]


def test_every_word_is_in_the_table() -> None:
    for group in GROUPS:
        row = next(line for line in README.splitlines() if line.startswith(f"| `{group}`"))
        for path in (folder("conf") / group).glob("*.yaml"):
            assert f"`{path.stem}`" in row, (group, path.stem)
    for name in Schema.__dataclass_fields__:
        assert f"`{name}" in README, name


def test_the_test_command_of_ci_is_the_readmes() -> None:
    assert "python -m pytest" in README
    assert "python -m pytest" in (ROOT / ".ci/run").read_text()
