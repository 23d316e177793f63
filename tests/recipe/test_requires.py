"""What a recipe requires is here, or is told before anything begins."""

from pathlib import Path

import pytest
from small import config

from dtrain.__main__ import main
from dtrain.cluster import Cluster
from dtrain.recipe.requires import unmet

HERE = Cluster(gpus=0, cpus=2, memory=8 << 30)


def missing(*words: str, on: Cluster = HERE) -> list[str]:
    return unmet(config(*words), on)


def test_nothing_is_required_by_default() -> None:
    assert missing() == []


def test_versions_are_those_of_the_installed_packages() -> None:
    assert missing("requires.versions=[numpy, 'torch>=2.11', 'dtrain>=0.1', 'python>=3.11']") == []
    old, absent, broken = missing("requires.versions=['torch>=99', nothing-like-it, 'a b']")
    assert "torch is 2." in old and "pip install 'torch>=99'" in old
    assert "nothing-like-it is not installed" in absent
    assert "not a package with a version" in broken


def test_devices_are_those_of_a_node() -> None:
    gpu = Cluster(gpus=1, cpus=2, memory=80 << 30)
    assert missing("requires.gpus=1", "requires.memory=80", on=gpu) == []
    assert "this host has 0" in missing("requires.gpus=1")[0]
    assert "this host has 8 GiB" in missing("requires.memory=9")[0]
    assert "a GPU here has 80 GiB" in missing("requires.memory=81", on=gpu)[0]


def test_each_requirement_is_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["requires.gpus=4096", "requires.memory=1000000", f"out={tmp_path}/run"]) == 3
    assert [line.split("=")[0] for line in capsys.readouterr().err.splitlines()] == [
        "dtrain: requires.gpus",
        "dtrain: requires.memory",
    ]


def test_a_run_is_refused_and_a_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "big.yaml").write_text("# big\nrequires:\n  gpus: 4096\n")
    words = [f"recipe={tmp_path}/big.yaml", f"out={tmp_path}/run"]
    assert main(["train", *words]) == 3
    assert f"dtrain: requires.gpus=4096 ({tmp_path}/big.yaml:3): this host has" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["plan", *words]) == 0
    assert "stops it    requires.gpus=4096" in capsys.readouterr().out
