"""Where the time of a run went, in its rows and its result."""

import json
import time
from pathlib import Path

import pytest
from torch import Tensor, randn, tensor
from torch.utils.data import Dataset

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.loop.spent import Spent
from dtrain.resolve import resolve
from dtrain.result import PARTS
from dtrain.train import train
from dtrain.verb.train import farewell


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Each sample takes 5 ms."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.005)
        return randn(4), tensor([1.0])


def test_a_part_within_another_counts_once() -> None:
    spent = Spent()
    spent.begin(lambda: 0.25)
    with spent.of("evaluate"):
        time.sleep(0.02)
        with spent.of("checkpoint_stall"):
            time.sleep(0.05)
    row = spent.row()
    assert row["time_checkpoint_stall"] >= 0.05 > row["time_evaluate"] >= 0.02
    assert row["time_data_wait"] == 0.0  # what was waited before the loop began


def test_the_parts_add_up_to_the_wall_and_slow_data_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "model=mlp", "model.width=8", "model.outputs=1", "data=dataset", f"data.dataset._target_={__name__}.Slow",
        f"trust=[{__name__.split('.')[0]}]", "objective=regression", "batch=8", "steps=6", "log.every=2", "evaluate.every=3", "checkpoint.every=3", "logger=[]", "out=run",
    ]  # fmt: skip
    plan, began = resolve(compose(words), Cluster(gpus=0, cpus=1)), time.perf_counter()
    result = train(plan)
    wall = time.perf_counter() - began
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    timed = [row for row in rows if "time_step" in row]
    assert [row["step"] for row in timed] == [2, 3, 4, 6]  # flushes: of the log, and before an evaluation
    assert sum(row["time_data_wait"] for row in timed) > 0.5 * 6 * 8 * 0.005
    assert set(result.spent) == {"start", *PARTS} and result.spent["evaluate"] > 0 < result.spent["checkpoint_stall"]
    assert 0.9 * wall < sum(result.spent.values()) <= wall
    assert json.loads((tmp_path / "run/result.json").read_text())["spent"] == result.spent
    assert "\ntime: " in farewell(plan, result) and "% waiting for samples" in farewell(plan, result)
