"""What a sample that is not a number, or a huge one, does to a run, by the word: the same on every mesh, and across a restart."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from pool import ranks, resident
from safetensors.torch import load_file
from torch import Tensor, nn

from dtrain.checkpoint.commit import find
from dtrain.checkpoint.state import TrainState
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.data.order import permute, samples
from dtrain.loop import spike
from dtrain.loop.spike import FLOOR, MOST, limit
from dtrain.model.seeds import derive
from dtrain.optim import inner
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.train import train

BATCH, STEPS, COUNT = 8, 18, 400
BAD_STEP = 13
"""The step (counted from 1) of which one sample is planted, behind a checkpoint at 10."""
WORDS = (
    f"steps={STEPS}", f"batch={BATCH}", "optim.lr=1e-3", "schedule=constant", "checkpoint.every=5", "logger=[]", "hook=[]",
    "model=mlp", "model.width=16", "objective=regression", "data=dataset", f"data.dataset._target_={__name__}.Planted", "data.holdout=0", "data.workers=0",
    f"trust=[{__name__.partition('.')[0]}]", "resume=auto",
)  # fmt: skip


class Planted:
    """y = mean of x; the input of each sample of `bad` is `value` (a target that is nan would only count as missing)."""

    def __init__(self, bad: list[int], value: float) -> None:
        self.bad, self.value = bad, value

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(4, generator=torch.Generator().manual_seed(index))
        return torch.full((4,), self.value) if index in self.bad else x, x.mean()[None]


def of_step(step: int) -> list[int]:
    """Where the samples of the run's step (from 1) stand in the dataset, in the order of the batch."""
    positions = np.arange((step - 1) * BATCH, step * BATCH)
    return [int(sample) for sample in permute(samples(positions, n=COUNT, seed=derive(0, "data"))[0], n=COUNT, key=1)]


def plan(out: Path, *words: str, value: float = math.nan, steps: tuple[int, ...] = (BAD_STEP,)) -> Plan:
    bad = [of_step(step)[5] for step in steps]
    planted = [f"data.dataset.bad={bad}".replace(" ", ""), f"data.dataset.value={value}"]
    window = (
        ["spike.window=8"]
        if any(word.startswith(("on_spike=skip", "on_spike=rewind", "spike.sigma")) for word in words)
        else []
    )
    return small.plan(*WORDS, *window, *planted, f"out={out}", *words, on=Cluster(gpus=0, cpus=4))


def run(out: Path, *words: str, on: Callable[..., list[Any]] = resident, **planted: Any) -> Any:
    """`on`: `ranks` where this process was changed, or a start must find nothing of the one before in its memory."""
    made = plan(out, *words, **planted)
    results = on(made.world, train, made)
    assert len({(result.status, result.step, result.reason) for result in results}) == 1, "all ranks decide alike"
    return results[0]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(out: Path, name: str) -> list[dict[str, Any]]:
    return [
        event
        for line in (out / "events.jsonl").read_text().splitlines()
        if (event := json.loads(line))["event"] == name
    ]


def losses(out: Path) -> list[float]:
    table = rows(out)
    assert [row["step"] for row in table] == list(range(1, len(table) + 1)), "a row for every step, and none twice"
    return [math.nan if row["loss"] is None else row["loss"] for row in table]


MESHES = {
    "one": (),
    "ddp": ("strategy=ddp", "devices=2"),
    "fsdp": ("strategy=fsdp", "devices=2"),
    "pp": ("strategy=pipeline", "devices=2", "mesh.pp=2", "microbatch=4"),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses without a planted sample."""
    out = tmp_path_factory.mktemp("clean")
    run(out, steps=())
    return losses(out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], list[float]]:
    """(answer, value) -> the losses of one process; made when they are first asked for."""

    @cache
    def made(answer: str, value: float) -> list[float]:
        out = tmp_path_factory.mktemp("alone")
        run(out, f"on_spike={answer}", value=value)
        return losses(out)

    return made


@pytest.mark.parametrize(
    ("mesh", "value"), [*((mesh, math.nan) for mesh in MESHES), ("one", math.inf), ("one", 1e4), ("ddp", 1e4)]
)
def test_stop_ends_before_the_bad_step_with_its_state_saved(
    mesh: str, value: float, clean: list[float], tmp_path: Path
) -> None:
    result = run(tmp_path, "on_spike=stop", "spike.sigma=6", *MESHES[mesh], value=value)
    assert (result.status, result.step, result.exit_code) == ("spiked", BAD_STEP - 1, 1)
    assert (
        f"step {BAD_STEP}" in result.reason
        and str(of_step(BAD_STEP)[5]) in result.reason
        and "on_spike=skip" in result.reason
    )
    named = f"Sample {of_step(BAD_STEP)[5]} has NaN or an infinite number: drop or fill it." in result.reason
    assert named == (not math.isfinite(value)), "a large number is named by nobody"
    assert losses(tmp_path) == pytest.approx(clean[: BAD_STEP - 1], rel=2e-6)
    assert find(str(tmp_path))[1]["step"] == BAD_STEP - 1
    assert events(tmp_path, "spike")[0]["samples"] == of_step(BAD_STEP)
    if mesh == "one":
        again = run(tmp_path, "on_spike=stop", "spike.sigma=6", value=value, on=ranks)
        assert again.step == BAD_STEP - 1, "the same words meet the same sample"


def test_stop_alone_looks_for_no_jump(tmp_path: Path) -> None:
    assert run(tmp_path, value=1e4).status == "finished"
    assert run(tmp_path / "nan").status == "spiked"


class Bottomless(nn.Module):
    """Its own loss, which is minus infinity where an input is larger than 1, while its gradients are numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        floor = torch.where(x.max() > 1, -math.inf, 0.0)
        return {"loss": (self.layers(x) - labels).square().mean() + floor}


def test_a_loss_of_minus_infinity_is_a_spike_and_its_window_can_be_saved(tmp_path: Path) -> None:
    own = (f"model._target_={__name__}.Bottomless", "objective=own", "objective.over=samples", "spike.sigma=6")
    assert run(tmp_path, "on_spike=skip", *own, value=1.5).status == "finished"
    assert [event["step"] for event in events(tmp_path, "spike")] == [BAD_STEP]
    assert not events(tmp_path, "save_failed")


@pytest.mark.often("skip-ddp*", "skip-pp*", "rewind-fsdp-10000.0", "rewind-one*", "skip-fsdp-nan")
@pytest.mark.parametrize(("mesh", "value"), [*((mesh, 1e4) for mesh in MESHES), ("fsdp", math.nan)])
@pytest.mark.parametrize("answer", ["skip", "rewind"])
def test_the_run_goes_on_without_the_bad_samples(
    mesh: str, answer: str, value: float, clean: list[float], alone: Callable[[str, float], list[float]], tmp_path: Path
) -> None:
    result = run(tmp_path / "out", f"on_spike={answer}", *MESHES[mesh], value=value)
    assert (result.status, result.step) == ("finished", STEPS)
    values = losses(tmp_path / "out")
    assert values[: BAD_STEP - 1] == pytest.approx(clean[: BAD_STEP - 1], rel=2e-6)
    assert values == pytest.approx(alone(answer, value), rel=2e-6, nan_ok=True)
    assert len(events(tmp_path / "out", "spike")) == 1
    seen = [row["seen"] for row in rows(tmp_path / "out")]
    if answer == "skip":
        assert seen == [step * BATCH for step in range(1, STEPS + 1)]
        assert not values[BAD_STEP - 1] < 100 * max(clean), "the step's own row tells what was there"
    else:
        assert seen == [step * BATCH for step in range(1, STEPS + 2) if step != BAD_STEP], "one batch was passed over"
    assert max(values[BAD_STEP:]) <= max(clean)


@pytest.mark.often("rewind", others=pytest.mark.campaign("commands"))
@pytest.mark.parametrize("answer", ["stop", "skip", "rewind"])
def test_a_restart_behind_it_gives_the_same_run(answer: str, tmp_path: Path) -> None:
    words = (f"on_spike={answer}", "spike.sigma=6", "ema=0.9", "strategy=fsdp", "devices=2")
    last = "on_spike=skip" if answer == "stop" else words[0]
    run(tmp_path / "whole", last, *words[1:])
    run(tmp_path / "parts", *words, f"stop_after={BAD_STEP - 2}", on=ranks)
    run(tmp_path / "parts", *words, f"stop_after={BAD_STEP}", on=ranks)
    run(tmp_path / "parts", last, *words[1:], on=ranks)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=0, abs=0, nan_ok=True)
    (there, one), (here, other) = find(str(tmp_path / "whole")), find(str(tmp_path / "parts"))
    assert {**one["facts"], "seconds": 0} == {**other["facts"], "seconds": 0}
    for file in one["files"]:
        left, right = load_file(Path(there, file["name"])), load_file(Path(here, file["name"]))
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.often("stop-fsdp*", "skip-one-steps0", "rewind-one-steps2")
@pytest.mark.parametrize(
    ("mesh", "steps"), [("one", (BAD_STEP, BAD_STEP + 2)), ("fsdp", (BAD_STEP,)), ("one", (STEPS,))]
)
@pytest.mark.parametrize("answer", ["stop", "skip", "rewind"])
def test_a_device_that_tells_later_gives_the_same_run(
    answer: str, mesh: str, steps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"on_spike={answer}", *MESHES[mesh])
    at_once = run(tmp_path / "at once", *words, steps=steps)
    # what torch's fused optimizers do on a GPU they do here
    monkeypatch.setattr("dtrain.train.gates", lambda state, mesh: inner(state.optimizer))
    later = run(tmp_path / "later", *words, steps=steps, on=ranks)
    assert (later.status, later.step, later.reason) == (at_once.status, at_once.step, at_once.reason)
    assert losses(tmp_path / "later") == pytest.approx(losses(tmp_path / "at once"), rel=0, abs=0, nan_ok=True)
    assert len(events(tmp_path / "later", "spike")) == len(events(tmp_path / "at once", "spike"))
    (there, one), (here, other) = find(str(tmp_path / "at once")), find(str(tmp_path / "later"))
    assert one["facts"]["stream"] == other["facts"]["stream"]
    for file in one["files"]:
        left, right = load_file(Path(there, file["name"])), load_file(Path(here, file["name"]))
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_under_fp16_what_only_ran_over_is_no_spike(tmp_path: Path) -> None:
    run(tmp_path / "over", "precision=fp16", "precision.scale=1e12", "on_spike=stop", steps=())
    assert not events(tmp_path / "over", "spike")
    assert run(tmp_path / "nan", "precision=fp16", "on_spike=stop").step == BAD_STEP - 1
    assert run(tmp_path / "skip", "precision=fp16", "on_spike=skip").status == "finished"


@pytest.mark.parametrize("answer", ["skip", "rewind"])
def test_spikes_without_end_stop_the_run(answer: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"on_spike={answer}", "steps=40", steps=tuple(range(BAD_STEP, 50)))
    assert (result.status, result.exit_code) == ("spiked", 1)
    assert "optim.lr" in result.reason
    assert len(events(tmp_path, "spike")) == (MOST if answer == "skip" else MOST + 1)


def test_rewind_before_the_first_checkpoint_goes_back_to_the_start(tmp_path: Path) -> None:
    assert run(tmp_path, "on_spike=rewind", steps=(2, 3)).status == "finished"
    assert [row["seen"] // BATCH for row in rows(tmp_path)][:3] == [1, 4, 5]


def test_a_limit_knows_the_mean_the_spread_and_the_largest() -> None:
    assert limit([1.0] * 10, 6.0) == pytest.approx(1 + FLOOR)
    assert limit([0.0, 2.0] * 50, 6.0) == pytest.approx(7.0)
    assert limit([0.1] * 99 + [5.0], 6.0) > 9, "one that is far out in the window makes room for another"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["recipe=digits"], ["optim.lr=1e-3"], ["model=moe"], ["model=mlp", "data=synthetic", "batch=2", "steps=3000"]],
    ids=" ".join,
)
def test_a_healthy_beginning_has_no_spike(words: list[str], tmp_path: Path) -> None:
    quiet = ["on_spike=skip", "stop_after=300", "logger=[]", "hook=[]", "evaluate.every=0", "evaluate.samples=8"]
    ranks(1, train, resolve(compose([*words, *quiet, f"out={tmp_path}"]), Cluster(gpus=0, cpus=1)), seconds=300)
    assert len(losses(tmp_path)) == 300 and not events(tmp_path, "spike")


def test_of_state_that_rests_on_the_cpu_the_host_judges() -> None:
    """A gate would have to come from the device, and torch's fused Adam of the CPU would read it before it is there."""
    model = nn.Linear(2, 2)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), fused=True))
    with small.mesh_of() as mesh:
        mesh.device = torch.device("cuda")
        assert not spike.gates(state, mesh)
