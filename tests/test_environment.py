"""The command works where containers and old systems run it: without a home, in locales that are not UTF-8, with python -O."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dtrain.compose import compose
from dtrain.config import home
from dtrain.errors import StoreError, WordsError
from dtrain.storage import caching, store

ROOT = Path(__file__).parents[1]
NOBODY = 54321
SMALL = ("model.layers=1", "model.width=16", "data.sequence=16", "steps=2", "evaluate.samples=4")
TOUR = (
    ("plan", "strategy=fsdp", "nodes=2", "devices=2", "-m", "seed=range(0,2)"),
    (*SMALL, "out=runs/a", "generate.prompt=Grüße", "hook.sample.tokens=4"),
    (*SMALL, "out=runs/b", "strategy=fsdp", "devices=2"),
    ("report", "runs/a"),
    ("generate", "out=runs/b", "generate.prompt=class ", "generate.tokens=4"),
    ("-m", "recipe=runs/b/config.yaml", "seed=range(1,3)", "sweep.out=runs/sweep"),
)  # fmt: skip
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(*words: str, cwd: Path, begin: tuple[str, ...] = (), **environ: str) -> str:
    """Its output."""
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    environment = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **environ}
    command = [*begin, sys.executable, "-m", "dtrain", *words]
    ran = subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, timeout=600)
    output = (ran.stdout + ran.stderr).decode("utf-8", errors="replace")
    assert ran.returncode == 0, output
    assert not re.search(r"Traceback|a fault of dtrain|is left out", output), output
    return output


def without_a_home() -> tuple[str, ...]:
    """The beginning of a command of a user without a name."""
    if os.getuid():
        pytest.skip("another user needs root")
    begin = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    if subprocess.run([*begin, sys.executable, "-c", "import torch"], check=False, capture_output=True).returncode:
        pytest.skip("another user cannot run this Python")
    return begin


def gbk(folder: Path) -> dict[str, str]:
    made = subprocess.run(
        ["localedef", "-i", "zh_CN", "-f", "GBK", str(folder / "zh_CN.GBK")], check=False, capture_output=True
    )
    if not (folder / "zh_CN.GBK").exists():
        pytest.skip(f"no locale can be made here: {made.stderr.decode()}")
    return {"LOCPATH": str(folder), "LC_ALL": "zh_CN.GBK", "PYTHONUTF8": "0"}


def test_a_plan_of_a_sweep_is_shown_in_ascii_with_python_o(tmp_path: Path) -> None:
    (tmp_path / "dtrain.yaml").write_text("trust: [äpkg]\n", "utf-8")
    words = ("plan", "-m", "seed=range(0,2)", "optim.betas=[0.9,0.95]")
    assert "seed=1" in run(*words, cwd=tmp_path, PYTHONOPTIMIZE="1", HOME="/", **ASCII)


def test_a_user_without_a_name_or_home_has_a_cache_and_is_told_that_a_tilde_means_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert caching.folder(None) == tmp_path / f"dtrain-{os.getuid()}/dtrain"
    assert (tmp_path / f"dtrain-{os.getuid()}").stat().st_mode & 0o077 == 0
    with pytest.raises(StoreError, match=r"~/runs: there is no home folder for ~ here\. Type a full path"):
        store.exists("~/runs")
    with pytest.raises(WordsError, match="no home folder for ~nobody-of-this-name here"):
        home.expanded("~nobody-of-this-name/x")


def test_bytes_that_are_no_text_in_this_locale_are_told() -> None:
    with pytest.raises(WordsError, match=r"generate.prompt=Gr\?\? \(command line\): .* Type LC_ALL=C.UTF-8 before"):
        compose(["generate.prompt=Gr\udcc3\udcbc"])


@pytest.mark.campaign("documents")
@pytest.mark.parametrize("place", ["no home", "ascii", "gbk", "optimized"])
def test_a_tour_runs_where_containers_and_old_systems_run_it(place: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest is of this user alone
        here = Path(folder) / "here"
        here.mkdir()
        for each in (here, here.parent):
            each.chmod(0o777)
        begin, environ = (), {"HOME": folder}
        if place == "no home":
            begin, environ = without_a_home(), {"TMPDIR": folder}
        elif place == "ascii":
            environ |= ASCII
        elif place == "gbk":
            environ |= gbk(Path(folder))
        else:
            environ |= {"PYTHONOPTIMIZE": "1"}
        for words in TOUR:
            words = [word for word in words if place != "ascii" or word.isascii()]
            run(*words, cwd=here, begin=begin, **environ)
