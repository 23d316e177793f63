"""blocks: every block is compiled, and the losses are those of what is written, on every mesh."""

import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, agree, few_steps, mesh_of, plan, small_gpt
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dtrain.build import build as make
from dtrain.build import locate
from dtrain.compile.blocks import build
from dtrain.data.stream import as_source
from dtrain.evaluation.heldout import evaluate
from dtrain.predict import formulas
from dtrain.predict.block_bytes import sizes_of

# torch's own compiler warns of what else of torch it uses
pytestmark = pytest.mark.filterwarnings("ignore")

COMPILED = {"_target_": "dtrain.compile.blocks.build", "mode": "default"}
MESHES: dict[str, tuple[Any, dict[str, int]]] = {
    "single": (PARTS["strategy"], {}),
    "ddp": (STRATEGIES["ddp"], {"dp_replicate": 2}),
    "fsdp": (STRATEGIES["fsdp"], {"dp_shard": 2}),
    "tp": (STRATEGIES["ddp"], {"tp": 2}),
}


REMAT = {"selective": ({}, 1), "budget": ({"share": 0.5}, 2)}
"""Arguments, and graphs: of `budget` one for blocks as under `none` and one for blocks as under `full`."""
BESIDE = 2
"""Graphs beside those of blocks: of the embedding's scale, and of the last norm."""
MOE = {
    "_target_": "dtrain.model.moe.MoE",
    "vocab": "auto",
    "layers": 2,
    "heads": 2,
    "width": 16,
    "hidden": 16,
    "experts": 4,
    "active": 2,
}
MODELS = {"gpt": PARTS["model"], "moe": MOE}


class Asking(nn.Module):
    """Remembers whether it was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.compiled = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        self.compiled = torch.compiler.is_compiling()
        out: Tensor = self.linear(x)
        return out


@pytest.mark.slow
def test_every_block_is_compiled_and_its_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def asked() -> list[Any]:
        model = nn.Sequential(Asking(), Asking())
        names = list(model.state_dict())
        build(mode="default")(model)
        model(torch.ones(1, 2)).sum().backward()
        return [block.compiled for block in model] + [list(model.state_dict()) == names]

    assert ranks(1, asked) == [[True, True, True]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "remat"), [*((mesh, None) for mesh in MESHES), ("fsdp", "full"), ("single", "selective")]
)
def test_the_losses_are_those_of_what_is_written(mesh: str, remat: str | None) -> None:
    strategy, degrees = MESHES[mesh]
    parts = (
        PARTS
        | {"strategy": strategy, "compile": COMPILED}
        | ({"remat": {"_target_": f"dtrain.remat.{remat}.build"}} if remat else {})
    )
    (reference,) = ranks(1, few_steps, PARTS, {})
    for run in ranks(max([1, *degrees.values()]), lambda: few_steps(parts, degrees), seconds=300):
        agree(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_what_is_recomputed_is_compiled_too(remat: str) -> None:
    def graphs() -> int:
        block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        locate(f"dtrain.remat.{remat}.build")()([block])
        build(mode="default")(nn.Sequential(block))
        counters.clear()
        block(torch.ones(1, 2)).sum().backward()
        return int(counters["stats"]["unique_graphs"])

    assert ranks(1, graphs, seconds=300) == [1]


@pytest.mark.often("single-gpt")
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("mesh", ["single", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ddp", "fsdp"))])
def test_blocks_are_one_graph_for_each_way_in_which_they_run(
    mesh: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves a block as it is written, and says nothing, where a graph that is computed twice sets an attribute, or is broken."""
    strategy, degrees = MESHES[mesh]
    # experts are counted in place, which the backward of a graph that is only run would find changed
    compile, backend = nn.Module.compile, "aot_eager" if model == "moe" else "eager"
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, mode: compile(module, backend=backend)
    )  # graphs are the same, kernels take a minute
    parts = PARTS | {"strategy": strategy, "model": MODELS[model], "compile": COMPILED}

    def graphs() -> dict[str, tuple[int, list[str]]]:
        compiled = {}
        for precision, (remat, (arguments, _)) in product(("fp32", "bf16"), REMAT.items()):
            torch._dynamo.reset()
            counters.clear()
            words = {"precision": {"_target_": f"dtrain.precision.{precision}.build"}}
            words |= {"remat": {"_target_": f"dtrain.remat.{remat}.build", **arguments}}
            few_steps(parts | words, degrees, steps=2)
            counted = int(counters["stats"]["unique_graphs"]), list(counters["graph_break"])
            compiled[f"{remat} {precision}"] = counted
        return compiled

    expected = {
        f"{remat} {precision}": (ways + BESIDE, [])
        for remat, (_, ways) in REMAT.items()
        for precision in ("fp32", "bf16")
    }
    for compiled in ranks(max([1, *degrees.values()]), graphs):
        assert compiled == expected


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_and_forwards_without_a_backward_are_marked_for_cuda_graphs_and_microbatches_are_not(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the gradients of a microbatch, and what a block hands to the next one, are overwritten by the next replay."""
    marks = list[str]()
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append("begin"))
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    if graphs:
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", ModuleType("cudagraph_trees"))

    def count() -> tuple[int, int]:
        few_steps(PARTS, {}, steps=3, microbatch=2)
        steps = len(marks)
        with mesh_of() as mesh:
            source, objective, precision = (make(PARTS[name]) for name in ("data", "objective", "precision"))
            evaluate(small_gpt(), as_source(source), objective, mesh, precision=precision, samples=8, microbatch=2)
        return steps, len(marks) - steps

    assert ranks(1, count) == [(3, 4) if graphs else (0, 0)]


def test_a_compiled_block_saves_what_its_plan_says() -> None:
    """Partitioned as inductor does it, without its kernels."""
    decided = plan(
        "data=synthetic",
        "objective=next_token",
        "data.vocab=64",
        "data.sequence=256",
        "model.width=64",
        "precision=bf16",
        "compile=blocks",
    )
    shapes = formulas.shapes(decided)
    assert shapes
    make(decided.compile)
    block = small_gpt(width=64, heads=4, hidden=192).blocks[0]
    block.compile(backend="aot_eager_decomp_partition")
    weights = {each.untyped_storage().data_ptr() for each in block.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        block(torch.randn(1, 256, 64, dtype=torch.bfloat16, requires_grad=True))
    counted = sum(size for place, size in kept.items() if place not in weights)
    listed = next(each for each in shapes.blocks if each.listed)
    sizes = next(each for each in sizes_of(decided, shapes, shapes.blocks) if each.count == listed.count)
    assert counted == pytest.approx(listed.saved["products"].of(decided) + sizes.weights.casts, rel=0.05)


@pytest.mark.parametrize("bucket_mb", [25, 0.05])
def test_ddp_leaves_the_graph_of_a_block_whole(bucket_mb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would cut it at a first bucket of 1 MiB, and fail where other buckets are smaller."""
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, mode: compile(module, backend="aot_eager"))
    wide = PARTS["model"] | {"width": 256, "hidden": 512}
    parts = PARTS | {"model": wide, "compile": COMPILED, "strategy": STRATEGIES["ddp"] | {"bucket_mb": bucket_mb}}

    def graphs() -> int:
        torch._dynamo.reset()
        counters.clear()
        few_steps(parts, {"dp_replicate": 2}, steps=1)
        return int(counters["aot_autograd"]["total"])

    assert ranks(2, graphs) == [1 + BESIDE] * 2
