"""objective.chunk=auto becomes a number: twelve plans from 124M to 405B parameters, by hand beside the plan's."""

from math import ceil

import pytest
from small import plan

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.budget import budget_of
from dtrain.predict.memory import memory
from dtrain.resolve.chunk import _with

LLAMA = "model.kv_heads=8 data.vocab=128256"
WIDE = f"{LLAMA} strategy=fsdp remat=full"
OF_8B = f"{WIDE} model.width=4096 model.layers=32 model.heads=32 model.hidden=14336"
GPT2 = "data.vocab=50304 data.sequence=1024"
# words; tokens of a microbatch on a rank, rows and chunks by hand, bytes of the logits of a chunk in MB
PLANS = {
    "124M": (f"{GPT2} devices=1 model.width=768 model.layers=12 model.heads=12 batch=32 microbatch=32", 32768, 16384, 2, 1648),
    "124M, twice the tokens": (f"{GPT2} devices=1 model.width=768 model.layers=12 model.heads=12 batch=64 microbatch=64", 65536, 16384, 4, 1648),
    "350M": (f"{GPT2} strategy=ddp model.width=1024 model.layers=24 model.heads=16 batch=128", 16384, 16384, 1, 1648),
    "350M, rows of 1,009": ("data.vocab=50304 data.sequence=1009 strategy=ddp model.width=1024 model.layers=24 model.heads=16 batch=136", 17153, 8704, 2, 876),
    "774M, fp32": (f"{GPT2} devices=1 precision=fp32 model.width=1280 model.layers=36 model.heads=20 batch=8 microbatch=8", 8192, 8192, 1, 1648),
    "1.5B": (f"{LLAMA} devices=1 data.sequence=4096 model.width=2048 model.layers=16 model.heads=32 model.hidden=8192 batch=2", 8192, 8192, 1, 2101),
    "3B": (f"{LLAMA} strategy=fsdp data.sequence=4096 model.width=3072 model.layers=28 model.heads=24 model.hidden=8192 batch=32", 16384, 8192, 2, 2101),
    "8B": (f"{OF_8B} data.sequence=8192 batch=16", 16384, 8192, 2, 2101),
    "8B, 29 GB": (f"{OF_8B} data.sequence=8192 batch=16 cluster.memory=29000000000", 16384, 4096, 4, 1051),
    "8B, long rows": (f"{OF_8B} data.sequence=32768 mesh.cp=2 batch=4", 16384, 8192, 2, 2101),
    "70B": (f"{WIDE} nodes=16 mesh.tp=8 data.sequence=8192 model.width=8192 model.layers=80 model.heads=64 model.hidden=28672 batch=32", 16384, 8192, 2, 263),
    "405B": (
        f"{WIDE} nodes=64 mesh.tp=8 mesh.pp=16 data.sequence=8192 model.width=16384 model.layers=126 model.heads=128 model.hidden=53248 batch=128 microbatch=1 pipeline.split=cost",
        8192, 8192, 1, 263,
    ),
}  # fmt: skip


def planned(words: str) -> Plan:
    given = dict(word.split("=", 1) for word in words.split())
    usual = {
        "cluster": "h100x8",
        "devices": "8",
        "model": "gpt",
        "data": "synthetic",
        "objective": "next_token",
        "precision": "bf16",
    }
    return plan(*(f"{key}={value}" for key, value in {**usual, **given}.items()))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_has_the_rows_that_a_hand_gets(name: str) -> None:
    words, tokens, rows, chunks, megabytes = PLANS[name]
    made = planned(words)
    shapes = formulas.shapes(made)
    assert shapes
    size = made.batch.microbatch * shapes.tokens // made.mesh.cp
    logits = rows * made.data["vocab"] // made.mesh.tp
    logits *= 4 if "fp32" in words else 2
    assert (size, made.objective["chunk"], ceil(size / rows), round(logits / 1e6)) == (tokens, rows, chunks, megabytes)
    budget = budget_of(made, build(made.cluster))
    assert logits <= (budget - memory(_with(made, 1), shapes).peak) / 2
    assert memory(made, shapes).peak <= budget


def test_what_is_typed_stays_and_a_small_vocabulary_is_computed_whole() -> None:
    assert planned("data.vocab=50304 objective.chunk=100").objective["chunk"] == 100
    assert planned("data.vocab=8191").objective["chunk"] == 0


def test_a_model_without_a_formula_decides_at_run_time() -> None:
    made = plan("model=hf", "model.name=tests/hub/llama", "model.task=causal_lm", "data=synthetic", "data.vocab=50304")
    assert made.objective["chunk"] == "auto"


def test_the_layout_that_a_search_finds_is_planned_with_the_same_rows() -> None:
    words = (
        "strategy=auto data.vocab=128256 data.sequence=8192 model.width=4096 model.layers=32 model.heads=32 batch=16"
    )
    made = planned(words)
    again = planned(words.replace("strategy=auto", f"strategy=fsdp microbatch={made.batch.microbatch}"))
    assert made.objective["chunk"] == again.objective["chunk"] > 512


def test_a_gpu_that_is_not_listed_counts_with_its_memory() -> None:
    small = plan("data=synthetic", "data.vocab=128256", "data.sequence=8192", "batch=2", "precision=bf16", "model.width=4096", "model.heads=32",
                 on=Cluster(gpus=1, cpus=8, memory=24 << 30, gpu="Another"))  # fmt: skip
    assert 512 <= small.objective["chunk"] < 8192
