"""Times against arithmetic that can be done by hand."""

from dataclasses import replace

import pytest
from small import composed

from dtrain.build import build
from dtrain.cluster import Cluster, Machine
from dtrain.planned import Plan
from dtrain.predict.collectives import Call
from dtrain.predict.formulas import shapes as shapes_of
from dtrain.predict.prediction import predict
from dtrain.predict.shapes import Weight
from dtrain.predict.time import LINK, Time, at_peak, call_seconds
from dtrain.predict.view import Group, groups
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of as traced

LLAMA = "model.vocab=128256 data=synthetic data.vocab=128256 data.sequence=8192 model.kv_heads=8 precision=bf16 strategy=fsdp"
B8 = f"{LLAMA} model.layers=32 model.width=4096 model.heads=32 model.hidden=14336 cluster=h100x8 remat=selective microbatch=1"
B70 = f"{LLAMA} model.layers=80 model.width=8192 model.heads=64 model.hidden=28672 remat=full mesh.tp=8 tensor.sequence=split tensor.loss=split"
B405 = f"{LLAMA} model.layers=126 model.width=16384 model.heads=128 model.hidden=53248 remat=full mesh.tp=8 mesh.pp=8 tensor.sequence=split tensor.loss=split"


def planned(words: str) -> Plan:
    return resolve(composed(*words.split()), Cluster(gpus=0, cpus=4))


def timed(plan: Plan) -> Time:
    shapes = shapes_of(plan)
    assert shapes
    prediction = predict(plan, shapes).time
    assert prediction
    return prediction


def machine(word: str = "h100x8") -> Machine:
    made: Machine = build(planned(f"cluster={word} batch=64").cluster)
    return made


def test_more_nodes_are_faster_in_all_and_slower_for_each() -> None:
    few, many = (timed(planned(f"{B8} nodes={nodes} batch={nodes * 8}")) for nodes in (1, 64))
    assert 40 < many.tokens_per_second / few.tokens_per_second < 66, "each also updates a smaller shard"


def test_a_schedule_with_a_smaller_bubble_is_faster() -> None:
    words = f"{B405} cluster=h100x8 nodes=64 batch=256 microbatch=1"
    plain, interleaved = (timed(planned(f"{words} pipeline.schedule={name}")) for name in ("1f1b", "interleaved_1f1b"))
    assert plain.bubble > 1.5 * interleaved.bubble
    assert plain.seconds > interleaved.seconds


def test_ranks_of_one_cpu_share_its_memory() -> None:
    one, two = (timed(planned(f"data=synthetic strategy=ddp devices={ranks} batch={8 * ranks}")) for ranks in (1, 2))
    assert two.activations == pytest.approx(2 * one.activations)


def test_tensor_parallelism_is_cheap_inside_a_node_alone() -> None:
    """Eight ranks of tp on two nodes of four share four ways out of each: 200 in place of 450 GB/s."""
    inside = timed(planned(f"{B70} cluster=h100x8 nodes=2 batch=16 microbatch=1"))
    plan = planned(f"{B70} cluster=h100x8 cluster.gpus=4 nodes=4 batch=16 microbatch=1")
    assert timed(plan).collectives["tp"] > 2 * inside.collectives["tp"]


def test_computing_again_and_longer_steps_cost_what_they_add() -> None:
    none, full = (timed(planned(f"{B8} nodes=1 batch=8 {more}")) for more in ("remat=none", "remat=full"))
    assert 1.2 < full.products / none.products < 1.35, "a third forward beside one forward and two backwards"
    assert full.mfu < none.mfu
    once, twice = (timed(planned(f"{B8} nodes=1 batch={batch}")) for batch in (8, 16))
    assert twice.products == pytest.approx(2 * once.products)
    assert once.optimizer == pytest.approx(twice.optimizer)


@pytest.mark.parametrize(
    ("kind", "crossing"),
    [("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_reduce", 14 / 8), ("send", 1), ("all_to_all", 7 / 8)],
)
def test_large_calls_take_what_crosses_the_link(kind: str, crossing: float) -> None:
    """The factors of nccl-tests' bus bandwidth."""
    h100 = machine()
    seconds = call_seconds(Call("dp_shard", kind, "weights", 1, 80e9), Group(8, 1), h100, 8)
    assert seconds == pytest.approx(80e9 * crossing / (450e9 * LINK), rel=0.01)


def test_a_group_uses_the_ways_out_of_all_its_ranks_on_a_node() -> None:
    h100, call = machine(), Call("dp_shard", "all_gather", "weights", 1, 100e9)
    whole, one = (call_seconds(call, group, h100, 8) for group in (Group(16, 1), Group(16, 8)))
    assert whole == pytest.approx(100e9 * 15 / 16 / (400e9 * LINK), rel=0.01)
    assert one == pytest.approx(100e9 * 15 / 16 / (50e9 * LINK), rel=0.01)


def test_of_an_exchange_only_what_leaves_the_node_takes_the_network() -> None:
    call = Call("ep", "all_to_all", "tokens", 1, 100e9)
    assert call_seconds(call, Group(16, 1), machine(), 8) == pytest.approx(100e9 * 8 / 16 / (50e9 * LINK), rel=0.01)


def test_small_calls_take_their_latency() -> None:
    h100 = machine()
    tiny = [
        call_seconds(Call("world", "all_reduce", "gradient norm", 1, 4), Group(8 * nodes, 1), h100, 8)
        for nodes in (1, 128, 2048)
    ]
    assert 5e-6 < tiny[0] < tiny[1] < tiny[2] < 1e-4, "a tree, or the log of the nodes would be their number"


def test_axes_cross_nodes_from_the_outside_in() -> None:
    plan = planned(f"{B70} cluster=h100x8 nodes=32 mesh.pp=4 batch=64 microbatch=1")
    assert {axis: (group.size, group.stride) for axis, group in groups(plan).items() if axis in ("pp", "dp_shard", "tp")} == {
        "tp": (8, 1), "dp_shard": (8, 8), "pp": (4, 64),
    }  # fmt: skip


def test_a_small_model_on_a_gpu_waits_for_its_kernels_to_be_started() -> None:
    """Four blocks and two ends, which compute for microseconds: a step of a thousandth of a second, not of a twenty-thousandth."""
    small, large = timed(planned("cluster=h100x8 devices=1")), timed(planned(f"{B8} nodes=1 batch=8"))
    assert 5e-4 < small.seconds < 5e-3 and small.starting > 0.8 * small.seconds
    assert large.starting == 0


def test_a_step_on_a_cpu_never_takes_less_than_python_does() -> None:
    """A deeper model, and each accumulated forward, dispatches more operators; a large model is ruled by its products."""
    tiny, deep, parts = (
        timed(planned(f"model=mlp model.width=8 data=synthetic objective=regression {more}"))
        for more in ("model.layers=1", "model.layers=9", "model.layers=9 accumulate=4")
    )
    assert 1e-4 < tiny.seconds < deep.seconds < parts.seconds < 1e-2 and tiny.starting > 0.9 * tiny.seconds
    large = timed(planned("data=synthetic model.width=1024 model.layers=8 model.heads=8 batch=16"))
    assert large.starting < 0.01 * large.seconds


def test_a_weight_without_numbers_takes_no_time() -> None:
    plan = planned(f"{B8} nodes=1 batch=8")
    shapes = shapes_of(plan)
    assert shapes
    block, *others = shapes.blocks
    empty = replace(block, weights=(*block.weights, Weight("empty", (0, 4), product=True)))
    more = replace(shapes, blocks=(empty, *others))
    times = [predict(plan, each).time for each in (shapes, more)]
    assert times[0] and times[1] and times[0].products == times[1].products


def test_mfu_of_measured_seconds_counts_as_that_of_the_predicted_ones() -> None:
    plan = planned(f"{B8} nodes=1 batch=8")
    prediction = timed(plan)
    assert at_peak(plan) == pytest.approx(prediction.mfu * prediction.seconds)
    assert at_peak(planned("data=synthetic")) is None, "of cores no peak is known"


def test_mfu_counts_what_a_step_needs() -> None:
    """Frozen weights have no gradient, what is below the first trained one has no backward, and what is computed again
    is no gain.
    """
    words = "model.layers=4 model.width=256 model.heads=4 data=synthetic batch=8"
    whole, again, adapter, upper = (
        planned(f"{words} {more}")
        for more in ("", "remat=full", "adapter=lora", "model.freeze=[embed,blocks.0,blocks.1]")
    )
    needed = [timed_by_trace(plan) for plan in (whole, again, adapter, upper)]
    assert needed[0] == pytest.approx(needed[1])
    assert 0.65 < needed[2] / needed[0] < 0.75, "4 of 6, and the adapter"
    assert 0.6 < needed[3] / needed[0] < 0.75, "half of the blocks only forward"


def timed_by_trace(plan: Plan) -> float:
    """Useful operations of a step."""
    time = predict(plan, traced(plan)).time
    assert time
    return time.rank_flops * time.seconds
