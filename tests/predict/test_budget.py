"""The memory that a prediction may reach: what a cluster word says a device keeps for others is not torch's."""

import pytest
from small import plan

from dtrain.build import build
from dtrain.cluster import Machine
from dtrain.planned import Plan
from dtrain.predict.budget import budget_of, kept
from dtrain.predict.prediction import Prediction, predict
from dtrain.predict.report import rows, size
from dtrain.tracing import shapes_of

GPT = ("data=synthetic", "data.sequence=32", "model.layers=4", "batch=64", "cluster=h100x8", "nodes=1")


def predicted(*words: str) -> tuple[Plan, Machine, Prediction]:
    asked = plan(*GPT, *words)
    machine: Machine = build(asked.cluster)
    return asked, machine, predict(asked, shapes_of(asked))


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (("devices=1", "strategy=single"), 0),
        (("devices=8", "strategy=fsdp"), 1),
        (("devices=8", "strategy=fsdp", "mesh.tp=2"), 2),
        (("devices=8", "strategy=fsdp", "mesh.tp=2", "mesh.pp=2", "accumulate=4"), 3),
    ],
)
def test_each_group_of_a_mesh_keeps_buffers(words: tuple[str, ...], groups: int) -> None:
    _, machine, prediction = predicted(*words)
    at_least = groups * machine.communicator
    assert at_least <= prediction.kept["communicators"] <= at_least + 2 * machine.communicator * bool(groups)
    left = machine.memory - machine.context - prediction.kept["communicators"]
    assert prediction.budget == pytest.approx(left / machine.reserve)


def test_experts_that_exchange_rows_keep_more() -> None:
    words = ("devices=8", "strategy=fsdp", "model=moe", "model.experts=8")
    _, machine, alone = predicted(*words)
    _, _, spread = predicted(*words, "mesh.ep=4")
    assert spread.kept["communicators"] - alone.kept["communicators"] >= machine.exchange


def test_segments_that_do_not_expand_reserve_more() -> None:
    fixed, machine, prediction = predicted("devices=8", "strategy=fsdp", "backend=nccl", "backend.segments=fixed")
    assert prediction.budget == pytest.approx(budget_of(*predicted("devices=8", "strategy=fsdp")[:2], prediction.calls)
                                              * machine.reserve / machine.reserve_fixed)  # fmt: skip
    assert budget_of(fixed, machine) > prediction.budget, "of ranks that do not communicate"


def test_ranks_of_a_host_share_its_memory() -> None:
    one, two = (plan("data=synthetic", "cluster=laptop", f"devices={ranks}") for ranks in (1, 2))
    machine: Machine = build(one.cluster)
    assert budget_of(two, machine) == (machine.memory / 2 - machine.context) / machine.reserve
    assert budget_of(one, None) == float("inf") and not kept(one, None)


def test_the_plan_says_what_others_keep() -> None:
    asked, machine, prediction = predicted("devices=8", "strategy=fsdp")
    row = dict(rows(asked, prediction))["memory"]
    assert f"(of {size(prediction.budget)})" in row
    assert f"; plus {size(machine.context)} for the driver and its libraries, " in row
    assert f"{size(prediction.kept['communicators'])} for groups that communicate" in row
    assert prediction.to_dict()["kept"] == prediction.kept
