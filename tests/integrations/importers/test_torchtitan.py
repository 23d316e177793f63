"""Values of torchtitan's configs, and its schedule against ours step by step."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from imported import Imported, example, imported

from dtrain.schedule.cosine import Cosine
from dtrain.schedule.linear import Linear
from dtrain.schedule.wsd import WSD


def config(folder: Path, **sections: Any) -> Imported:
    path = folder / "titan.json"
    path.write_text(json.dumps({"training": {"local_batch_size": 1, "steps": 100}, **sections}))
    return imported(path)


def test_a_toml() -> None:
    read = example("torchtitan_8b.toml")
    assert read.words == {
        "strategy": "fsdp", "strategy.reshard": "never", "microbatch": 2, "batch": 256, "optim": "adamw", "optim.lr": 3e-4, "optim.betas": [0.9, 0.95], "optim.eps": 1e-8,
        "optim.weight_decay": 0.1, "schedule": "wsd", "schedule.warmup": 200, "schedule.decay": 2400, "schedule.floor": 0.1, "steps": 3000, "clip": 1.0,
        "precision": "bf16", "remat": "budget", "remat.share": 0.5, "checkpoint.every": 500, "checkpoint.keep": 3, "checkpoint.mode": "background",
        "evaluate.every": 250, "compile": "blocks", "log.every": 20, "logger": ["console", "tensorboard"],
    }  # fmt: skip
    assert {"model", "data"} <= read.open and {
        "data.sequence": 8192,
        "out": "./outputs/8b",
    }.items() <= read.command.items()
    assert "model.layers=32 model.width=4096" in read.told("refused")["model.flavor"]


def test_a_pipeline_of_tensor_parallel_stages_in_fp8(tmp_path: Path) -> None:
    read = example("torchtitan_405b.toml")
    assert read.words == {
        "mesh.dp_shard": 2, "mesh.tp": 2, "mesh.pp": 2, "strategy": "fsdp", "pipeline.schedule": "interleaved_1f1b", "microbatch": 2, "accumulate": 4,
        "precision": "fp8", "precision.recipe": "rowwise", "optim": "adamw", "optim.lr": 8e-5, "optim.betas": [0.9, 0.95], "optim.eps": 1e-8, "optim.weight_decay": 0.1,
        "schedule": "cosine", "schedule.warmup": 600, "schedule.floor": 0.0, "steps": 3000, "clip": 1.0, "remat": "full", "compile": "none", "tensor.loss": "split",
        "devices": 8,
    }  # fmt: skip
    plan = read.plan(tmp_path, gpus=8)
    assert (plan.batch.size, plan.world) == (16, 8)
    assert (
        "Did you mean parallelism.context_parallel_degree?"
        in read.told("refused")["parallelsim.context_parallel_degree"]
    )


def test_a_later_dump_counts_tokens() -> None:
    read = example("torchtitan_dump.json")
    assert read.words == {
        "mesh.dp_replicate": 2, "strategy": "ddp", "microbatch": 8, "accumulate": 1, "optim": "adamw", "optim.lr": 8e-4, "optim.betas": [0.9, 0.95], "optim.eps": 1e-8,
        "optim.weight_decay": 0.1, "schedule": "linear", "schedule.warmup": 2, "schedule.floor": 0.0, "steps": 40, "stop_after": 10, "clip": 1.0,
        "precision": "fp32", "evaluate.every": 0, "compile": "none", "log.every": 1, "logger": ["console"], "remat": "selective", "seed": 42, "devices": 2,
    }  # fmt: skip


def theirs(step: int, *, total: int, warmup: int, decay: int, floor: float, kind: str) -> float:
    """Linear warm-up, stable, decay as torchtitan's lr_scheduler describes it, with a last step that is not taken."""
    if step < warmup:
        return (step + 1) / warmup
    begin = total + 1 - decay
    if step < begin:
        return 1.0
    progress = (step + 1 - begin) / decay
    return floor + (1 - floor) * ((1 - progress) if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2)


@pytest.mark.parametrize(("ratio", "kind"), [(0.2, "linear"), (None, "linear"), (None, "cosine")])
def test_the_schedule_is_theirs_at_every_step(ratio: float | None, kind: str, tmp_path: Path) -> None:
    words = config(
        tmp_path, lr_scheduler={"warmup_steps": 10, "decay_ratio": ratio, "decay_type": kind, "min_lr_factor": 0.1}
    ).words
    steps, warmup, floor = words["steps"], words["schedule.warmup"], words["schedule.floor"]
    decay = 20 if ratio else 90
    if ratio:
        assert words["schedule"] == "wsd"
        ours: Any = WSD(steps=steps, warmup=warmup, decay=words["schedule.decay"], floor=floor)
    else:
        assert words["schedule"] == kind
        ours = {"linear": Linear, "cosine": Cosine}[kind](steps=steps, warmup=warmup, floor=floor)
    for step in range(100):
        assert ours.factor(step) == pytest.approx(
            theirs(step, total=100, warmup=10, decay=decay, floor=0.1, kind=kind), abs=1e-12
        ), step


@pytest.mark.parametrize(("ratio", "kind"), [(0.2, "sqrt"), (0.2, "cosine")])
def test_another_decay_is_refused(ratio: float, kind: str, tmp_path: Path) -> None:
    read = config(tmp_path, lr_scheduler={"warmup_steps": 10, "decay_ratio": ratio, "decay_type": kind})
    assert set(read.told("refused")) == {
        f"lr_scheduler.{name}" for name in ("warmup_steps", "decay_ratio", "decay_type")
    }


@pytest.mark.parametrize(
    ("replicas", "shards", "words"),
    [
        (1, -1, {"strategy": "fsdp"}),
        (2, 1, {"strategy": "ddp", "mesh.dp_replicate": 2}),
        (2, 4, {"strategy": "hsdp", "mesh.dp_replicate": 2, "mesh.dp_shard": 4}),
    ],
)
def test_degrees(replicas: int, shards: int, words: dict[str, Any], tmp_path: Path) -> None:
    read = config(
        tmp_path, parallelism={"data_parallel_replicate_degree": replicas, "data_parallel_shard_degree": shards}
    )
    assert {word: value for word, value in read.words.items() if word.startswith(("strategy", "mesh"))} == words
    assert read.plan(tmp_path).world == max(1, replicas * abs(shards))


def test_a_global_batch_makes_the_microbatches_of_a_pipeline(tmp_path: Path) -> None:
    read = config(
        tmp_path, parallelism={"pipeline_parallel_degree": 2}, training={"local_batch_size": 1, "global_batch_size": 64}
    )
    assert "accumulate" not in read.asked | set(read.words)
    assert read.plan(tmp_path).batch.accumulate == 64


def test_a_microbatch_for_each_stage_is_enough(tmp_path: Path) -> None:
    read = config(
        tmp_path,
        parallelism={"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
        training={"local_batch_size": 4},
    )
    assert (read.words["microbatch"], read.words["accumulate"]) == (2, 2)
