"""A new project runs and passes its own test as it is written; a name that would not work is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "moons"]) == 0
    return tmp_path / "moons"


def test_a_commit_of_it_leaves_out_its_runs(project: Path) -> None:
    (project / "outputs/first").mkdir(parents=True)
    (project / "outputs/first/plan.yaml").write_text("steps: 7\n")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)
    there = subprocess.run(["git", "ls-files"], cwd=project, check=True, capture_output=True, text=True).stdout
    assert "moons/net.py" in there and "outputs" not in there


@pytest.mark.campaign("documents")
def test_it_passes_its_own_test(project: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "two_ranks"],
        cwd=project, env=env, check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.campaign("documents")
def test_its_readme_keeps_its_word(project: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    commands = [
        line.partition("#")[0].split()
        for line in (project / "README.md").read_text().split("```")[1].splitlines()
        if line.startswith("python")
    ]
    assert len(commands) == 5
    for index, command in enumerate(commands):
        out = [f"out={project}/out-{index}"] if "recipe=moons/train.yaml" in command and "verify" not in command else []
        ran = subprocess.run(
            [sys.executable, *command[1:], *out],
            cwd=project,
            env=env,
            check=False,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.campaign("documents")
def test_its_losses_on_two_ranks_stay_those_of_one(project: Path) -> None:
    def losses(*words: str) -> list[float]:
        out = project / "-".join(words)
        said = ["recipe=moons/train.yaml", "model.width=64", "logger=[]", f"out={out}"]
        command = [sys.executable, "-m", "dtrain", *said]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *words], cwd=project, env=env, check=True, capture_output=True, timeout=300)
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    one = losses("devices=1")
    assert len(one) == 300
    for strategy in ("ddp", "fsdp"):
        assert losses("devices=2", f"strategy={strategy}") == pytest.approx(one, rel=1e-4)


def test_nothing_of_the_template_is_left(project: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file()]
    assert {"moons/net.py", "moons/conf/model/net.yaml", "tests/test_moons.py", "moons/train.yaml"} <= {
        str(path.relative_to(project)) for path in files
    }
    assert not [path for path in files if "mypkg" in path.name or "mypkg" in path.read_text()]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "new takes one name. Type dtrain new mypkg."),
        (["a", "b"], "new takes one name."),
        (["my-pkg"], "a package name consists of letters, digits and _"),
        (["class"], "a package name consists of letters"),
        (["../moons"], "a package name consists of letters"),
        (["json"], "import json would find another package"),
        (["there"], "there is a there in this folder already"),
    ],
)
def test_a_name_that_would_not_work_is_refused(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
