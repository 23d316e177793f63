"""Wheel, editable install and plain checkout hold the same words and behave the same, from any working directory."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [
    sys.executable,
    "-m",
    "dtrain",
    "plan",
    "strategy=fsdp",
    "nodes=2",
    "devices=2",
    "recipe=shakespeare",
    "out=here",
]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked. It is built from a copy: setuptools leaves build/ where it builds, and the next wheel holds what is there."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    for name in ("dtrain", "conf", "recipes", "project"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(copy)],
        check=True,
        timeout=300,
        capture_output=True,
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def names(folder: Path, pattern: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob(pattern) if "__pycache__" not in path.parts}


@pytest.mark.campaign("commands")
def test_the_wheel_holds_every_word_recipe_and_module(unpacked: Path) -> None:
    for folder in ("conf", "recipes"):
        assert names(unpacked / "dtrain" / folder, "*.yaml") == names(ROOT / folder, "*.yaml")
    project = {f"project/{name}" for name in names(ROOT / "project", "*.py")}
    assert names(unpacked / "dtrain", "*.py") == names(ROOT / "dtrain", "*.py") | project
    for pattern in ("*.html", "*.css", "*.js"):
        assert names(unpacked / "dtrain", pattern) == names(ROOT / "dtrain", pattern) != set()
    assert names(unpacked / "dtrain/project", "*") == names(ROOT / "project", "*")
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {"dtrain"}


@pytest.mark.campaign("commands")
def test_wheel_editable_and_checkout_behave_the_same(unpacked: Path, tmp_path: Path) -> None:
    def output(cwd: Path, **variables: str) -> str:
        done = subprocess.run(
            COMMAND, capture_output=True, text=True, timeout=300, cwd=cwd, env={**os.environ, **variables}, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    installed = output(tmp_path)
    assert output(ROOT) == installed
    assert output(tmp_path, PYTHONPATH=str(unpacked)) == installed


@pytest.mark.campaign("commands")
def test_the_wheel_is_the_one_that_ran(unpacked: Path, tmp_path: Path) -> None:
    code = "import dtrain.recipe as r; print(r.folder('conf'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        check=True,
    )
    assert done.stdout.strip() == str(unpacked / "dtrain" / "conf")


def test_the_console_script_is_the_module() -> None:
    script = Path(sys.executable).with_name("dtrain")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=300, check=True)
    assert "verbs" in done.stdout


@pytest.mark.campaign("commands")
def test_the_console_script_sees_the_packages_of_the_working_folder(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "dtrain"
    script.parent.mkdir()
    script.write_text("import sys\nfrom dtrain.__main__ import main\nsys.exit(main())\n")
    (tmp_path / "mypkg.py").write_text("class Net:\n    def __init__(self, width=3): ...\n")
    words = [
        "plan",
        "model._target_=mypkg.Net",
        "model.widt=3",
        "data=synthetic",
        "objective=regression",
        "trust=[mypkg]",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for start in ([str(script)], ["-m", "dtrain"]):
        done = subprocess.run(
            [sys.executable, *start, *words],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env=env,
            check=False,
        )
        assert "mypkg.Net takes no widt. Did you mean model.width?" in done.stderr, start
    safe = subprocess.run(
        [sys.executable, "-P", str(script), *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=env,
        check=False,
    )
    assert "takes no widt" not in safe.stderr, "who starts Python with -P means that"
