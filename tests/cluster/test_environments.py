"""Processes that another launcher started: the place that each recorded environment gives, or a sentence that names what contradicts."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from small import composed

from dtrain.cluster import detect
from dtrain.cluster.allocation import external, speaks
from dtrain.cluster.environments import TABLE
from dtrain.errors import DtrainError, EnvironError, WordsError
from dtrain.planned import Plan
from dtrain.resolve import resolve

RECORDED = yaml.safe_load(Path(__file__).with_name("environments.yaml").read_text())
EXTERNAL = Path(__file__).parents[2] / "docs" / "engines" / "external.md"
CASES = [case for cases in RECORDED.values() for case in cases]


def planned(case: dict[str, Any]) -> Plan:
    words = ["model=mlp", "data=synthetic", "objective=regression", "batch=48", *case.get("words", ())]
    return resolve(composed(*words), detect(case["environ"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["of"])
def test_an_environment_is_a_plan_or_a_sentence(case: dict[str, Any]) -> None:
    if "refused" in case:
        with pytest.raises(DtrainError) as refused:
            planned(case)
        sentence = str(refused.value)
        assert type(refused.value) in (EnvironError, WordsError) and refused.value.exit_code == 2
        assert not [name for name in case["refused"] if name not in sentence], sentence
        assert "\n" not in sentence and sentence.endswith((".", ")"))
        return
    plan, place = planned(case), external(case["environ"])
    expected = case.get("plan", {"local": "1 x 1"})
    shape, launcher = f"{plan.nodes} x {plan.devices}", str(plan.launcher["_target_"]).rpartition(".")[2]
    if "local" in expected:
        assert (shape, launcher) == (expected["local"], "Inline" if plan.world == 1 else "Local")
        return
    kind = "ranks" if "ranks" in expected else "nodes"
    assert place and (place.kind, launcher) == (kind, "External")
    assert f"{place.rank} of {shape}" == expected.get("ranks", expected.get("node"))
    assert (f"{place.address}:{place.port}" if place.address else None) == expected.get("at")
    assert plan.allowed == expected.get("allowed", [plan.nodes])
    assert speaks(case["environ"]) == (kind == "nodes" or place.rank == 0)


def test_every_row_of_the_table_is_among_what_was_recorded() -> None:
    places = [external(case["environ"]) for case in CASES if "plan" in case and "local" not in case["plan"]]
    assert {place.row.name for place in places if place} == {row.name for row in TABLE}


def test_the_page_has_every_row() -> None:
    page = EXTERNAL.read_text()
    assert not [name for row in TABLE for name in (row.name, row.rank.partition(".")[0]) if name not in page]


def test_the_pods_of_the_manifest_on_that_page_are_nodes_of_a_plan() -> None:
    (text,) = re.findall(r"```yaml\n(apiVersion.*?)```", EXTERNAL.read_text(), re.DOTALL)
    job = yaml.safe_load(text)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    (pod,) = {str(replica["template"]): replica["template"] for replica in replicas.values()}.values()
    (container,) = pod["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "dtrain"] and container["env"][0]["name"] == "DTRAIN_SECRET"
    pods = str(sum(replica["replicas"] for replica in replicas.values()))
    environ = {"PET_NNODES": pods, "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"]}
    plan = resolve(composed(*container["command"][3:], "batch=64"), detect(environ))
    assert (plan.nodes, plan.devices) == (4, 8)


def test_processes_of_one_start_agree_on_their_job_and_those_of_another_do_not() -> None:
    case = next(case for case in CASES if case["of"] == "srun -N2 --ntasks-per-node=2")
    places = [
        external({**case["environ"], **variables})
        for variables in (
            {},
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
            {"SLURM_JOB_ID": "8"},
            {"SLURM_RESTART_COUNT": "1"},
        )
    ]
    jobs = [place.job for place in places if place]
    assert jobs[0] == jobs[1] and len({*jobs}) == 3
