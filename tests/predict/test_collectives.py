"""Predicted collectives against those that real ranks are seen to make: kind, group, calls and bytes are equal, or the test fails."""

import warnings

import pytest
import torch
import torch.distributed as dist
from counting import Counting, Seen, count
from invariance.layouts import FAST, SLOW, combinations
from pool import ranks
from predict.counted import COMMON, MODELS, hold, predicted, seen
from predict.foreign import LAYOUTS
from small import mesh_of, plan

from dtrain.predict.collectives import collectives
from dtrain.tracing import shapes_of

QUICK = (
    ("gpt", "strategy=ddp devices=2 accumulate=2"),
    ("gpt", "strategy=zero1 devices=2 accumulate=2 on_spike=skip"),
    ("gpt", "strategy=zero2 devices=2 accumulate=2 precision=bf16"),
    ("gpt", "strategy=fsdp devices=2 optim=muon strategy.reduce=every accumulate=2"),
    ("tied", "strategy=ddp devices=2 mesh.tp=2 tensor.sequence=split tensor.loss=split remat=full"),
    ("gpt", "strategy=fsdp devices=2 optim=adafactor"),
    ("gpt", "strategy=fsdp devices=4 mesh.tp=2 optim=adafactor"),
    ("gpt", "strategy=fsdp devices=4 mesh.tp=2 precision=bf16"),
    ("gpt", "strategy=fsdp devices=4 mesh.pp=2 pipeline.schedule=zbv"),
    ("gpt", "strategy=ddp devices=2 mesh.cp=2 remat=full"),
    ("gpt", "strategy=fsdp devices=2 mesh.cp=2 context.attention=ulysses precision=bf16"),
    ("moe", "strategy=ddp devices=2 mesh.ep=2"),
    ("mlp", "strategy=ddp devices=2 mesh.tp=2"),
    ("llama", "strategy=fsdp devices=2 mesh.cp=2 remat=full"),
    ("gpt2", "strategy=ddp devices=2 mesh.cp=2 context.attention=ulysses precision=bf16"),
    ("pictures", "strategy=ddp devices=2 accumulate=2"),
    ("sequential", "strategy=zero1 devices=2 accumulate=2"),
    ("lengthless", "strategy=ddp devices=2 mesh.tp=2"),
    ("shared", "strategy=fsdp devices=2 accumulate=2"),
    ("shared", "strategy=zero3 devices=2"),
    ("lent", "strategy=zero3 devices=2 accumulate=2"),
    ("scaled", "strategy=fsdp devices=2 accumulate=2"),
    ("frozen", "strategy=fsdp devices=2 accumulate=2"),
    ("frozen", "strategy=ddp devices=2 mesh.tp=2 remat=full"),
)
MORE = (
    ("gpt", "strategy=hsdp devices=4 optim=adafactor"),
    ("gpt", "strategy=ddp devices=2 mesh.tp=2 optim=adafactor"),
    ("moe", "strategy=fsdp devices=4 mesh.ep=2 mesh.tp=2 optim=adafactor"),
    ("moe", "strategy=fsdp devices=4 mesh.ep=2 optim=adafactor"),
    ("gpt", "strategy=fsdp devices=4 mesh.pp=2 optim=adafactor"),
    ("pictures", "strategy=fsdp devices=2 optim=adafactor"),
    ("gpt", "strategy=ddp devices=4 mesh.pp=2 mesh.tp=2 tensor.sequence=split"),
    ("gpt", "strategy=ddp devices=2 strategy.bucket_mb=1 model.width=256 model.hidden=512"),
    ("gpt", "strategy=fsdp devices=2 strategy.reshard=never accumulate=2 strategy.reduce=every"),
    ("gpt", "strategy=fsdp devices=4 mesh.tp=2 optim=muon"),
    ("gpt", "strategy=fsdp devices=2 remat=budget mesh.cp=2"),
    ("moe", "strategy=ddp devices=2 mesh.ep=2 remat=full model.shared=1"),
    ("moe", "strategy=ddp devices=2 mesh.tp=2 remat=full model.shared=1"),
    ("moe", "strategy=ddp devices=2 mesh.tp=2 remat=full"),
    ("gpt", "strategy=fsdp devices=2 precision=fp16 clip=null"),
    ("gpt", "strategy=ddp devices=2 on_spike=rewind"),
    *((model, words) for table in (FAST, SLOW, LAYOUTS) for model in table for words in table[model]),
    *((each.model, each.words) for each in combinations() if each.precision != "fp32"),
)
"""All strategies on all axes in all precisions, and pairs and triples of axes."""


@pytest.mark.often(
    "gpt-strategy=zero?*",
    "gpt-strategy=fsdp devices=2 optim=muon*",
    "tied-*",
    "*pipeline.schedule=zbv",
    "gpt-*ulysses*",
    "moe-*",
    "llama-*",
    "pictures-*",
    "lengthless-*",
    "shared-strategy=zero3*",
    "frozen-*mesh.tp=2*",
)
@pytest.mark.parametrize(("model", "words"), QUICK)
def test_a_step_is_what_was_predicted(model: str, words: str) -> None:
    here, there = hold(model, words)
    assert here == there
    assert any(here)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), MORE)
def test_every_layout_is_what_was_predicted(model: str, words: str) -> None:
    here, there = hold(model, words)
    assert here == there


def test_what_is_seen_is_all_and_of_the_right_size() -> None:
    """A control: collectives of known sizes, by each way into torch, and one that no other rank is in."""

    def rank() -> dict[Seen, list[int]]:
        with mesh_of(dp_shard=2) as mesh, Counting() as counting:
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for two of these
            mine = dist.new_group([mesh.rank], use_local_synchronization=True)
            dist.all_reduce(torch.zeros(10))
            dist.all_reduce(torch.zeros(1000), group=mine)
            dist.all_gather_into_tensor(torch.zeros(6), torch.zeros(3))
            dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(6))
            dist.all_to_all_single(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))
            torch.distributed._functional_collectives.all_gather_tensor(
                torch.zeros(5), 0, (mesh.axis("dp_shard"), 0)
            ).sum()
            return dict(counting.seen)

    for counted in ranks(2, rank):
        assert {key.kind: value for key, value in counted.items() if key.kind != "barrier"} == {
            "all_reduce": [1, 40], "all_gather": [2, 24 + 40], "reduce_scatter": [1, 24], "all_to_all": [1, 8],
        }  # fmt: skip
        assert {key.ranks for key in counted} == {(0, 1)}


def test_a_flush_of_the_log_is_told_apart() -> None:
    asked = plan(*MODELS["cnn"].split(), *COMMON.split(), "devices=2", "strategy=ddp")
    assert (
        predicted(asked, 0, ("flush",)) == seen(asked, 0, count(asked), ("flush",)) == {("all_reduce", (0, 1)): (1, 24)}
    )


def test_it_costs_the_same_for_any_number_of_ranks() -> None:
    """Of one rank: twice the nodes of ddp change what a group is, not how much its rank gives."""
    few, many = (
        plan("model=gpt", "data=synthetic", "strategy=ddp", f"nodes={nodes}", "devices=8", f"batch={nodes * 8}")
        for nodes in (2, 256)
    )
    assert collectives(few, shapes_of(few)) == collectives(many, shapes_of(many))


def test_one_rank_talks_to_nobody() -> None:
    alone = plan("model=gpt", "data=synthetic")
    assert collectives(alone, shapes_of(alone)) == ()
