"""What a plan predicts of memory and work, beside what small real runs hold and compute: the cases, and the comparison.

compare(planned("strategy=zero3 devices=2"))        # a row for each class of ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from metering import count
from pool import resident
from predict.counted import MODELS as COUNTED
from predict.foreign import LAYOUTS
from small import CPUS
from small import plan as plan_of

from dtrain.cluster import Cluster
from dtrain.planned import Plan
from dtrain.predict.memory import Memory, classes
from dtrain.predict.state_bytes import saved
from dtrain.predict.work import work
from dtrain.tracing import shapes_of

MODELS = {name: words for name, words in COUNTED.items() if name in LAYOUTS}
GPT = {
    "data": "synthetic", "objective": "next_token", "data.vocab": 128, "data.sequence": 64, "model.layers": 4, "model.width": 64, "model.hidden": 160,
    "batch": 8,
}  # fmt: skip
OTHER = {"data": "synthetic", "batch": 24}
PIPELINE = "strategy=pipeline devices=2 accumulate=4"

QUICK = (
    "", "strategy=ddp devices=2 accumulate=2 precision=bf16", "strategy=zero3 devices=2 accumulate=2", "strategy=zero1 devices=2 optim=muon",
    "strategy=fsdp devices=2 precision=bf16 ema=0.99 remat=full", "strategy=fsdp devices=3 batch=6 model.hidden=200 optim=adafactor",
    "strategy=ddp devices=2 mesh.tp=2 tensor.sequence=split tensor.loss=split", "strategy=ddp devices=2 mesh.cp=2 optim=sgd data.sequence=512 batch=2",
    "strategy=zero3 devices=2 model=moe mesh.ep=2", f"{PIPELINE} remat=selective", f"{PIPELINE} pipeline.schedule=zbv", "model=cnn strategy=fsdp devices=2", "model=mlp strategy=ddp devices=2",
)  # fmt: skip
"""Some that meet every axis, strategy and optimizer once."""
STRATEGIES = (
    "strategy=ddp devices=2", "strategy=ddp devices=2 accumulate=2", "strategy=zero1 devices=2", "strategy=zero1 devices=2 accumulate=2",
    "strategy=zero2 devices=2", "strategy=zero2 devices=2 accumulate=2", "strategy=zero3 devices=2", "strategy=fsdp devices=2",
    "strategy=fsdp devices=2 accumulate=2", "strategy=fsdp devices=2 strategy.reshard=never", "strategy=fsdp devices=2 strategy.reduce=every accumulate=2",
    "strategy=fsdp devices=2 strategy.offload=cpu", "strategy=hsdp devices=4",
)  # fmt: skip
AXES = (
    "strategy=ddp devices=2 mesh.tp=2", "strategy=ddp devices=2 mesh.tp=2 tensor.sequence=split", "strategy=ddp devices=2 mesh.tp=2 tensor.loss=split",
    "strategy=ddp devices=2 mesh.tp=2 data.vocab=131 model.kv_heads=2", "strategy=ddp devices=2 mesh.cp=2 context.attention=ulysses",
    "strategy=ddp devices=2 model=moe", "strategy=ddp devices=2 model=moe mesh.ep=2", "strategy=ddp devices=2 model=moe model.shared=1 mesh.tp=2",
    "model=mlp strategy=ddp devices=2 mesh.tp=2",
)  # fmt: skip
SCHEDULES = (
    *(f"{PIPELINE} pipeline.schedule={name}" for name in ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")),
    PIPELINE, f"{PIPELINE} pipeline.split=cost", f"{PIPELINE} pipeline.split=[1,3]",
)  # fmt: skip
HALVES = tuple(
    f"{words} pipeline.schedule={name}"
    for name in ("interleaved_zero_bubble", "zbv", "dualpipev")
    for words in (
        f"{PIPELINE} model=mlp model.layers=6 batch=512", f"{PIPELINE} model=cnn model.blocks=3 batch=64", f"{PIPELINE} model=moe", f"{PIPELINE} precision=bf16",
        "strategy=fsdp devices=4 mesh.pp=2 accumulate=4 precision=bf16 model.width=128 data.sequence=128", "strategy=ddp devices=4 mesh.pp=2 mesh.tp=2 accumulate=4",
        "strategy=ddp devices=4 mesh.pp=2 mesh.cp=2 accumulate=4", "strategy=pipeline devices=2 accumulate=8 batch=16 model.layers=8",
    )
)  # fmt: skip
"""Schedules whose backward is cut in two. A batch of few samples leaves less than one gradient of a weight, which torch holds while it adds it."""
PAIRS = (
    "strategy=fsdp devices=4 mesh.tp=2", "strategy=fsdp devices=4 mesh.cp=2", "strategy=fsdp devices=4 mesh.pp=2 accumulate=4 model.width=128 data.sequence=128",
    "strategy=ddp devices=4 mesh.pp=2 mesh.tp=2 accumulate=4 tensor.sequence=split", "strategy=ddp devices=4 mesh.pp=2 mesh.tp=2 accumulate=4 tensor.sequence=split tensor.loss=split pipeline.schedule=gpipe",
    "strategy=zero2 devices=4 mesh.tp=2 accumulate=2", "strategy=ddp devices=4 mesh.tp=2 mesh.pp=2 accumulate=4", "strategy=ddp devices=4 mesh.cp=2 mesh.tp=2",
    "strategy=ddp devices=4 mesh.pp=2 mesh.cp=2 accumulate=4", "strategy=fsdp devices=4 model=moe mesh.ep=2", "strategy=fsdp devices=4 model=moe mesh.ep=2 mesh.tp=2",
    "strategy=ddp devices=4 model=moe mesh.ep=2 mesh.pp=2 accumulate=4 batch=32 model.width=128 data.sequence=128", "strategy=hsdp devices=4 mesh.dp_shard=2 mesh.dp_replicate=2 accumulate=2",
)  # fmt: skip
STATE = tuple(
    f"{strategy} {rest}".strip()
    for strategy in ("", "strategy=fsdp devices=2")
    for rest in (
        "precision=bf16", "precision=fp16", "precision=bf16_true", "optim=sgd", "optim=sgd optim.momentum=0", "optim=muon", "optim=adafactor", "remat=selective",
        "remat=full", "remat=budget", "ema=0.99", "model.tied=true", "model=moe", "model=cnn", "model=mlp", "model=cnn precision=bf16", "model=moe precision=bf16",
        "optim=adafactor model=moe", "optim=muon precision=bf16_true", "remat=selective precision=bf16", "remat=full precision=bf16_true",
    )
)  # fmt: skip
DRAWN = (
    "devices=2 strategy=zero3 model=moe mesh.ep=2 precision=bf16 optim=adafactor model.width=64 model.heads=4 model.layers=3 model.experts=4 model.shared=1 data.vocab=8192 data.sequence=128 batch=16 accumulate=4 objective.chunk=16 model.hidden=null",
    "devices=2 strategy=ddp mesh.tp=2 tensor.sequence=split remat=full precision=fp16 optim=adamw ema=0.99 model.width=32 model.heads=4 model.layers=2 data.vocab=8192 data.sequence=64 batch=4 accumulate=4 model.hidden=null",
    "devices=2 strategy=fsdp remat=budget optim=adamw model.width=48 model.heads=2 model.kv_heads=2 model.layers=3 model.tied=true data.vocab=128 data.sequence=512 batch=8 model.hidden=null",
    "devices=2 strategy=fsdp strategy.reduce=every precision=fp16 optim=muon model.width=32 model.heads=2 model.layers=6 model.hidden=64 model.tied=true data.vocab=4096 data.sequence=128 batch=16 objective.chunk=0",
    "devices=2 strategy=zero2 model=moe mesh.ep=2 remat=full optim=adafactor model.width=48 model.heads=4 model.kv_heads=2 model.layers=5 model.experts=8 data.vocab=2048 data.sequence=64 batch=2 model.hidden=null",
    "devices=2 strategy=zero3 optim=muon model.width=32 model.heads=4 model.layers=3 model.tied=true data.vocab=4096 data.sequence=32 batch=2 objective.chunk=256 model.hidden=null",
    "devices=2 strategy=ddp mesh.tp=2 tensor.sequence=split tensor.loss=split precision=bf16 optim=adamw model.width=96 model.heads=4 model.layers=4 model.hidden=256 model.tied=true data.vocab=2048 data.sequence=32 batch=2",
    "devices=2 strategy=zero3 model=moe mesh.tp=2 tensor.loss=split remat=full precision=fp16 optim=sgd ema=0.99 model.width=192 model.heads=4 model.layers=4 model.hidden=576 model.experts=8 data.vocab=1000 data.sequence=32 batch=16 accumulate=2",
    "devices=2 strategy=fsdp strategy.reshard=never strategy.reduce=last remat=full optim=adamw model.width=64 model.heads=2 model.layers=2 model.hidden=192 data.vocab=4096 data.sequence=32 batch=4 objective.chunk=16",
    "remat=full precision=fp16 optim=adamw model.width=128 model.heads=2 model.layers=4 model.hidden=160 model.tied=true data.vocab=4096 data.sequence=512 batch=4 accumulate=2 objective.chunk=512",
    "devices=2 strategy=zero1 model=moe mesh.cp=2 context.attention=ring precision=bf16_true optim=adamw model.width=192 model.heads=2 model.kv_heads=2 model.layers=5 model.experts=4 data.vocab=4096 data.sequence=32 batch=1 model.hidden=null",
    "devices=2 strategy=fsdp strategy.reduce=last model=moe mesh.ep=2 optim=adamw model.width=32 model.heads=2 model.layers=4 model.experts=8 data.vocab=8192 data.sequence=32 batch=4 model.hidden=null",
    "devices=2 mesh.pp=2 strategy=ddp pipeline.schedule=gpipe accumulate=8 precision=bf16_true optim=muon model.width=32 model.heads=4 model.layers=5 model.kv_heads=2 model.hidden=64 data.sequence=32 batch=32",
    "devices=2 mesh.pp=2 strategy=ddp pipeline.schedule=looped_bfs accumulate=3 remat=full precision=bf16_true optim=muon model.layers=5 model.hidden=64 data.vocab=8192 data.sequence=32 batch=6",
    "devices=2 mesh.pp=2 strategy=pipeline pipeline.schedule=zbv accumulate=2 precision=bf16 optim=muon model.width=128 model.heads=4 model.layers=5 model.kv_heads=2 model.hidden=320 data.vocab=8192 batch=2",
    "devices=2 mesh.pp=2 strategy=pipeline accumulate=4 model=moe model.width=128 model.heads=4 model.layers=3 model.hidden=256 model.experts=8 model.shared=1 data.vocab=8192 batch=16",
    "devices=4 mesh.pp=2 strategy=fsdp pipeline.schedule=gpipe accumulate=8 remat=budget precision=fp16 model.width=128 model.heads=4 model.layers=2 model.kv_heads=2 model.hidden=320 data.vocab=8192 data.sequence=32 batch=64",
    "devices=4 mesh.pp=2 mesh.cp=2 strategy=fsdp accumulate=4 model=moe optim=muon model.layers=3 model.hidden=64 model.experts=8 data.vocab=4096 data.sequence=32 batch=16",
    "devices=4 mesh.pp=2 mesh.tp=2 strategy=fsdp pipeline.schedule=gpipe accumulate=2 model=moe tensor.loss=split remat=full optim=adafactor ema=0.99 model.width=128 model.layers=2 model.kv_heads=2 model.hidden=256 model.experts=4 model.shared=1 data.sequence=512 batch=4",
)  # fmt: skip
"""Drawn at random (tests/bench/RESULTS.md): each was off by more than 5% for a cause of its own."""
_DATA = (
    "strategy=ddp devices=2", "strategy=zero1 devices=2 accumulate=2", "strategy=fsdp devices=2", "strategy=hsdp devices=4 precision=bf16",
    "strategy=ddp devices=2 remat=full precision=bf16_true",
)  # fmt: skip
_SPLIT = (
    "strategy=ddp devices=2 mesh.tp=2", "strategy=fsdp devices=2 mesh.cp=2", "strategy=pipeline devices=2", "strategy=pipeline devices=2 pipeline.schedule=zbv",
    "strategy=fsdp devices=4 mesh.pp=2 precision=bf16",
)  # fmt: skip
UNFIT = {"pictures": ("hsdp", "bf16_true"), "scaled": ("bf16_true",)}
"""torch's batch norm takes no weights in bf16 beside its statistics in fp32, and a trace no PReLU of two types."""
FOREIGN = (
    *(f"model={model} {words}" for model in MODELS for words in _DATA if not any(each in words for each in UNFIT.get(model, ()))),
    *(f"model={model} {words}" for model in ("llama", "transformer") for words in _SPLIT),
    "model=frozen strategy=fsdp devices=4 mesh.tp=2", "model=lengthless strategy=pipeline devices=2",
)  # fmt: skip
"""Models that are not dtrain's: tests/predict/foreign.py, tests/invariance/zoo.py."""
ALL = tuple(dict.fromkeys((*QUICK, *STRATEGIES, *AXES, *SCHEDULES, *HALVES, *PAIRS, *STATE, *DRAWN)))


@dataclass(frozen=True)
class Row:
    """One class of ranks: the exact figures as (predicted, real), activations and peak as predicted / real."""

    exact: dict[str, tuple[int, int]]
    activations: float
    peak: float


@dataclass(frozen=True)
class Compared:
    """`saved` of a checkpoint and `flops` of a step, of all ranks together, as (predicted, real)."""

    rows: list[Row]
    saved: tuple[int, int]
    flops: tuple[int, int]

    @property
    def exact(self) -> bool:
        return all(one == other for row in self.rows for one, other in (*row.exact.values(), self.saved))

    @property
    def activations(self) -> float:
        """The worst."""
        return max((row.activations for row in self.rows), key=lambda ratio: abs(ratio - 1))

    @property
    def peak(self) -> float:
        return max((row.peak for row in self.rows), key=lambda ratio: abs(ratio - 1))


def planned(words: str, on: Cluster = CPUS) -> Plan:
    said = dict(word.split("=", 1) for word in words.split())
    if said.get("model") in MODELS:
        return plan_of(
            *MODELS[said.pop("model")].split(), "batch=8", *(f"{key}={value}" for key, value in said.items()), on=on
        )
    base = OTHER if said.get("model") in ("mlp", "cnn") else GPT
    return plan_of(*(f"{key}={value}" for key, value in ({**base, **said}).items()), on=on)


def compare(plan: Plan) -> Compared:
    shapes = shapes_of(plan)
    found = resident(plan.world, count, plan, seconds=300)
    size = plan.world // plan.mesh.pp
    inputs = round(shapes.inputs * plan.batch.local / plan.mesh.cp) if plan.mesh.pp > 1 else 0
    rows = [
        _row(plan, memory, found[stage * size : (stage + 1) * size], inputs)
        for stage, memory in enumerate(classes(plan, shapes))
    ]
    both = (work(plan, shapes).total, sum(rank["flops"] for rank in found))
    return Compared(rows, (saved(plan, shapes), sum(rank["saved"] for rank in found)), both)


def _row(plan: Plan, memory: Memory, found: Sequence[dict[str, Any]], inputs: int) -> Row:
    """`inputs`: bytes of those of all microbatches, which a pipeline concatenates.

    Of ranks that exchange rows the mean: which experts get how many of them, the data and an untrained router say."""
    most = {name: max(rank[name] for rank in found) for name in ("rest", "end", "state", "kept", "total")}
    if plan.mesh.ep > 1:
        most |= {name: mean(rank[name] for rank in found) for name in ("kept", "total")}
    exact = {
        "parameters": (memory.parameters, most["rest"]),
        "gradients": (memory.gradients, most["end"]),
        "optimizer": (memory.optimizer, most["state"]),
    }
    return Row(exact, (memory.activations + inputs) / most["kept"], memory.peak / most["total"])
