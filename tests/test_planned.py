"""The Plan: frozen, saved, read back, compared by digest."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.planned import MeshShape, Plan
from dtrain.resolve import resolve
from dtrain.verb.plan import show

HERE = Cluster(gpus=0, cpus=4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return resolve(compose(["strategy=fsdp", "nodes=1:2", "devices=2", "batch=16", "trust=[mine]", "out=runs/a"]), HERE)


def test_a_plan_cannot_be_changed(plan: Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(("write", "read"), [(json.dumps, json.loads), (yaml.safe_dump, yaml.safe_load)])
def test_ranks_read_the_plan_that_was_saved(plan: Plan, write: Callable[..., str], read: Callable[[str], Any]) -> None:
    back = Plan.from_dict(read(write(plan.to_dict())))
    assert back == plan
    assert back.digest == plan.digest
    assert back.on(1).mesh.dp_shard == 2


def test_the_digest_tells_plans_apart(plan: Plan) -> None:
    assert dataclasses.replace(plan, seed=plan.seed + 1).digest != plan.digest
    assert {each.loop for each in (plan.with_loop("mine.loop"), plan.with_loop("mine.loop").on(1))} == {"mine.loop"}


def test_degrees_multiply_to_ranks() -> None:
    shape = MeshShape(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert (shape.data, shape.ranks) == (15, 2310)


def test_what_is_shown_names_ranks_mesh_batch_and_why(plan: Plan) -> None:
    text = show(plan)
    assert "2 node(s) x 2 device(s) = 4 rank(s) on cpu" in text
    assert "dp_shard=4" in text
    assert "16 samples = 4 per forward x 4 data-parallel rank(s) x 1 accumulated" in text
    assert "on 1        dp_shard=2, 4 per forward x 2 data-parallel rank(s) x 2 accumulated" in text
    assert "gloo (auto: no GPU here)" in text
    assert plan.digest in text


def test_the_facts_of_words_are_not_in_a_saved_plan_and_do_not_rename_it(plan: Plan) -> None:
    other = replace(plan, optim={**plan.optim, "_about_": {"allowed": {"lr": "number > 0"}}})
    assert other.digest == plan.digest and "_about_" not in other.document()
    assert len(replace(plan, others=()).document().splitlines()) <= 120


def test_the_direction_of_figures_is_in_a_saved_plan(plan: Plan) -> None:
    stated = replace(plan, objective={**plan.objective, "_about_": {"figures": {"eval_f1": "highest"}}})
    assert yaml.safe_load(stated.document())["figures"] == {"eval_f1": "highest"}
