"""What a run tells: a row per step whatever the period, sums over all ranks, loggers that cannot stop it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import on_mesh, plan
from torch import nn

from dtrain.checkpoint.state import TrainState
from dtrain.logger import Logger
from dtrain.loop.metrics import Log
from dtrain.loop.step import StepLoss
from dtrain.mesh import Mesh
from dtrain.objective.next_token import NextToken
from dtrain.planned import Plan
from dtrain.predict.time import at_peak
from dtrain.result import Result
from dtrain.storage import store

TOLD: list[tuple[Any, ...]] = []


class Remembering(Logger):
    """A logger that keeps what it is told."""

    def __init__(self, *, out: str, steps: int) -> None:
        TOLD.append(("built", out, steps))

    def scalars(self, step: int, values: Any) -> None:
        TOLD.append((step, dict(values)))

    def text(self, step: int, name: str, text: str) -> None:
        TOLD.append((name, text))

    def end(self, result: Any) -> None:
        TOLD.append(("ended", result["status"]))


class Failing(Remembering):
    """A logger that raises in one of its calls."""

    fails_in = ""

    def __init__(self, *, out: str, steps: int) -> None:
        self._fail("init")

    def _fail(self, where: str) -> None:
        if self.fails_in == where:
            raise ConnectionError("no network")

    def scalars(self, step: int, values: Any) -> None:
        self._fail("scalars")

    def text(self, step: int, name: str, text: str) -> None:
        self._fail("text")

    def end(self, result: Any) -> None:
        self._fail("end")


def with_loggers(out: Path, every: int, *names: str) -> Plan:
    made = plan("batch=8", "devices=2", f"out={out}", f"log.every={every}", "steps=6")
    return replace(made, loggers={name: {"_target_": f"{__name__}.{name}"} for name in names})


@pytest.fixture(autouse=True)
def _forget() -> None:
    TOLD.clear()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(mesh: Mesh, made: Plan, *, steps: int = 6, start: int = 0) -> list[tuple[Any, ...]]:
    """Steps whose loss sum is 10 x step on rank 0 and step on rank 1, over a count of 11."""
    with Log(made, mesh) as log:
        nothing_skipped: Any = SimpleNamespace(damaged=[], passed_over=())
        log.started(TrainState(nn.Linear(1, 1), step=start), nothing_skipped, parameters=1, caveats=[])
        log.begin(NextToken(), lambda: 0.0)
        for step in range(start + 1, start + steps + 1):
            sums = {
                "loss": torch.tensor(float(step * (10 if mesh.rank == 0 else 1))),
                "accuracy": torch.tensor(float(mesh.rank)),
            }
            log.record(step, 8 * step, StepLoss(sums, 11), torch.tensor(0.5 * step), {"lr": 0.1, "lr_head": 0.2})
        log.note("a sample")
        log.evaluated(step, {"eval_loss": 2.0})
        log.flush()
        log.finish(Result("finished", step, log.last.get("loss"), 1.0))
    return TOLD


@pytest.mark.parametrize("every", [1, 4, 100])
def test_every_step_has_a_row_of_sums_over_all_ranks(tmp_path: Path, every: int) -> None:
    on_mesh(lambda mesh: run(mesh, with_loggers(tmp_path, every)), dp_replicate=2)
    written = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6]
    for row in written:
        assert row["loss"] == pytest.approx(row["step"])
        assert row["accuracy"] == pytest.approx(1 / 11)
        assert (row["seen"], row["norm"], row["lr"], row["lr_head"]) == (8 * row["step"], 0.5 * row["step"], 0.1, 0.2)
        assert row["peak_bytes"] > 1 << 20
        assert row["samples_per_second"] == pytest.approx(8 / row["step_seconds"])
        assert row["tokens_per_second"] == pytest.approx(11 / row["step_seconds"])


def test_what_happened_is_told_in_order(tmp_path: Path) -> None:
    on_mesh(lambda mesh: run(mesh, with_loggers(tmp_path, 2)), dp_replicate=2)
    assert [row["event"] for row in rows(tmp_path / "events.jsonl")] == ["started", "evaluated", "finished"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 6)
    assert result["loss"] == pytest.approx(6)


def test_steps_that_are_done_again_have_one_row(tmp_path: Path) -> None:
    made = with_loggers(tmp_path, 2)
    on_mesh(lambda mesh: (run(mesh, made), run(mesh, made, start=3)), dp_replicate=2)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(1, 10))


def test_rows_that_somebody_took_away_are_missed(tmp_path: Path) -> None:
    made = with_loggers(tmp_path, 2)
    on_mesh(lambda mesh: run(mesh, made), dp_replicate=2)
    rest = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(rest[:1] + rest[3:]))
    on_mesh(lambda mesh: run(mesh, made, start=6), dp_replicate=2)
    assert [row["text"] for row in rows(tmp_path / "events.jsonl") if row["event"] == "caveat"] == [
        "metrics.jsonl lacks the rows of 2 of the 6 steps that are done"
    ]


def test_loggers_live_on_rank_0_and_hear_once_per_flush(tmp_path: Path) -> None:
    zero, one = on_mesh(lambda mesh: run(mesh, with_loggers(tmp_path, 3, "Remembering")), dp_replicate=2)
    assert one == []
    assert zero[0] == ("built", str(tmp_path), 6)
    assert [call[0] for call in zero[1:]] == ["note", 3, 6, "note", 6, "ended"]
    assert zero[2][1]["loss"] == pytest.approx(3)
    assert "step" not in zero[2][1]
    assert zero[5] == (6, {"eval_loss": 2.0})


@pytest.mark.parametrize("where", ["init", "scalars", "text", "end"])
def test_a_logger_that_fails_is_named_once_and_left_out(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "fails_in", where)
    zero, _ = on_mesh(lambda mesh: run(mesh, with_loggers(tmp_path, 1, "Failing", "Remembering")), dp_replicate=2)
    assert [call[0] for call in zero if isinstance(call[0], int)] == [1, 2, 3, 4, 5, 6, 6], "the other goes on"
    failed = [row for row in rows(tmp_path / "events.jsonl") if row["event"] == "logger_failed"]
    assert [(row["logger"], row["error"]) for row in failed] == [("Failing", "ConnectionError: no network")]
    assert len(rows(tmp_path / "metrics.jsonl")) == 6


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        with pytest.raises(ZeroDivisionError), Log(with_loggers(tmp_path, 1), mesh):
            raise ZeroDivisionError("no such luck")

    on_mesh(work, dp_shard=1)
    (event,) = rows(tmp_path / "events.jsonl")
    assert (event["event"], event["error"]) == ("failed", "ZeroDivisionError: no such luck")


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_were_finished_before_an_error_have_rows(tmp_path: Path, ranks: int) -> None:
    """Without a word to the other rank, which has ended before the error."""

    def work(mesh: Mesh) -> list[tuple[Any, ...]]:
        last = 6 if mesh.rank == 0 else 4
        with pytest.raises(ZeroDivisionError), Log(with_loggers(tmp_path, 4, "Remembering"), mesh) as log:
            log.begin(NextToken(), lambda: 0.0)
            for step in range(1, last + 1):
                loss = StepLoss({"loss": torch.tensor(11.0 * step)}, 11)
                log.record(step, 8 * step, loss, torch.tensor(0.5 * step), {"lr": 0.1})
            raise ZeroDivisionError("no such luck")
        return TOLD

    told, *_ = on_mesh(work, dp_replicate=ranks)
    written = rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["norm"]) for row in written] == [(step, 0.5 * step) for step in range(1, 7)]
    losses = [1, 2, 3, 4, 5, 6] if ranks == 1 else [2, 4, 6, 8, None, None]  # their sum is with both ranks
    assert [row.get("loss") for row in written] == losses
    assert [call[0] for call in told[1:]] == [4, 6, "ended"]
    assert ("loss" in told[2][1]) == (ranks == 1)


def test_a_loss_that_is_no_number_is_a_row_too(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> float:
        with Log(with_loggers(tmp_path, 1), mesh) as log:
            log.begin(NextToken(), lambda: 0.0)
            log.record(1, 8, StepLoss({"loss": torch.tensor(math.nan)}, 8), torch.tensor(math.inf), {"lr": 0.1})
            log.finish(Result("finished", 1, log.last["loss"], 1.0))
            return log.last["loss"]

    on_mesh(work, dp_shard=1)
    assert rows(tmp_path / "metrics.jsonl")[0] | {"loss": None, "norm": None} == rows(tmp_path / "metrics.jsonl")[0]
    assert json.loads((tmp_path / "result.json").read_text())["loss"] is None


def test_a_step_without_a_target_has_no_loss_and_it_is_said_once(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> None:
        with Log(with_loggers(tmp_path, 1), mesh) as log:
            log.begin(NextToken(), lambda: 0.0)
            for step, count in enumerate((8, 0, 0, 8), 1):
                log.record(step, 8, StepLoss({"loss": torch.tensor(4.0)}, count), torch.tensor(1.0), {"lr": 0.1})

    on_mesh(work, dp_shard=1)
    assert [row.get("loss", "none") for row in rows(tmp_path / "metrics.jsonl")] == [0.5, "none", "none", 0.5]
    (said,) = [row["text"] for row in rows(tmp_path / "events.jsonl") if row["event"] == "caveat"]
    assert said.startswith("step 2 has no loss")


def test_whoever_sees_a_result_sees_all_rows_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store.write

    def work(mesh: Mesh) -> list[tuple[int, str]]:
        seen = list[tuple[int, str]]()

        def written(url: str, data: bytes) -> None:
            if url.endswith("result.json"):
                seen.append((len(rows(tmp_path / "metrics.jsonl")), rows(tmp_path / "events.jsonl")[-1]["event"]))
            write(url, data)

        monkeypatch.setattr(store, "write", written)
        run(mesh, replace(with_loggers(tmp_path, 1), out=f"flaky://file/{tmp_path}"))
        return seen

    assert on_mesh(work, dp_shard=1) == [[(6, "finished")]]


def test_rows_have_the_mfu_where_gpus_and_model_are_known(tmp_path: Path) -> None:
    gpus = plan("cluster=h100x8", "data=synthetic", "nodes=1", "devices=8", "batch=8")
    on_mesh(lambda mesh: run(mesh, replace(gpus, out=str(tmp_path), loggers={})), dp_shard=1)
    for row in rows(tmp_path / "metrics.jsonl"):
        assert row["mfu"] == pytest.approx(at_peak(gpus) / row["step_seconds"])
