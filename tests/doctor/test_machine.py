"""The figures of the host are those with which the runs that were measured are predicted."""

from collections.abc import Mapping
from typing import Any

import pytest
from cores import figures

from dtrain.cluster import Cluster, detect, measured
from dtrain.compose import compose
from dtrain.doctor import Case, machine
from dtrain.planned import Plan
from dtrain.resolve import resolve

TAKEN = {"operator": 6e-3, "step": 6e-4, "copies": 9e-3, "shards": 2e-2, "tp": 3e-2, "pp": 8e-2, "byte": 0.3}
"""Seconds of a step of each run."""


def launched(plan: Plan, loop: str) -> Mapping[str, Any]:
    """The answers of ranks, without ranks."""
    if loop == machine.CORES:
        tables = {name: value for name, value in figures().items() if name not in measured.HOSTS}
        calls = {name: tables.pop(name) for name in measured.CALLS}
        return {"figures": tables, "calls": calls if plan.world > 1 else {}, "busy": 0.0}
    kind = "pp" if plan.mesh.pp > 1 else "tp" if plan.mesh.tp > 1 else ""
    kind = kind or {"ddp": "copies", "fsdp": "shards"}.get(str(plan.strategy["_target_"]).split(".")[-2], "")
    kind = "byte" if plan.model["width"] == 512 else kind
    return {"seconds": TAKEN[kind or ("step" if "mlp" in str(plan.model["_target_"]) else "operator")]}


@pytest.fixture
def on_two_cores(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(machine, "_launched", launched)
    monkeypatch.setattr(machine.zygote, "begin", lambda: None)
    here = Cluster(gpus=0, cpus=2)
    monkeypatch.setattr(machine, "detect", lambda: here)
    return here


def test_each_measured_run_is_predicted_as_it_was(on_two_cores: Cluster) -> None:
    found = machine._figures(on_two_cores, (), machine._rates(on_two_cores, ()))
    assert measured.problem(found) == ""
    here = Cluster(gpus=0, cpus=2, figures=found)
    for name, words in machine.RUNS.items():
        assert machine._predicted(resolve(compose(words), here)).seconds == pytest.approx(TAKEN[name], rel=0.01), name


def test_one_core_has_no_figures_of_pairs(on_two_cores: Cluster) -> None:
    alone = Cluster(gpus=0, cpus=1)
    found = machine._figures(alone, (), machine._rates(alone, ()))
    assert {"step", "operator"} == {*found} & {*measured.HOSTS}


def test_what_was_measured_is_kept_and_used(on_two_cores: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(compose(["data=synthetic"]), on_two_cores)
    (finding,) = machine.machine(Case(plan, {}, dict))
    assert (finding.check, finding.verdict) == ("machine", "ok")
    assert finding.text.startswith("a core reaches 150 GFLOP/s, 2 together 285 GFLOP/s; a step costs the host ")
    assert measured.read(2)[0] == finding.facts
    measured.place().unlink()


def test_beside_other_work_nothing_is_kept(on_two_cores: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_launched", lambda plan, loop: {**launched(plan, loop), "busy": 0.5})
    plan = resolve(compose(["data=synthetic"]), on_two_cores)
    (finding,) = machine.machine(Case(plan, {}, dict))
    assert finding.text == "its speed was not measured: other work had 50% of a core"
    assert (finding.verdict, finding.advice) == ("note", "run it again when nothing else does")
    assert not measured.place().exists()


@pytest.mark.parametrize("words", ["cluster=laptop", "cluster=h100x8"])
def test_another_machine_is_not_measured(on_two_cores: Cluster, words: str) -> None:
    plan = resolve(compose(["data=synthetic", words]), detect())
    assert [*machine.machine(Case(plan, {}, dict))] == []
