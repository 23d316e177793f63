"""float16 with a dynamic loss scale: an overflow costs one step, on all ranks alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, few_steps, on_resident_mesh, plan

from dtrain.mesh import Mesh
from dtrain.precision import LossScale
from dtrain.precision.fp16 import build
from dtrain.train import train

FP16: dict[str, Any] = PARTS | {
    "precision": {"_target_": "dtrain.precision.fp16.build", "scale": 1024.0, "growth": 2000}
}


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    scale = LossScale(1024.0, growth=3)
    assert not scale.accept(torch.tensor(float("inf")))
    assert scale.value == 512
    assert not scale.accept(torch.tensor(float("nan")))
    assert scale.value == 256
    assert scale.accept(torch.tensor(1.0))
    assert scale.value == 256


def test_good_steps_in_a_row_double_the_scale() -> None:
    scale, finite, overflow = LossScale(8.0, growth=3), torch.tensor(1.0), torch.tensor(float("inf"))
    values = []
    for norm in (finite, finite, overflow, finite, finite, finite, finite, finite, finite):
        scale.accept(norm)
        values.append(scale.value)
    assert values == [8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_the_scale_never_falls_below_one() -> None:
    scale = LossScale(1.0, growth=3)
    scale.accept(torch.tensor(float("inf")))
    assert scale.value == 1


def test_the_scale_survives_a_restart() -> None:
    one, two, norm = LossScale(8.0, growth=3), LossScale(64.0, growth=3), torch.tensor(1.0)
    for _ in range(2):
        one.accept(norm)
    two.load_state_dict(one.state_dict())
    two.accept(norm)
    assert two.value == 16


def test_the_scale_changes_no_number() -> None:
    (full,) = resident(1, few_steps, PARTS, {})
    for scale in (1024.0, 4096.0):
        (half,) = resident(1, few_steps, FP16 | {"precision": FP16["precision"] | {"scale": scale}}, {})
        assert half["losses"] == pytest.approx(full["losses"], rel=1e-4)
        assert half["norms"] == pytest.approx(full["norms"], rel=5e-2)
        assert half["scale"] == scale


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_nearly_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = resident(1, few_steps, FP16, {})
    one, two = resident(2, few_steps, FP16 | {"strategy": STRATEGIES[strategy]}, {axis: 2})
    assert one["losses"] == two["losses"] == pytest.approx(reference["losses"], rel=1e-4)
    assert one["norms"] == two["norms"] == pytest.approx(reference["norms"], rel=1e-2)


def test_a_split_sequence_has_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    words = (
        "precision=fp16", "optim=sgd", "data=synthetic", "data.samples=32", "data.sequence=8", "batch=4", "steps=2", "logger=[]", "hook=[]",
        "model=gpt", "model.layers=1", "model.width=16", "model.heads=2",
    )  # fmt: skip
    norms = []
    for split in ((), ("strategy=ddp", "devices=2", "mesh.cp=2")):
        asked = plan(*words, *split, f"out={tmp_path / str(len(split))}")
        resident(asked.world, train, asked)
        norms.append([json.loads(row)["norm"] for row in Path(asked.out, "metrics.jsonl").read_text().splitlines()])
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_a_scale_that_is_too_large_halves_on_all_ranks_until_it_fits(strategy: str, axis: str) -> None:
    parts = FP16 | {"strategy": STRATEGIES[strategy], "precision": FP16["precision"] | {"scale": 2.0**30}}
    (full,), runs = resident(1, few_steps, PARTS, {}), resident(2, few_steps, parts, {axis: 2})
    for run in runs:
        assert run["losses"][0] == pytest.approx(full["losses"][0], rel=2e-3), "the loss itself is not scaled"
        skipped = [not torch.isfinite(torch.tensor(norm)) for norm in run["norms"]]
        assert skipped[0]
        assert run["scale"] == 2.0 ** (30 - sum(skipped))
        assert all(torch.isfinite(torch.tensor(values)).all() for values in run["weights"].values()), (
            "a skipped step touches no weight"
        )
    assert runs[0]["weights"] == runs[1]["weights"]


def overflow_on_one_rank(mesh: Mesh) -> tuple[bool, float]:
    """Rank 1 alone has an infinite gradient; the norm that all ranks share says so to all."""
    from dtrain.optim.clip import clip
    from dtrain.parallel.order import parallelize
    from dtrain.strategy.ddp import DDP

    model, precision, strategy = torch.nn.Linear(2, 2), build(scale=8.0, growth=5), DDP(bucket_mb=25)
    wrapped = parallelize(model, mesh, strategy, precision=precision, seed=0)
    with strategy.sync(wrapped, True):
        (wrapped(torch.full((1, 2), float("inf") if mesh.rank else 1.0)).sum() * 8).backward()
    assert precision.scale
    return precision.scale.accept(clip(list(model.parameters()), 1.0, scale=8.0)), precision.scale.value


def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    assert on_resident_mesh(overflow_on_one_rank, dp_replicate=2) == [(False, 4.0)] * 2


def test_rows_have_the_scale_and_the_skipped_steps_and_ten_in_a_row_are_told(tmp_path: Path) -> None:
    words = (
        "precision=fp16", "model=mlp", "model.width=8", "data=synthetic", "data.samples=32", "batch=4", "steps=14", "logger=[]", "hook=[]",
        "strategy=ddp", "devices=2",
    )  # fmt: skip
    skipped, told = {}, {}
    for scale in (2.0**40, 2.0**10):
        asked = plan(*words, f"precision.scale={scale}", f"out={tmp_path / str(scale)}")
        resident(asked.world, train, asked)
        rows, events = (
            [*map(json.loads, Path(asked.out, name).read_text().splitlines())]
            for name in ("metrics.jsonl", "events.jsonl")
        )
        for row in rows:
            assert row["loss_scale"] == scale / 2 ** row["skipped_steps"]
        skipped[scale] = [row["skipped_steps"] for row in rows]
        told[scale] = [row["text"] for row in events if row["event"] == "caveat" and "fp16" in row["text"]]
    assert skipped[2.0**10] == [0] * 14 and told[2.0**10] == []
    assert skipped[2.0**40][:10] == [*range(1, 11)]
    assert told[2.0**40] == [
        "precision=fp16: the gradients of the first 10 steps all overflowed, so no weight has changed yet. Type a smaller precision.scale, or "
        "precision=bf16."
    ]
