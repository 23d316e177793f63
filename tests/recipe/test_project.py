"""A project that somebody gave away: its recipe in a folder, a zip file or an installed package; its code only if trusted."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtrain.__main__ import main
from dtrain.compose import compose
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.recipe.locate import find

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `moons` of somebody else, beside the working folder."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "theirs")
    assert main(["new", "moons"]) == 0
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "theirs/moons"


def zipped(project: Path, target: Path) -> Path:
    """As code hosts make it: one folder that holds everything."""
    with zipfile.ZipFile(target, "w") as file:
        for path in project.rglob("*"):
            file.write(path, f"moons-main/{path.relative_to(project)}")
    return target


def refused(*words: str) -> str:
    with pytest.raises(WordsError) as caught:
        compose(words)
    return str(caught.value)


def test_the_recipe_of_an_installed_project_is_found_wherever_it_lies(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project))
    archive = zipped(project, project.parent / "moons.zip")
    MemoryFileSystem.store.clear()
    with MemoryFileSystem().open("memory://given/moons.zip", "wb") as file:
        file.write(archive.read_bytes())
    for name in ("pkg://moons", "pkg://moons/train.yaml", str(project), str(archive), "memory://given/moons.zip"):
        config: Config = compose([f"recipe={name}", "trust=[moons]"])
        assert (config.steps, config.model["_target_"], config.model["layers"]) == (300, "moons.net.Net", 4), name
    assert config.sources["steps"] == "memory://given/moons.zip/moons/train.yaml:9"
    assert "moons" not in sys.modules


def test_code_and_words_of_a_stranger_wait_for_trust_and_for_an_installation(project: Path) -> None:
    archive = zipped(project, project.parent / "moons.zip")
    untrusted, missing = refused(f"recipe={archive}"), refused(f"recipe={archive}", "trust=[moons]")
    first = "Read the source of moons (not installed) first, and then type trust=[moons] if it may run."
    assert f"there is no model net. It may be a word of moons. {first}" in untrusted
    named = f"moons is not trusted to run code. {archive}/moons/train.yaml:"
    assert f"data.dataset._target_=moons.spirals.Spirals: {named}" in untrusted
    assert untrusted.count(first) == 2
    assert "It may be a word of moons, which is not installed. Read its source first" in missing
    assert f"pip install {archive}" in missing


def test_of_several_recipes_one_is_asked_for(project: Path, tmp_path: Path) -> None:
    (project / "recipes").mkdir()
    (project / "recipes/small.yaml").write_text("recipe: ../moons/train.yaml\nsteps: 7\n")
    (project / "ci.yaml").write_text("jobs: {test: {}}\n")
    archive = zipped(project, tmp_path / "moons.zip")
    for place in (project, archive):
        with pytest.raises(WordsError) as caught:
            find(str(place))
        choices = [f"recipe={place}/{name}" for name in ("moons/train.yaml", "recipes/small.yaml")]
        assert f"several recipes. Type one of {choices[0]}, {choices[1]}." in str(caught.value)
        config = compose([choices[1], "data=synthetic", "model=mlp"])
        assert (config.steps, config.batch) == (7, 128)
    with pytest.raises(WordsError, match="a folder without a recipe"):
        find(str(project / "tests"))
    with pytest.raises(WordsError, match=r"holds no gone.yaml. It has moons/train.yaml, recipes/small.yaml"):
        find(f"{archive}/gone.yaml")
    (tmp_path / "broken.zip").write_bytes(b"PK no zip")
    with pytest.raises(WordsError, match="not a zip file"):
        find(str(tmp_path / "broken.zip"))
    with pytest.raises(WordsError, match="there is no package nowhere here"):
        find("pkg://nowhere")


def test_a_recipe_of_the_listed_folder_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("steps: 7\n")
    monkeypatch.chdir(tmp_path)
    assert compose(["recipe=mine"]).steps == 7
    assert "there is no such recipe. Did you mean mine?" in refused("recipe=mnie")


def test_runs_in_a_project_are_no_recipes_of_it_in_a_zip_file_either(project: Path, tmp_path: Path) -> None:
    (project / "outputs/first").mkdir(parents=True)
    (project / "outputs/first/config.yaml").write_text("steps: 7\nbatch: 8\nmodel: mlp\ndata: synthetic\n")
    (project / "outputs/first/plan.yaml").write_text("steps: 7\n")
    archive = zipped(project, tmp_path / "moons.zip")
    for place in (project, archive):
        assert compose([f"recipe={place}", "trust=[moons]", "model=mlp", "data=synthetic"]).steps == 300
        assert compose([f"recipe={place}/outputs/first/config.yaml"]).steps == 7
    assert compose([f"recipe={zipped(project / 'outputs/first', tmp_path / 'run.zip')}"]).steps == 7


@pytest.mark.campaign("documents")
@pytest.mark.parametrize("way", ["git", "zip", "folder"])
def test_a_project_is_installed_and_trains_from_git_a_zip_and_a_folder(project: Path, way: str, tmp_path: Path) -> None:
    given = {
        "git": f"git+file://{project}",
        "zip": str(zipped(project, tmp_path / "moons.zip")),
        "folder": str(project),
    }
    if way == "git":
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        for command in (["init", "-q"], ["add", "-A"], [*names, "commit", "-qm", "one"]):
            subprocess.run(["git", *command], cwd=project, check=True)
    site = tmp_path / "site"
    install = ["pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), given[way]]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=300)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    words = ["recipe=pkg://moons", "trust=[moons]", "steps=3", "logger=[]", f"out={tmp_path}/run"]
    ran = subprocess.run(
        [sys.executable, "-m", "dtrain", *words], env=env, check=False, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
