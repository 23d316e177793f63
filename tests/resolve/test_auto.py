"""strategy=auto: a layout that runs and fits, and the reason in numbers."""

import itertools

import pytest
from small import plan

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.config import files
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict.budget import budget_of
from dtrain.predict.collectives import collectives
from dtrain.predict.prediction import predict
from dtrain.resolve.chunk import STAND_IN
from dtrain.tracing import shapes_of

GIB = 1 << 30


def word(decided: Plan) -> str:
    return str(decided.strategy["_target_"]).split(".")[2]


def refusal(*words: str) -> str | None:
    try:
        plan("data=synthetic", *words)
    except WordsError as error:
        return str(error)
    return None


WISHES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "tp": ("mesh.tp=2",),
    "cp": ("mesh.cp=2",),
    "ep": ("model=moe", "mesh.ep=2"),
    "experts without ep": ("model=moe", "remat=selective"),
    "heads": ("model.heads=6", "model.width=132"),
    "sequence": ("data.sequence=30",),
    "microbatch": ("microbatch=1",),
    "accumulate": ("accumulate=2",),
    "batch of both": ("microbatch=2", "accumulate=2"),
    "mlp": ("model=mlp",),
    "cnn": ("model=cnn",),
    "tied": ("model.tied=true",),
    "dp_shard": ("mesh.dp_shard=2",),
    "dp_replicate": ("mesh.dp_replicate=2",),
}


@pytest.mark.parametrize("wish", WISHES)
def test_nothing_is_refused_that_another_strategy_takes(wish: str) -> None:
    """`auto` chooses among what all other rules allow."""
    for devices, batch, optim in itertools.product((2, 4, 6), (8, 12), ("adamw", "adafactor")):
        words = (
            f"devices={devices}",
            f"optim={optim}",
            *WISHES[wish],
            *((f"batch={batch}",) if wish != "batch of both" else ()),
        )
        if refusal("strategy=ddp", *words) is None or refusal("strategy=fsdp", *words) is None:
            assert refusal(*words) is None, words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("devices=5", "batch=16"), "batch=16 does not split"),
        (("devices=3", "mesh.pp=2"), "nodes x devices = 1 x 3 = 3"),
        (("devices=4", "mesh.pp=2", "mesh.tp=4"), "pp=2 x tp=4 is 8 ranks"),
        (("devices=2", "mesh.pp=2", "batch=1", "pipeline.schedule=1f1b"), "needs at least 2 microbatches"),
    ],
)
def test_what_no_layout_can_is_refused_with_the_sentence_of_its_rule(words: tuple[str, ...], message: str) -> None:
    assert message in str(refusal(*words))


def test_one_rank_is_single() -> None:
    decided = plan("data=synthetic")
    assert (word(decided), decided.why["strategy"]) == ("single", "single (auto: one rank)")


def test_a_model_of_unknown_size_gets_ddp_and_the_reason() -> None:
    decided = plan("model._target_=mine.Model", "trust=[mine]", "data=synthetic", "objective=regression", "devices=2")
    assert word(decided) == "ddp"
    assert "not known before it is built" in decided.why["strategy"]


def test_what_is_said_of_the_mesh_is_kept() -> None:
    decided = plan("data=synthetic", "devices=8", "batch=48", "mesh.tp=2", "mesh.cp=2")
    assert (decided.mesh.tp, decided.mesh.cp, decided.mesh.ranks) == (2, 2, 8)
    assert plan("data=synthetic", "devices=4", "batch=48", "mesh.dp_shard=4").mesh.dp_shard == 4


@pytest.mark.parametrize(
    "words",
    [
        ("pipeline.schedule=interleaved_1f1b", "mesh.pp=2"),
        ("pipeline.split=[1,1,1,1]",),
        ("context.attention=ulysses", "mesh.cp=2"),
        ("context.attention=ulysses", "data.sequence=8192"),
        ("tensor.sequence=split",),
    ],
    ids=" ".join,
)
def test_how_an_axis_is_used_is_kept_and_searched_with(words: tuple[str, ...]) -> None:
    assert "parameters need about" in plan("data=synthetic", "devices=4", "batch=16", *words).why["strategy"]


LARGE = (
    "data=synthetic",
    "devices=8",
    "batch=64",
    "model.layers=24",
    "model.width=2048",
    "model.heads=16",
    "data.sequence=1024",
)


def memory_per_rank(decided: Plan) -> float:
    """GiB of each rank, as the reason tells it."""
    number, unit = decided.why["strategy"].split("need about ")[1].split()[:2]
    return float(number) * {"GiB": 1, "MiB": 1 / 1024}[unit]


@pytest.mark.parametrize("memory", [640, 80, 40, 24])
def test_the_layout_fits_where_one_does(memory: int) -> None:
    decided = plan(*LARGE, on=Cluster(gpus=8, cpus=8, memory=memory * GIB))
    machine = build({**files.node("cluster", STAND_IN), "memory": memory * GIB})
    budget = budget_of(decided, machine, collectives(decided, shapes_of(decided)))
    assert memory_per_rank(decided) <= budget / GIB < 0.97 * memory
    assert f"{budget / GIB:.3g} GiB on each rank" in decided.why["strategy"]


def test_the_reason_names_the_next_layout() -> None:
    roomy = plan(*LARGE, on=Cluster(gpus=8, cpus=8, memory=640 * GIB))
    assert "next is strategy=" in roomy.why["strategy"]


def test_where_none_fits_it_says_so_and_takes_the_least() -> None:
    decided = plan(*LARGE, on=Cluster(gpus=8, cpus=8, memory=GIB))
    assert "more than there is" in decided.why["strategy"]
    assert memory_per_rank(decided) <= memory_per_rank(plan(*LARGE, on=Cluster(gpus=8, cpus=8, memory=640 * GIB)))


def test_less_memory_never_makes_a_layout_that_holds_more() -> None:
    needs = [
        memory_per_rank(plan(*LARGE, on=Cluster(gpus=8, cpus=8, memory=memory * GIB)))
        for memory in (640, 80, 40, 24, 12)
    ]
    assert needs == sorted(needs, reverse=True)


def test_what_auto_says_fits_is_predicted_to_fit() -> None:
    for memory in (4e8, 1.2e9, 1.6e9):
        words = ("data=synthetic", "devices=2", "cluster=laptop", f"cluster.memory={memory}")
        auto = plan("model=mlp", "objective=regression", *words)
        assert ("more than there is" not in auto.why["strategy"]) == predict(auto, shapes_of(auto)).fits
