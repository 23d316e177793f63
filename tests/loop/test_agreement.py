"""Ranks whose samples take different ways through a model, and buffers that a forward changes: one rule for every strategy."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import count
from pool import ranks, resident
from reaching import parts, token_parts
from small import STRATEGIES, few_steps, joined, on_mesh, plan
from strategy.test_units import SHARDED

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.load import Reading
from dtrain.evaluation.evaluate import evaluate
from dtrain.loop.agreement import Agreement
from dtrain.mesh import Mesh
from dtrain.planned import MeshShape, PipelineShape, Plan
from dtrain.train import train

STEPS = 10
ALL = SHARDED | {"ddp": STRATEGIES["ddp"]}
MODELS: dict[str, dict[str, Any]] = {
    "ways": parts("Ways"),
    "piped": parts("Piped"),
    "repeated": parts("Repeated"),
    "scales": parts("Scales"),
    "tokens": token_parts(),
    "experts": token_parts(model={"_target_": "reaching.Tokens", "experts": True}),
}
FAST = [
    ("ways", "ddp", {"dp_replicate": 2}, 2),
    ("ways", "ddp", {"tp": 2}, 8),
    ("ways", "ddp", {"pp": 2}, 4),
    ("ways", "fsdp", {"dp_shard": 2}, 1),
    ("repeated", "fsdp", {"dp_shard": 2}, 2),
    ("scales", "fsdp", {"dp_shard": 2}, 1),
    ("scales", "zero2", {"dp_shard": 2}, 2),
    ("ways", "zero1", {"dp_shard": 2}, 2),
    ("ways", "zero2", {"dp_shard": 2}, 1),
    ("ways", "ddp", {"dp_replicate": 2, "tp": 2}, 1),
    ("piped", "ddp", {"dp_replicate": 2}, 1),
    ("tokens", "fsdp", {"cp": 2}, 2),
    ("experts", "fsdp", {"dp_shard": 2, "ep": 2}, 2),
]
DATA = {"ddp": {"dp_replicate": 2}, **{strategy: {"dp_shard": 2} for strategy in SHARDED}}
AXES = [("ways", {}), ("ways", {"tp": 2}), ("ways", {"pp": 2}), ("tokens", {"cp": 2}), ("experts", {"ep": 2})]
MORE = [
    *((model, strategy, data | axis, 1) for strategy, data in DATA.items() for model, axis in AXES),
    *(("repeated", strategy, data, 2) for strategy, data in DATA.items()),
    ("ways", "ddp", {"dp_replicate": 4}, 1),
    ("ways", "fsdp", {"dp_replicate": 2, "dp_shard": 2}, 1),
    ("piped", "fsdp", {"dp_shard": 2, "pp": 2}, 1),
    ("scales", "fsdp", {"dp_replicate": 2, "dp_shard": 2}, 1),
    ("scales", "zero1", {"dp_shard": 2}, 1),
    ("scales", "ddp", {"dp_replicate": 2, "tp": 2}, 1),
    ("tokens", "ddp", {"cp": 2}, 1),
    ("experts", "ddp", {"dp_replicate": 2, "ep": 2}, 2),
]


@cache
def reference(model: str) -> dict[str, Any]:
    return resident(1, partial(few_steps, MODELS[model], {}, microbatch=8, steps=STEPS))[0]


def hold(model: str, strategy: str, degrees: dict[str, int], microbatch: int) -> None:
    shape = MeshShape(**degrees)
    pipeline = PipelineShape() if shape.pp > 1 else None
    run = partial(
        few_steps,
        MODELS[model] | {"strategy": ALL[strategy]},
        degrees,
        microbatch=microbatch,
        steps=STEPS,
        pipeline=pipeline,
    )
    runs, expected = resident(shape.ranks, run), reference(model)
    result = joined(runs[:: shape.ranks // shape.pp]) if shape.pp > 1 else runs[0]
    assert max(abs(here - there) for here, there in zip(result["losses"], expected["losses"], strict=True)) < 2e-6
    for name, values in expected["weights"].items():
        assert torch.allclose(torch.tensor(result["weights"][name]), torch.tensor(values), atol=1e-5), name
    assert result["gradients"].keys() == expected["gradients"].keys(), "what no sample reached has no gradient"


@pytest.mark.often(
    "ways-ddp-degrees0-2", "ways-fsdp-*", "scales-zero2-*", "ways-zero1-*", "piped-*", "tokens-*", "experts-*"
)
@pytest.mark.parametrize(("model", "strategy", "degrees", "microbatch"), FAST)
def test_samples_that_take_different_ways_are_one_process(
    model: str, strategy: str, degrees: dict[str, int], microbatch: int
) -> None:
    """Nothing decays what no rank has reached; moments of what another rank reached go on here too."""
    hold(model, strategy, degrees, microbatch)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "degrees", "microbatch"), MORE)
def test_they_are_on_every_layout(model: str, strategy: str, degrees: dict[str, int], microbatch: int) -> None:
    hold(model, strategy, degrees, microbatch)


def asked(model: str, out: Path, words: str) -> Plan:
    fixed = "data=synthetic data.inputs=[4] data.outputs=3 data.samples=256 objective=classification batch=16 evaluate.every=4 logger=[] hook=[] resume=auto"
    return plan(f"model._target_=reaching.{model}", "trust=[reaching]", *fixed.split(), f"out={out}", *words.split())


def saved(out: Path) -> dict[str, torch.Tensor]:
    url, commit = commits.find(str(out))
    tensors = {
        name: torch.empty(facts["shape"], dtype=getattr(torch, facts["dtype"][6:]))
        for name, facts in commit["tensors"].items()
    }
    Reading(url, commit, tensors).verify()
    Reading(url, commit, tensors).fill()
    return tensors


def saved_whole_and_resumed(
    model: str, folder: Path, first: str, *thens: str
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """For each of `thens`: what a run of 8 steps saves, and what one saves that stops after 3 and goes on by these words in new processes."""
    whole, begun = (asked(model, folder / name, f"steps=8 {first}") for name in ("whole", "begun"))
    resident(whole.world, train, whole)
    resident(begun.world, train, replace(begun, stop_after=3))
    for number, then in enumerate(thens):
        shutil.copytree(folder / "begun", folder / str(number))
        ended = asked(model, folder / str(number), f"steps=8 {then}")
        ranks(ended.world, train, ended)
        yield saved(folder / "whole"), saved(folder / str(number))


def test_a_run_of_different_ways_goes_on_exactly_and_on_another_mesh(tmp_path: Path) -> None:
    sharded = "strategy=fsdp devices=2 microbatch=1"
    both = saved_whole_and_resumed("Ways", tmp_path, sharded, sharded, "devices=1")
    for (here, there), allowed in zip(both, (0.0, 2e-6), strict=True):
        assert here.keys() == there.keys()
        assert not any("spare" in name and name.startswith("optim.") for name in here)
        for name, value in here.items():
            assert torch.allclose(value.float(), there[name].float(), rtol=0, atol=allowed), name


STEADY = {
    "strategy=ddp devices=2": 1,
    "strategy=ddp devices=2 accumulate=2": 1,
    "strategy=fsdp devices=2": 1,
    "strategy=zero2 devices=2 accumulate=2": 1,
    "strategy=ddp devices=4 mesh.pp=2": 2,
}
"""Words -> all-reduces of a steady step, which are of gradients, and of a norm where gradients are split."""


@pytest.mark.parametrize("words", STEADY)
def test_a_steady_step_has_no_collective_beyond_the_gradients_and_the_norm(words: str) -> None:
    asked = plan(*f"model=gpt {words} batch=8 steps=4 log.every=4 logger=[] hook=[] evaluate.every=0".split())
    counted = count(asked)[0].items()
    assert sum(
        calls for seen, (calls, _) in counted if seen.kind in ("all_reduce", "broadcast") and seen.part in ("step", "guard")
    ) == STEADY[words]  # fmt: skip


# buffers

LAYOUTS = [
    "strategy=fsdp devices=2",
    "strategy=zero2 devices=2 accumulate=2",
    "strategy=ddp devices=2",
    "strategy=ddp devices=4 mesh.tp=2",
    "strategy=hsdp devices=4",
]


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_run_reports_what_its_checkpoint_gives(words: str, tmp_path: Path) -> None:
    """BatchNorm's statistics and a codebook, which every rank updates by its own samples."""
    run = asked("Statistics", tmp_path, f"{words} steps=8")
    reported = resident(run.world, train, run)[0].metrics
    assert resident(run.world, evaluate, run)[0].metrics == pytest.approx(reported, rel=1e-5)
    alone = asked("Statistics", tmp_path, "devices=1 steps=8")
    assert resident(1, evaluate, alone)[0].metrics == pytest.approx(reported, rel=1e-5)


def test_buffers_go_on_exactly(tmp_path: Path) -> None:
    sharded = "strategy=fsdp devices=2"
    ((here, there),) = saved_whole_and_resumed("Statistics", tmp_path, sharded, sharded)
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert torch.equal(value, there[name]), name


class Kept(torch.nn.Module):
    """A buffer of each kind that a forward may change, and in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("small", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("constant", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.assigned = x.detach().mean(0)
        self.small += 1 + x[0, 0].item()
        self.flags |= x[0] > 0
        self.scratch += x[0].detach()
        out: torch.Tensor = self.norm(x)
        return out


def made_alike(mesh: Mesh) -> dict[str, Any]:
    model = Kept()
    agreement = Agreement(model, mesh)
    for _ in range(2):
        agreement.begin()
        model(torch.tensor([[1.0, -1.0], [3.0, -3.0]]) * (1 - 2 * mesh.rank)).sum().backward()
        agreement.settle(mesh.sum(agreement.message([[]]).clone()))
    return {name: buffer.float().tolist() for name, buffer in model.named_buffers()}


def test_fractions_are_averaged_and_the_rest_is_that_of_the_first_rank() -> None:
    one, two = on_mesh(made_alike, dp_replicate=2)
    assert one.pop("scratch") == [2.0, -2.0], "what is not saved is each rank's own"
    assert two.pop("scratch") == [-2.0, 2.0]
    assert one == two
    assert one["norm.running_mean"] == [0.0, 0.0]
    assert (one["assigned"], one["small"], one["flags"], one["constant"]) == (
        [0.0, 0.0],
        [2.0, 2.0],
        [1.0, 0.0],
        [0.0, 0.0],
    )
    assert one["norm.num_batches_tracked"] == 2


class Later(torch.nn.Module):
    """Buffers that begin to change in the third forward, and count no version: a kernel writes them, or `.data` does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))
        self.register_buffer("table", torch.zeros(size))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))
        self.gain, self.forwards = torch.nn.Parameter(torch.ones(2)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards > 2:
            x = torch.nn.functional.batch_norm(x, self.mean, self.var, training=True)
            self.table.data[0] += x[0, 0].detach()
            self.seen.data += 1
        return x * self.gain


def begun_later(mesh: Mesh, size: int, steps: int) -> dict[str, Any]:
    model = Later(size)
    agreement = Agreement(model, mesh)
    for step in range(steps):
        agreement.begin()
        x = torch.tensor([[1.0, -1.0], [3.0, -3.0]]) * (1 + step) * (1 - 2 * mesh.rank) + mesh.rank
        model(x).sum().backward()
        agreement.settle(mesh.sum(agreement.message([[]]).clone()))
    return {name: buffer.double().sum().item() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(("size", "steps"), [(2, 3), (1 << 19, 9)], ids=["small", "large"])
def test_buffers_that_begin_to_change_later_in_silence_are_made_alike(size: int, steps: int) -> None:
    one, two = on_mesh(partial(begun_later, size=size, steps=steps), dp_replicate=2)
    assert one == two and one["mean"] != 0 and one["seen"] == 2 * (steps - 2)


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_a_block_that_is_computed_again_updates_its_buffers_once(remat: str) -> None:
    """And is computed from what they were, not from what they are by then."""

    recomputed = parts("Layered", remat={"_target_": f"dtrain.remat.{remat}.build"})
    assert resident(1, few_steps, recomputed, {}) == resident(1, few_steps, parts("Layered"), {})
