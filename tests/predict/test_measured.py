"""Times from the figures of the cores of this host, against what can be said without a machine."""

import itertools

import pytest
from cores import figures
from small import composed

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.planned import Plan
from dtrain.predict.bounds import Bounds, Point
from dtrain.predict.formulas import shapes as shapes_of
from dtrain.predict.measured import crowding
from dtrain.predict.prediction import Prediction, predict
from dtrain.predict.report import rows
from dtrain.predict.state_bytes import holding_of
from dtrain.resolve import resolve

HERE = Cluster(gpus=0, cpus=2, figures=figures())
GPT = "model=gpt data=synthetic batch=8"
KINDS = (
    "model=mlp data=synthetic objective=classification batch=64",
    "model=cnn data=synthetic objective=classification batch=16",
    GPT, "model=moe data=synthetic batch=8", f"{GPT} precision=bf16", f"{GPT} remat=full",
    *(f"{GPT} devices=2 {layout}" for layout in ("strategy=ddp", "strategy=fsdp", "mesh.tp=2", "mesh.pp=2", "mesh.cp=2")),
)  # fmt: skip


def planned(words: str, here: Cluster = HERE) -> Plan:
    return resolve(composed(*words.split()), here)


def predicted(words: str, here: Cluster = HERE) -> Prediction:
    plan = planned(words, here)
    shapes = shapes_of(plan)
    assert shapes
    return predict(plan, shapes)


def seconds(words: str, here: Cluster = HERE) -> float:
    time = predicted(words, here).time
    assert time
    return time.seconds


@pytest.mark.parametrize("words", KINDS)
def test_cores_that_take_twice_as_long_do(words: str) -> None:
    slow = Cluster(gpus=0, cpus=2, figures=figures(2.0))
    assert seconds(words, slow) == pytest.approx(2 * seconds(words), rel=1e-6)


@pytest.mark.parametrize("here", [HERE, Cluster(gpus=0, cpus=2)])
def test_eight_ranks_on_two_cores_are_no_gain(here: Cluster) -> None:
    words = "model=gpt model.width=256 data=synthetic batch=16 strategy=ddp"
    one, two, eight = (seconds(f"{words} devices={ranks}", here) for ranks in (1, 2, 8))
    assert eight > two and eight > 0.95 * one
    assert seconds(f"{words} devices=4 nodes=2", here) == pytest.approx(eight, rel=0.05), "nodes of one host share it"


def test_threads_beyond_the_cores_add_nothing() -> None:
    assert crowding(planned(f"{GPT} devices=2 strategy=ddp threads=2")) == 2
    some, many = (seconds(f"{GPT} threads={threads}") for threads in (2, 4))
    assert many >= some


def test_figures_change_no_digest_and_no_document() -> None:
    with_, without = (planned(GPT, here) for here in (HERE, Cluster(gpus=0, cpus=2, unmeasured="no")))
    assert (with_.digest, with_.document()) == (without.digest, without.document())
    assert Plan.from_dict(with_.to_dict()).digest == with_.digest


def test_another_machine_is_predicted_by_its_own_figures() -> None:
    words = f"{GPT} cluster=laptop"
    assert seconds(words) == seconds(words, Cluster(gpus=0, cpus=2))


def test_the_plan_says_where_nothing_was_measured() -> None:
    for here, expected in (
        (HERE, False),
        (Cluster(gpus=0, cpus=2, unmeasured="type dtrain doctor to measure it"), True),
    ):
        text = [line for _, line in rows(planned(GPT, here), predicted(GPT, here))]
        said = "by figures of a usual machine, not of this one: type dtrain doctor to measure it" in text
        assert said is expected
    plan = planned("cluster=h100x8 data=synthetic", Cluster(gpus=0, cpus=2, unmeasured="type dtrain doctor"))
    assert not any("usual machine" in line for _, line in rows(plan, predicted("cluster=h100x8 data=synthetic")))


def test_collectives_without_figures_have_those_of_a_usual_machine() -> None:
    """One core measures none."""
    calls = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    alone = Cluster(gpus=0, cpus=1, figures={key: value for key, value in figures().items() if key not in calls})
    assert seconds(f"{GPT} devices=2 strategy=ddp", alone) > 0


@pytest.mark.parametrize("model", ["model=gpt model.width=256", "model=moe"])
def test_no_layout_takes_less_time_than_its_bound(model: str) -> None:
    """A search leaves out by bounds what it does not predict."""
    layouts = itertools.product(("ddp", "zero2", "fsdp"), (1, 2), (1, 2), (1, 4))
    for strategy, tp, pp, micro in layouts:
        words = f"{model} data=synthetic batch=32 devices=4 strategy={strategy} mesh.tp={tp} mesh.pp={pp} microbatch={micro}"
        plan = planned(words)
        shapes = shapes_of(plan)
        assert shapes
        options, data = (plan.remat["_target_"], *plan.tensor.values()), (repr(plan.strategy),)
        batch = plan.batch
        point = Point(
            plan.mesh, batch.microbatch, batch.accumulate, plan.pipeline, holding_of(plan), options, data, lambda plan=plan: plan
        )  # fmt: skip
        assert Bounds(build(plan.cluster), shapes).seconds(point) <= 1.001 * seconds(words), words
