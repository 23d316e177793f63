"""blocks: every block is compiled, and the losses are those of what is written, on every mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, agree, few_steps, small_gpt, tokens
from torch import Tensor, nn
from torch._dynamo.utils import counters

from dtrain.build import locate
from dtrain.compile.blocks import build

# torch's own compiler warns of what else of torch it uses
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

COMPILED = {"_target_": "dtrain.compile.blocks.build", "mode": "default"}
MESHES: dict[str, tuple[Any, dict[str, int]]] = {
    "single": (PARTS["strategy"], {}),
    "ddp": (STRATEGIES["ddp"], {"dp_replicate": 2}),
    "fsdp": (STRATEGIES["fsdp"], {"dp_shard": 2}),
    "tp": (STRATEGIES["ddp"], {"tp": 2}),
}


class Asking(nn.Module):
    """Remembers whether it was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.compiled = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        self.compiled = torch.compiler.is_compiling()
        out: Tensor = self.linear(x)
        return out


def test_every_block_is_compiled_and_its_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def asked() -> list[Any]:
        model = nn.Sequential(Asking(), Asking())
        names = list(model.state_dict())
        build(mode="default")(list(model))
        model(torch.ones(1, 2)).sum().backward()
        return [block.compiled for block in model] + [list(model.state_dict()) == names]

    assert ranks(1, asked) == [[True, True, True]]


@pytest.mark.parametrize(("mesh", "remat"), [*((mesh, None) for mesh in MESHES), ("fsdp", "full"), ("single", "selective")])
def test_the_losses_are_those_of_what_is_written(mesh: str, remat: str | None) -> None:
    strategy, degrees = MESHES[mesh]
    parts = PARTS | {"strategy": strategy, "compile": COMPILED} | ({"remat": {"_target_": f"dtrain.remat.{remat}.build"}} if remat else {})
    (reference,) = ranks(1, few_steps, PARTS, {})
    for run in ranks(max([1, *degrees.values()]), lambda: few_steps(parts, degrees), seconds=300):
        agree(run, reference)


@pytest.mark.parametrize("remat", ["full", "selective"])
def test_what_is_recomputed_is_compiled_too(remat: str) -> None:
    def graphs() -> int:
        block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        locate(f"dtrain.remat.{remat}.build")()([block])
        build(mode="default")([block])
        counters.clear()
        block(torch.ones(1, 2)).sum().backward()
        return int(counters["stats"]["unique_graphs"])

    assert ranks(1, graphs, seconds=300) == [1]


@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_blocks_of_the_house_are_one_graph_whether_or_not_they_are_recomputed(remat: str) -> None:
    """One for all of them, without a break: torch leaves a block as it is written, and says nothing, where a graph that is computed twice changes something."""

    def graphs() -> tuple[int, list[str]]:
        model = small_gpt(layers=4)
        locate(f"dtrain.remat.{remat}.build")()(list(model.blocks))
        build(mode="default")(list(model.blocks))
        counters.clear()
        for _ in range(2):
            model(tokens(2, 8)).sum().backward()
        return int(counters["stats"]["unique_graphs"]), list(counters["graph_break"])

    assert ranks(1, graphs, seconds=300) == [(1, [])]
