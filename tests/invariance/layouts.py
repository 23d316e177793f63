"""Every layout that is held against one process, in words; and every combination that is refused. The README's matrix is made of this table."""

from collections.abc import Iterator
from dataclasses import dataclass

MODELS = {
    "gpt": "model=gpt model.layers=4 model.heads=4 model.kv_heads=2 model.width=32 model.hidden=48 data=synthetic data.sequence=16 data.vocab=29",
    "uneven": "model=gpt model.layers=2 model.heads=4 model.width=32 objective=next_token data=dataset data.dataset._target_=invariance.zoo.Uneven "
    "data.outputs=29 model.vocab=29 trust=[invariance]",
    "tied": "model=gpt model.layers=2 model.heads=4 model.width=32 model.tied=true data=synthetic data.sequence=16 data.vocab=29",
    "moe": "model=moe model.layers=2 model.heads=4 model.width=32 model.hidden=16 model.experts=4 model.active=2 data=synthetic data.sequence=16 "
    "data.vocab=29",
    "mlp": "model=mlp model.width=32 model.layers=4 data=synthetic objective=regression",
    "cnn": "model=cnn model.width=8 model.stages=2 model.blocks=2 data=synthetic",
    "llama": "model._target_=invariance.zoo.llama trust=[invariance] data=synthetic objective=next_token data.sequence=16 data.vocab=29",
    "plain": "model._target_=invariance.zoo.Plain trust=[invariance] data=synthetic objective=regression",
    "sequential": "model._target_=invariance.zoo.sequential trust=[invariance] data=synthetic objective=regression",
}
"""All with a batch of 8."""

FAST = {
    "gpt": (
        "strategy=ddp devices=2",
        "strategy=zero1 devices=2 accumulate=2",
        "strategy=zero2 devices=2 accumulate=2",
        "strategy=fsdp devices=2 strategy.offload=cpu",
        "strategy=hsdp devices=4",
        "devices=2 strategy=ddp mesh.tp=2 tensor.sequence=split tensor.loss=split remat=full",
        "devices=2 strategy=pipeline",
        "devices=2 strategy=pipeline pipeline.schedule=zbv",
        "devices=2 strategy=ddp mesh.cp=2",
        "devices=2 strategy=fsdp mesh.cp=2 context.attention=ulysses",
        "devices=4 strategy=fsdp mesh.tp=2",
        "devices=4 strategy=fsdp mesh.pp=2",
        "devices=4 strategy=fsdp mesh.cp=2",
    ),
    "uneven": ("strategy=ddp devices=2 mesh.cp=2", "strategy=pipeline devices=2"),
    "tied": ("strategy=ddp devices=2 mesh.tp=2",),
    "moe": ("strategy=ddp devices=2 mesh.ep=2", "strategy=fsdp devices=4 mesh.ep=2"),
    "mlp": ("strategy=ddp devices=2", "strategy=ddp devices=2 mesh.tp=2", "strategy=pipeline devices=2"),
    "cnn": ("strategy=fsdp devices=2", "strategy=pipeline devices=2"),
    "llama": ("strategy=ddp devices=2 mesh.tp=2", "strategy=pipeline devices=2", "strategy=fsdp devices=2 mesh.cp=2"),
    "plain": ("strategy=ddp devices=2", "strategy=fsdp devices=2"),
    "sequential": ("strategy=pipeline devices=2",),
}
"""Run on every change."""

SLOW = {
    "gpt": (
        "strategy=ddp devices=2 accumulate=2",
        "strategy=ddp nodes=2 devices=2",
        "strategy=zero3 devices=2 accumulate=2",
        "strategy=fsdp devices=2 strategy.reshard=never",
        "strategy=fsdp devices=4 strategy.reduce=every accumulate=2",
        "strategy=fsdp devices=2 remat=selective",
        "strategy=ddp devices=2 remat=budget",
        "devices=2 strategy=ddp mesh.tp=2",
        "devices=2 strategy=ddp mesh.tp=2 tensor.sequence=split",
        "devices=2 strategy=ddp mesh.tp=2 tensor.loss=split",
        "devices=2 strategy=pipeline pipeline.schedule=gpipe",
        "devices=2 strategy=pipeline pipeline.schedule=interleaved_1f1b",
        "devices=2 strategy=pipeline pipeline.schedule=looped_bfs",
        "devices=2 strategy=pipeline pipeline.schedule=interleaved_zero_bubble",
        "devices=2 strategy=pipeline pipeline.schedule=dualpipev",
        "devices=2 strategy=pipeline pipeline.split=cost",
        "devices=2 strategy=pipeline pipeline.split=[1,3] remat=full",
        "devices=4 strategy=pipeline pipeline.schedule=1f1b",
        "devices=4 strategy=pipeline pipeline.schedule=gpipe",
        "devices=4 strategy=zero1 mesh.pp=2 pipeline.schedule=zbv",
        "devices=4 strategy=zero2 mesh.pp=2 pipeline.schedule=interleaved_1f1b",
        "devices=4 strategy=zero3 mesh.tp=2 accumulate=2",
        "devices=4 strategy=ddp mesh.pp=2",
        "devices=4 strategy=ddp mesh.tp=2",
        "devices=4 strategy=ddp mesh.pp=2 mesh.tp=2",
        "devices=4 strategy=ddp mesh.pp=2 mesh.tp=2 tensor.sequence=split tensor.loss=split pipeline.schedule=interleaved_1f1b",
        "devices=4 strategy=ddp mesh.pp=2 mesh.cp=2",
        "devices=4 strategy=ddp mesh.tp=2 mesh.cp=2",
        "devices=4 strategy=ddp mesh.tp=2 mesh.cp=2 tensor.sequence=split",
        "devices=4 strategy=ddp mesh.cp=4",
        "devices=4 strategy=ddp mesh.cp=4 context.attention=ulysses",
        "devices=4 strategy=zero1 mesh.cp=4 context.attention=ulysses remat=full",
        "devices=4 strategy=fsdp mesh.tp=2 mesh.cp=2 context.attention=ulysses",
        "devices=4 strategy=fsdp mesh.pp=2 mesh.cp=2 context.attention=ulysses",
        "devices=8 strategy=hsdp mesh.cp=2 context.attention=ulysses accumulate=2",
        "devices=4 strategy=zero1 mesh.cp=2",
        "devices=4 strategy=fsdp mesh.tp=2 tensor.sequence=split tensor.loss=split",
        "devices=8 strategy=fsdp mesh.pp=2 mesh.tp=2",
        "devices=8 strategy=hsdp mesh.tp=2",
        "devices=8 strategy=hsdp mesh.pp=2",
        "devices=8 strategy=fsdp mesh.tp=2 mesh.cp=2",
        "devices=8 strategy=ddp mesh.pp=2 mesh.tp=2 mesh.cp=2",
        "devices=8 strategy=zero2 mesh.pp=2 mesh.cp=2 pipeline.schedule=zbv",
        "nodes=2 devices=4 strategy=hsdp mesh.cp=2",
    ),
    "uneven": (
        "strategy=fsdp devices=4 mesh.cp=2 accumulate=2",
        "strategy=zero2 devices=2 accumulate=2",
        "strategy=fsdp devices=4 mesh.tp=2",
    ),
    "tied": ("strategy=fsdp devices=2", "strategy=fsdp devices=4 mesh.tp=2 tensor.sequence=split tensor.loss=split"),
    "moe": (
        "strategy=ddp devices=2",
        "strategy=fsdp devices=2 mesh.ep=2",
        "strategy=fsdp devices=4 mesh.ep=4",
        "strategy=ddp devices=4 mesh.ep=2",
        "strategy=zero1 devices=4 mesh.ep=2 accumulate=2",
        "strategy=hsdp devices=4 mesh.ep=2",
        "strategy=fsdp devices=4 mesh.tp=2 mesh.ep=2",
        "strategy=fsdp devices=4 mesh.pp=2 mesh.ep=2",
        "strategy=fsdp devices=4 mesh.cp=2 mesh.ep=4 remat=full",
        "strategy=fsdp devices=4 mesh.cp=2 mesh.ep=2 context.attention=ulysses remat=full",
        "strategy=ddp devices=4 mesh.tp=2 mesh.ep=2",
        "strategy=pipeline devices=2",
        "devices=8 strategy=fsdp mesh.pp=2 mesh.tp=2 mesh.ep=2",
    ),
    "mlp": (
        "strategy=fsdp devices=2",
        "strategy=zero2 devices=2 accumulate=2",
        "strategy=hsdp devices=4",
        "strategy=fsdp devices=4 mesh.tp=2",
    ),
    "cnn": (
        "strategy=ddp devices=2",
        "strategy=zero1 devices=2",
        "strategy=hsdp devices=4",
        "strategy=fsdp devices=4 mesh.pp=2",
    ),
    "llama": (
        "strategy=ddp devices=2",
        "strategy=fsdp devices=2 remat=full",
        "strategy=fsdp devices=4 mesh.tp=2 tensor.loss=split",
        "strategy=fsdp devices=4 mesh.pp=2 pipeline.schedule=zbv",
        "strategy=ddp devices=4 mesh.tp=2 mesh.cp=2",
        "strategy=ddp devices=4 mesh.pp=2 mesh.tp=2",
        "strategy=ddp devices=2 mesh.cp=2 context.attention=ulysses",
        "strategy=fsdp devices=4 mesh.cp=2 context.attention=ulysses",
        "strategy=fsdp devices=8 mesh.pp=2 mesh.tp=2",
    ),
    "plain": (
        "strategy=zero1 devices=2",
        "strategy=zero2 devices=2 accumulate=2",
        "strategy=hsdp devices=4",
        "strategy=fsdp devices=4 remat=full",
    ),
    "sequential": (
        "strategy=fsdp devices=4 mesh.pp=2",
        "strategy=pipeline devices=2 pipeline.schedule=interleaved_1f1b",
    ),
}

BITWISE = {
    "gpt": (
        "devices=1 strategy=ddp",
        "devices=1 strategy=fsdp",
        "devices=1 remat=full",
        "devices=1 remat=selective",
        "devices=1 remat=budget",
    ),
    "cnn": ("devices=1 strategy=zero2", "devices=1 remat=full"),
    "llama": ("devices=1 strategy=fsdp remat=full",),
}
"""One rank: the same to the last bit."""

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "pipeline")
AXES = {
    "data": ("gpt", "", 2),
    "tp": ("gpt", "mesh.tp=2", 2),
    "pp": ("gpt", "mesh.pp=2", 2),
    "cp": ("gpt", "mesh.cp=2", 2),
    "ulysses": ("gpt", "mesh.cp=2 context.attention=ulysses", 2),
    "ep": ("moe", "mesh.ep=2", 1),
}
"""axis, or a way to split along it -> the model it is shown on, the words that ask for it, by how much it multiplies the ranks of the strategy."""
PRECISIONS = ("fp32", "bf16", "bf16_true", "fp16")
RANKS = {"hsdp": 4, "pipeline": 2}
"""Of the strategy alone; 2 for others."""

REFUSED = {
    ("single", axis): (f"strategy=single devices=2 {words}".strip(), "is one rank")
    for axis, (_, words, _) in AXES.items()
} | {
    ("pipeline", "ep"): (
        "model=moe strategy=pipeline devices=2 mesh.ep=2",
        "experts are shared out over the ranks of the batch",
    )
}
"""(strategy, axis) -> words that ask for it, what the refusal says."""


@dataclass(frozen=True)
class Combination:
    strategy: str
    axis: str
    precision: str
    model: str
    words: str


def combinations() -> Iterator[Combination]:
    """Every strategy on every axis in every precision that is not refused."""
    for strategy in STRATEGIES:
        for axis, (model, words, times) in AXES.items():
            if (strategy, axis) in REFUSED:
                continue
            ranks = RANKS.get(strategy, 2) * (1 if axis == "data" or (strategy, axis) == ("pipeline", "pp") else times)
            said = f"strategy={strategy} devices={ranks} {words}".strip()
            for precision in PRECISIONS:
                yield Combination(strategy, axis, precision, model, f"{said} precision={precision}")
