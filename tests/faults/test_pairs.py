"""Every mesh goes on from what every other one saved: the same values, the next batch, the next losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_sharded import ADAMW, commit, sharded, whole
from small import PARTS, STRATEGIES, on_mesh

from dtrain.build import build
from dtrain.checkpoint.state import TrainState
from dtrain.data.stream import Stream, as_source
from dtrain.loop.step import gradients_of, make_step, zero
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize
from dtrain.planned import BatchShape, PipelineShape

ZERO1 = {"_target_": "dtrain.strategy.zero1.build", "offload": "none"}
PIPELINE = {"_target_": "dtrain.strategy.pipeline.Pipeline", "bucket_mb": 25}
LAYOUTS: dict[str, tuple[dict[str, int], Any]] = {
    "single": ({"dp_shard": 1}, PARTS["strategy"]),
    "ddp 1": ({"dp_replicate": 1}, STRATEGIES["ddp"]),
    "ddp 2": ({"dp_replicate": 2}, STRATEGIES["ddp"]),
    "ddp 4": ({"dp_replicate": 4}, STRATEGIES["ddp"]),
    "fsdp 1": ({"dp_shard": 1}, STRATEGIES["fsdp"]),
    "fsdp 2": ({"dp_shard": 2}, STRATEGIES["fsdp"]),
    "fsdp 4": ({"dp_shard": 4}, STRATEGIES["fsdp"]),
    "hsdp 4": ({"dp_replicate": 2, "dp_shard": 2}, STRATEGIES["fsdp"]),
    "zero1 1": ({"dp_shard": 1}, ZERO1),
    "zero1 2": ({"dp_shard": 2}, ZERO1),
    "zero1 4": ({"dp_shard": 4}, ZERO1),
    "tp 2": ({"tp": 2}, STRATEGIES["ddp"]),
    "tp 4": ({"tp": 4}, STRATEGIES["ddp"]),
    "pp 2": ({"pp": 2}, PIPELINE),
    "pp 4": ({"pp": 4}, PIPELINE),
    "pp 2 x fsdp 2": ({"pp": 2, "dp_shard": 2}, STRATEGIES["fsdp"]),
}
"""All of a world of 1, 2 or 4 that there are of single, ddp, fsdp, hsdp, zero1, tp, pp, pp x fsdp."""
FAST = ("fsdp 2", "tp 2", "pp 2")
MODEL = PARTS["model"] | {"layers": 4, "heads": 4, "kv_heads": 4, "tied": False}
SIZE, MICROBATCH, SAVED, STEPS = 8, 2, 3, 5


class Run:
    """A few steps of train.py on this rank."""

    def __init__(self, mesh: Mesh, strategy: Any, seed: int) -> None:
        precision, self.objective, built = build(PARTS["precision"]), build(PARTS["objective"]), build(strategy)
        source = as_source(build(PARTS["data"]))
        self.mesh, model = mesh, construct(MODEL, facts=source.facts, seed=seed)
        wrapped = parallelize(model, mesh, built, precision=precision, seed=seed, pipeline=PipelineShape())
        shape = BatchShape(SIZE, MICROBATCH, mesh.data_ranks, SIZE // mesh.data_ranks // MICROBATCH)
        self.stream = Stream(source, batch=shape, mesh=mesh, seed=5, count=self.objective.count)
        self.state = TrainState(model, build(ADAMW | {"lr": 1e-3}, model=model), self.stream)
        self.step = make_step(wrapped, self.objective, built, mesh, precision=precision, seed=5)
        self.losses: list[float] = []
        self.rows: list[list[list[int]]] = []
        """Of each step, the inputs that this rank saw."""

    def until(self, steps: int) -> None:
        parameters = gradients_of(self.state.model)
        while self.state.step < steps:
            loss = self.step(self, self.state.step)  # type: ignore[arg-type] # it asks for the next share
            self.state.optimizer.step()  # type: ignore[union-attr]
            zero(parameters)
            self.state.step += 1
            self.losses.append(self.mesh.sum_stages(self.mesh.sum(loss.sums["loss"].clone())).item() / loss.count)

    def __next__(self) -> Any:
        share = next(self.stream)
        self.rows.append([row for part in share.microbatches for row in part["inputs"].tolist()])
        return share


def save_on(mesh: Mesh, strategy: Any, out: Path) -> dict[str, Any]:
    run = Run(mesh, strategy, seed=5)
    run.until(SAVED)
    commit(sharded(mesh, out), run.state)
    values = whole(run.state)
    run.until(STEPS)
    run.stream.close()
    return {"values": values, "losses": run.losses[SAVED:], "rows": run.rows[SAVED:]}


def go_on(mesh: Mesh, strategy: Any, outs: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found = {}
    for source, out in outs.items():
        run = Run(mesh, strategy, seed=6)
        sharded(mesh, out, resume="must").restore(run.state)
        values = whole(run.state)
        run.until(STEPS)
        run.stream.close()
        found[source] = {"values": values, "losses": run.losses, "rows": run.rows}
    return found


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of a mesh hold and saw together."""
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    batches = [sorted({tuple(row) for rank in ranks for row in rank["rows"][step]}) for step in range(STEPS - SAVED)]
    return {
        "values": {name: value for rank in ranks for name, value in rank["values"].items()},
        "losses": ranks[0]["losses"],
        "rows": batches,
    }


def hold_against(source: str, target: str, here: dict[str, Any], there: dict[str, Any]) -> None:
    assert here["values"].keys() == there["values"].keys()
    assert [name for name in here["values"] if here["values"][name] != there["values"][name]] == [], (
        f"{source} -> {target}"
    )
    assert here["rows"] == there["rows"]
    torch.testing.assert_close(
        torch.tensor(here["losses"]),
        torch.tensor(there["losses"]),
        rtol=2e-6,
        atol=0,
        msg=lambda text: f"{source} -> {target}: {text}",
    )


def pairs(names: tuple[str, ...], folder: Path) -> None:
    outs = {name: folder / name for name in names}
    saved = {}
    for name in names:
        degrees, strategy = LAYOUTS[name]
        saved[name] = together(
            on_mesh(lambda mesh, name=name, strategy=strategy: save_on(mesh, strategy, outs[name]), **degrees)
        )
    for target in names:
        degrees, strategy = LAYOUTS[target]
        ranks = on_mesh(lambda mesh, strategy=strategy: go_on(mesh, strategy, outs), **degrees)
        for source in names:
            hold_against(source, target, together([rank[source] for rank in ranks]), saved[source])


@pytest.mark.campaign("kills")
def test_some_pairs_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    pairs(FAST, tmp_path)


@pytest.mark.slow
def test_all_pairs_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    pairs(tuple(LAYOUTS), tmp_path)
