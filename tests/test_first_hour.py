"""The list of the first hour on GPUs: a step that fails, hangs or crashes costs its own row, and a page keeps what is not its own."""

import sys
import time
from pathlib import Path

import commands
import pytest
from gpu import hour
from gpu.models import hidden
from launching import mentioning

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.resolve import resolve

SCRIPT = """
import json, os, sys, time
folder, name = sys.argv[1], sys.argv[2].removeprefix("step=")
if name == "hangs":
    if os.fork() == 0:  # a child of its own, which must go too
        time.sleep(600)
    time.sleep(600)
if name == "crashes":
    os.abort()
if name == "raises":
    raise ValueError("no such kernel")
if name == "silent":
    sys.exit(0)
json.dump({"result": "passed", "figure": "1 | 2", "said": ""}, open(f"{folder}/{name}.json", "w"))
"""


def step(name: str, *, ranks: int = 1, cuda: str = "") -> hour.Step:
    return hour.Step(
        name,
        "something",
        lambda place: hour.Verdict("passed"),
        ranks=ranks,
        cuda=cuda,
        seconds=5.0 if name == "hangs" else 60.0,
    )


def test_each_step_has_its_verdict_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    place = hour.Place("cpu", 2, 1, tmp_path / "hour")
    steps = [step(name) for name in ("hangs", "crashes", "raises", "silent", "passes")] + [
        step("wide", ranks=4),
        step("fast", cuda="no kernels here"),
    ]
    (tmp_path / "hour").mkdir()
    (tmp_path / "hour" / "silent.json").write_text('{"result": "passed"}')  # of an earlier hour
    found = hour.run(
        steps, place, [sys.executable, str(tmp_path / "script.py"), str(place.folder)], tell=lambda text: None
    )
    said = {each.name: (verdict.result, verdict.figure + verdict.said) for each, verdict in found}
    assert {name: result for name, (result, _) in said.items()} == {
        "hangs": "failed", "crashes": "failed", "raises": "failed", "silent": "failed", "passes": "passed", "wide": "not run", "fast": "not run",
    }  # fmt: skip
    assert "no end within 5 s" in said["hangs"][1]
    assert "exit code -6" in said["crashes"][1]
    assert "ValueError: no such kernel (raises.log)" in said["raises"][1]
    assert said["wide"][1] == "needs 4 ranks"
    deadline = time.monotonic() + 60
    while mentioning(str(tmp_path / "script.py")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not mentioning(str(tmp_path / "script.py"))
    assert "| passes | something | passed | 1 / 2 |" in hour.table(found).splitlines()


def test_a_page_keeps_what_is_not_its_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Results\n\nkept\n")
    hour.write(page, "cuda", "first")
    hour.write(page, "cpu", "other")
    hour.write(page, "cuda", "second")
    assert page.read_text() == (
        "# Results\n\nkept\n\n<!-- cuda: begin -->\nsecond\n<!-- cuda: end -->\n\n<!-- cpu: begin -->\nother\n<!-- cpu: end -->\n"
    )


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_what_is_asked_of_some_gpus_of_a_host_is_a_plan_for_those(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    from tests.gpu import steps

    asked: list[tuple[str, ...]] = []

    def planned(place: hour.Place, *words: str, seconds: float = 300.0) -> str:
        asked.append(words)
        return '{"prediction": {"memory": {"peak": 100}}}'

    monkeypatch.setattr(steps, "dtrain", planned)
    monkeypatch.setattr(steps, "rows", lambda out: [{"peak_bytes": 103.0, "step_seconds": 1.0, "mfu": 0.5}] * 3)
    monkeypatch.setattr(steps, "by_hand", lambda place, shape: 1.0)
    place = steps.Place("cuda", devices, 1, tmp_path)
    assert steps.memory(place).result == steps.speed(place).result == "passed"
    host = Cluster(gpus=8, cpus=64)
    plans = [resolve(compose([word for word in words if word not in ("plan", "json")]), host) for words in asked]
    assert {plan.devices for plan in plans} == {devices}
    asked.clear()
    steps.speed(steps.Place("cuda", devices, 2, tmp_path, "10.0.0.1:29500"))
    assert {resolve(compose(words), host).nodes for words in asked} == {1}, "the loop by hand has the GPUs of one host"


@pytest.mark.parametrize("chunk", ["auto", "0"])
def test_the_runs_of_the_figures_are_plans_for_one_gpu(chunk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    from tests.gpu import figures

    for words in figures.RUNS.values():
        decided = resolve(
            compose([*figures.COMMON.split(), *words.split(), f"objective.chunk={chunk}"]), Cluster(gpus=1, cpus=16)
        )
        assert decided.device == "cuda" and (decided.objective["chunk"] > 0) == (chunk == "auto")


def test_communication_counts_as_hidden_while_another_kernel_runs() -> None:
    compute = [(False, 0.0, 10.0), (False, 5.0, 12.0), (False, 20.0, 30.0)]
    assert hidden([*compute, (True, 8.0, 16.0), (True, 28.0, 32.0)]) == pytest.approx((4 + 2) / 12)
    assert hidden(compute) == 1.0


def test_the_command_does_a_step_on_the_cpu(tmp_path: Path) -> None:
    """The whole list takes minutes: `python -m tests.gpu.first_hour on=cpu`."""
    root = Path(__file__).parents[1]
    program = ["-c", "import runpy; runpy.run_module('tests.gpu.first_hour', run_name='__main__')"]
    done = commands.python(*program, "on=cpu", "only=one-each,memory", f"out={tmp_path}", cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "| one-each | each rank has a GPU of its own | passed | 2 ranks, 12 steps |"
        in (tmp_path / "1" / "first-hour.md").read_text()
    )
    wrong = commands.python(*program, "on=gpu0", "loud=yes", "devices=0", "only=one-each,tpyo", "nodes=2", cwd=root)
    assert wrong.returncode == 2
    for name in ("on=gpu0", "loud=yes", "devices=0", "only=one-each,tpyo", "address"):
        assert name in wrong.stderr
