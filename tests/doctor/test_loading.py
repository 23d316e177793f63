"""What Python loads: versions, torch in a process of its own, plugins of Hydra."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from small import plan

import dtrain
from dtrain.doctor import Case, Finding, loading

ROOT = Path(dtrain.__file__).parents[1]
GOOD = {"version": "2.13.0", "seconds": 1.0, "cuda": "13.0", "nccl": "2.27.7", "gloo": True, "gpus": 2}


def case(*words: str, **torch: Any) -> Case:
    return Case(plan(*words), {}, lambda: {**GOOD, **torch})


def test_the_versions_that_are_needed_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, loading.PYTHON))}"
    needs = {re.match(r"[\w-]+", line)[0]: re.sub(r"^[\w-]+", "", line) for line in project["dependencies"]}  # type: ignore[index]
    for name, (least, below) in loading.NEEDS.items():
        assert needs[name] == f">={least}" * bool(least) + f",<{below}" * bool(below), name
    assert set(loading.NEEDS) <= set(needs)


@pytest.mark.parametrize(
    ("there", "advice"),
    [
        ("2.11.0", None),
        ("2.13.0+cpu", None),
        ("3.0", None),
        ("2.9.1", "pip install 'torch>=2.11'"),
        (None, "pip install 'torch>=2.11'"),
    ],
)
def test_a_version_is_supported_or_told_what_to_install(there: str | None, advice: str | None) -> None:
    finding = loading.judged("torch", there, "2.11", "")
    assert (finding and finding.advice) == advice
    assert finding is None or finding.verdict == "stop"


def test_what_is_too_new_is_told_too() -> None:
    assert loading.judged("hydra-core", "1.4.0", "1.3.8", "1.5") is None
    assert loading.judged("hydra-core", "1.5.0", "1.3.8", "1.5") is not None


def test_the_packages_here_are_told_in_one_line() -> None:
    (finding,) = loading.packages(case())
    assert finding.verdict == "ok"
    assert "hydra-core 1." in finding.text


@pytest.mark.parametrize(
    ("torch", "verdict", "message"),
    [
        ({}, "ok", "CUDA 13.0, NCCL 2.27.7"),
        ({"cuda": None, "nccl": None}, "ok", "for the CPU"),
        ({"gloo": False}, "stop", "without gloo"),
        ({"seconds": 60.0}, "note", "slow"),
        ({"error": "ImportError: libcudart.so.13"}, "stop", "libcudart"),
    ],
)
def test_torch_is_judged_by_what_it_said_of_itself(torch: dict[str, Any], verdict: str, message: str) -> None:
    (finding,) = loading.torch(case(**torch))
    assert (finding.verdict, message in finding.text) == (verdict, True), finding


def test_gpus_that_torch_does_not_see_stop_a_run_that_needs_them() -> None:
    from dataclasses import replace

    on_gpus = replace(plan("devices=4"), device="cuda")
    (finding,) = loading.torch(Case(on_gpus, {}, lambda: GOOD))
    assert finding.verdict == "stop"
    assert "it sees 2 GPU(s) where the words need 4" in finding.text
    (finding,) = loading.torch(Case(replace(on_gpus, devices=2), {}, lambda: GOOD))
    assert finding.verdict == "ok"


def test_a_process_that_crashes_is_a_sentence() -> None:
    assert loading.begin("import os; os.abort()")() == {"error": "it ended with exit code -6"}
    assert loading.begin("raise ImportError('libtorch.so')")() == {"error": "ImportError: libtorch.so"}
    answer = loading.begin("print('noise'); print('{\"a\": 1}')")
    assert answer() == answer() == {"a": 1}


@pytest.mark.parametrize(("out", "verdict"), [("s3://b/r", "ok"), ("nosuch://b/r", "stop"), ("runs/a", None)])
def test_the_client_of_out_is_there(out: str, verdict: str | None) -> None:
    assert [finding.verdict for finding in loading.client(case(f"out={out}"))] == [verdict] * bool(verdict)


def plugins(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> list[Finding]:
    (folder / "hydra_plugins").mkdir()
    for name, text in files.items():
        (folder / "hydra_plugins" / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.startswith("hydra_plugins")]:
        monkeypatch.delitem(sys.modules, name)
    return list(loading.plugins())


def test_a_broken_plugin_is_named_and_a_good_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = plugins(tmp_path, monkeypatch, good="a = 1", bad="import re\nre.no_such_thing\n")
    assert finding.verdict == "note"
    assert "hydra_plugins.bad cannot be imported" in finding.text
    assert "AttributeError" in finding.text
    assert finding.advice == "pip uninstall the package that brought hydra_plugins/bad"


def test_good_plugins_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [finding.verdict for finding in plugins(tmp_path, monkeypatch, good="a = 1")] == ["ok"]
