"""What a rank finds is held against the plan, and what does not fit is said with its figures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankFailed, ranks
from small import plan

from dtrain.errors import DtrainError
from dtrain.loop.build_check import judge
from dtrain.precision import Precision
from dtrain.train import train

FP32 = Precision()


def facts_of(**changed: Any) -> dict[str, Any]:
    facts = {
        "rank": 0,
        "holds": "shards",
        "parameters": 100,
        "held": 50,
        "dimless": 0,
        "split": {"dp_shard": 100},
        "toggled": [],
        "types": ["float32"],
        "stages": [],
    }
    return {**facts, "schedule": None, "wrapper": "GPT", **changed}


def test_what_fits_is_told() -> None:
    verdict = judge(plan("data=synthetic", "strategy=fsdp", "devices=2"), [facts_of(), facts_of(rank=1)], FP32)
    assert verdict["compute"] == "float32" and [rank["rank"] for rank in verdict["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("words", "facts", "message"),
    [
        (
            ("strategy=fsdp", "devices=2"),
            {"split": {"dp_shard": 60}},
            "of 100 parameters 60 are sharded over dp_shard x cp = 2",
        ),
        (("strategy=fsdp", "devices=2", "mesh.cp=2"), {"split": {}}, "0 are sharded over dp_shard x cp = 2"),
        (
            ("strategy=ddp", "devices=2", "mesh.tp=2"),
            {"holds": "copies", "split": {}},
            "no parameter is split over tp=2",
        ),
        (
            ("model=moe", "strategy=ddp", "devices=2", "mesh.ep=2"),
            {"holds": "copies", "split": {"experts": 40}},
            "of 40 parameters of experts 0 are split over ep=2",
        ),
        (
            ("strategy=pipeline", "devices=2"),
            {"holds": "copies", "split": {}, "schedule": "1f1b", "stages": [1]},
            "it holds the stages [1]",
        ),
        (
            ("strategy=pipeline", "devices=2", "pipeline.schedule=gpipe"),
            {"holds": "copies", "split": {}, "schedule": "1f1b", "stages": [0]},
            "of 1f1b, not [0] of gpipe",
        ),
        (
            ("strategy=fsdp", "devices=2"),
            {"toggled": ["layers.0.weight"]},
            "requires_grad of layers.0.weight was changed",
        ),
    ],
)
def test_what_does_not_fit_ends_the_run(words: tuple[str, ...], facts: dict[str, Any], message: str) -> None:
    with pytest.raises(DtrainError) as caught:
        judge(plan("data=synthetic", *words), [facts_of(**facts)], FP32)
    assert "rank 0" in str(caught.value) and message in str(caught.value)


def test_types_are_held_against_the_precision_that_sets_them() -> None:
    lowered = Precision(param=torch.bfloat16, compute=torch.bfloat16)
    with pytest.raises(DtrainError, match="weights are float32, not bfloat16"):
        judge(plan("data=synthetic"), [facts_of(holds="copies", split={})], lowered)
    judge(plan("data=synthetic"), [facts_of(holds="copies", split={}, types=["float64"])], FP32)


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        (("data.dataset._target_=data.rows.ByRank",), ("14 samples and 2 held out", "15 samples and 2 held out")),
        (
            ("data.dataset._target_=data.rows.Rows", "data.holdout_dataset._target_=data.rows.ByRank"),
            ("16 samples and 16 held out", "16 samples and 17 held out"),
        ),
    ],
)
def test_datasets_of_other_lengths_end_the_run_before_its_first_step(
    words: tuple[str, ...], lengths: tuple[str, str], tmp_path: Path
) -> None:
    rows = ("data=dataset", "data.inputs=input_ids", "data.targets=labels", "data.outputs=13", "data.pad=0", *words)
    common = ("model=gpt", "model.layers=1", "model.width=16", "steps=2", "batch=4", "trust=[data]", "logger=[]")
    asked = plan(*rows, *common, "strategy=ddp", "devices=2", f"out={tmp_path}/run")
    with pytest.raises(RankFailed, match=f"data: rank 0 has {lengths[0]}, rank 1 has {lengths[1]}"):
        ranks(2, train, asked)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
