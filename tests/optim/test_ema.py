"""The average of the weights: that of a plain loop on every mesh, saved, restored and evaluated beside the weights."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, UNEVEN, on_resident_mesh, small_gpt, tokens
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.checkpoint.commit import find
from dtrain.checkpoint.load import Reading
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.data.stream import as_source
from dtrain.evaluation.heldout import evaluate, measure
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local
from dtrain.model import construct
from dtrain.model.seeds import fill
from dtrain.optim.ema import EMA
from dtrain.parallel.order import materialize, parallelize
from dtrain.planned import PipelineShape
from dtrain.resolve import resolve
from dtrain.train import train

DECAY = 0.7
UNTIED = PARTS["model"] | {"tied": False}
MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "single": ({"dp_shard": 1}, PARTS["strategy"]),
    "ddp": ({"dp_replicate": 2}, STRATEGIES["ddp"]),
    "fsdp": ({"dp_shard": 2}, STRATEGIES["fsdp"]),
    "tp": ({"tp": 2}, STRATEGIES["ddp"]),
    "pp": ({"pp": 2}, STRATEGIES["ddp"]),
}


def moved(model: torch.nn.Module, step: int) -> None:
    """Weights after an optimizer's step: anything that differs from step to step."""
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).mul_(1 - 0.1 * step).add_(0.01)


def by_hand() -> dict[str, torch.Tensor]:
    model = construct(UNTIED, facts={"vocab": 13}, seed=0)
    materialize(model, torch.device("cpu"))
    fill(model, 0)
    weights = dict(model.named_parameters())
    averages = {name: weight.detach().clone() for name, weight in weights.items()}
    for step in range(3):
        moved(model, step)
        for name, weight in weights.items():
            averages[name] = DECAY * averages[name] + (1 - DECAY) * weight.detach()
    return averages


def averaged(mesh: Mesh, strategy: Any) -> dict[str, torch.Tensor]:
    model = construct(UNTIED, facts={"vocab": 13}, seed=0)
    parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=0, pipeline=PipelineShape())
    ema = EMA(model, DECAY)
    for step in range(3):
        moved(model, step)
        ema.update()
    for name, parameter in model.named_parameters():
        assert local(ema.averages[name]).shape == local(parameter).shape, "a rank averages what it holds"
    return {name: (a.full_tensor() if isinstance(a, DTensor) else a) for name, a in ema.averages.items()}


@pytest.mark.parametrize("mesh", MESHES)
def test_it_is_the_average_of_a_plain_loop(mesh: str) -> None:
    degrees, strategy = MESHES[mesh]
    expected = by_hand()
    average = {
        name: value
        for rank in on_resident_mesh(partial(averaged, strategy=strategy), **degrees)
        for name, value in rank.items()
    }
    assert average.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value, rtol=1e-6, atol=1e-7)


def test_it_starts_as_the_weights_and_is_no_second_name_of_them() -> None:
    model = small_gpt()
    ema = EMA(model, 0.9)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    assert all(torch.equal(ema.averages[name], weight) for name, weight in before.items())
    moved(model, 1)
    assert all(torch.equal(ema.averages[name], weight) for name, weight in before.items())


def test_a_decay_of_nothing_is_the_newest_weights() -> None:
    model = small_gpt()
    ema = EMA(model, 0.0)
    moved(model, 1)
    ema.update()
    assert all(torch.equal(ema.averages[name], weight) for name, weight in model.named_parameters())


def test_it_is_kept_in_fp32_where_the_weights_are_not() -> None:
    """Small steps would be lost otherwise."""
    model = small_gpt().to(torch.bfloat16)
    ema = EMA(model, 0.999)
    with torch.no_grad():
        model.norm.weight.fill_(1.0)
    ema.begin()
    with torch.no_grad():
        model.norm.weight.fill_(2.0)
    ema.update()
    torch.testing.assert_close(ema.averages["norm.weight"], torch.full((8,), 1.001), rtol=1e-6, atol=0)


def test_frozen_weights_are_not_averaged() -> None:
    model = small_gpt()
    model.embed.weight.requires_grad_(False)
    assert "embed.weight" not in EMA(model, 0.9).averages


def stood_in(mesh: Mesh, strategy: Any) -> list[bool]:
    model = construct(UNTIED, facts={"vocab": 13}, seed=0)
    wrapped = parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=0)
    ema, x, parameters = EMA(model, 0.5), tokens(2, 6), list(model.parameters())
    at_first = wrapped(x)
    at_first.sum().backward()
    moved(model, 3)
    weights = [local(p).detach().clone() for p in parameters]
    with torch.no_grad():
        now = wrapped(x)
        with ema.instead(wrapped):
            instead = wrapped(x)
        again = wrapped(x)
        with suppress(KeyError), ema.instead(wrapped):
            raise KeyError
    same = all(torch.equal(local(p), weight) for p, weight in zip(parameters, weights, strict=True))
    return [torch.equal(instead, at_first), not torch.allclose(now, at_first), torch.equal(now, again), same]


@pytest.mark.parametrize("mesh", ["single", "fsdp", "fsdp that keeps what it gathered", "tp"])
def test_it_stands_in_for_the_weights_and_goes_again(mesh: str) -> None:
    degrees, strategy = MESHES[mesh.split()[0]]
    strategy = strategy | ({"reshard": "never"} if "keeps" in mesh else {})
    assert on_resident_mesh(partial(stood_in, strategy=strategy), **degrees) == [[True] * 4] * max(degrees.values())


def measured(mesh: Mesh, strategy: Any) -> tuple[dict[str, float], dict[str, float], bool]:
    """Figures of `measure`, and those of a model whose weights are the averages."""
    source, objective, precision = as_source(build(UNEVEN)), build(PARTS["objective"]), build(PARTS["precision"])
    model = construct(UNTIED, facts=source.facts, seed=0)
    wrapped = parallelize(model, mesh, build(strategy), precision=precision, seed=0, pipeline=PipelineShape())
    ema = EMA(model, DECAY)
    moved(model, 2)
    ema.update()
    options: dict[str, Any] = {"precision": precision, "samples": 20, "microbatch": 4}
    figures = measure(wrapped, {"": source}, objective, mesh, ema=ema, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local(parameter).copy_(local(ema.averages[name]))
    return figures, evaluate(wrapped, source, objective, mesh, **options), wrapped.training


@pytest.mark.parametrize("mesh", ["ddp", "fsdp", "tp", "pp"])
def test_evaluation_tells_the_loss_of_the_average_too(mesh: str) -> None:
    ((expected, averages, _),) = on_resident_mesh(partial(measured, strategy=PARTS["strategy"]), dp_shard=1)
    assert expected["eval_ema_loss"] == pytest.approx(averages["eval_loss"], rel=1e-6)
    assert abs(expected["eval_ema_loss"] - expected["eval_loss"]) > 1e-3
    degrees, strategy = MESHES[mesh]
    for figures, _, training in on_resident_mesh(partial(measured, strategy=strategy), **degrees):
        assert figures == pytest.approx(expected, rel=1e-5)
        assert training


# in a run


def run(out: Path, *words: str) -> Any:
    said = [
        "data=synthetic",
        "model.layers=2",
        "model.width=32",
        "model.heads=2",
        "data.sequence=8",
        "steps=6",
        "batch=8",
        "logger=[]",
        "ema=0.8",
    ]
    plan = resolve(
        compose([*said, "evaluate.samples=8", "optim.lr=0.01", "schedule.warmup=0", f"out={out}", *words]),
        Cluster(gpus=0, cpus=1),
    )
    return resident(plan.world, train, plan)[0]


def averages(out: Path) -> dict[str, torch.Tensor]:
    url, commit = find(str(out))
    average = {
        name: torch.zeros(facts["shape"]) for name, facts in commit["tensors"].items() if name.startswith("ema.")
    }
    Reading(url, commit, average).fill()
    return average


def test_a_stopped_run_goes_on_with_its_average_on_another_mesh(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", "stop_after=3", "strategy=fsdp", "devices=2")
    parts = run(tmp_path / "parts", "devices=2", "mesh.tp=2")
    assert parts.metrics["eval_ema_loss"] == pytest.approx(whole.metrics["eval_ema_loss"], rel=1e-5)
    assert whole.metrics["eval_ema_loss"] != pytest.approx(whole.metrics["eval_loss"], rel=1e-5)
    expected, average = averages(tmp_path / "whole"), averages(tmp_path / "parts")
    assert expected.keys() == average.keys() != set()
    for name, value in expected.items():
        torch.testing.assert_close(average[name], value, rtol=0, atol=1e-4 * value.abs().max().item())
    events = [json.loads(line) for line in (tmp_path / "whole" / "events.jsonl").read_text().splitlines()]
    assert any("eval_ema_loss" in row for row in events), "it stands in the journal"


def test_a_step_that_the_device_leaves_out_is_not_averaged() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    gated, plain = EMA(model, DECAY), EMA(other, DECAY)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.data += 1.0
    gated.update(torch.tensor(0.0))
    gated.update(torch.tensor(1.0))
    plain.update()
    for name, average in plain.averages.items():
        torch.testing.assert_close(gated.averages[name], average)
