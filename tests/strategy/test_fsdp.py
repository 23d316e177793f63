"""fsdp: the numbers of one process, each rank with its part of the weights, gradients that cross ranks once per step."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, UNEVEN, Collectives, agree, few_steps, on_resident_mesh, tokens
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import blocks, construct
from dtrain.parallel.order import parallelize
from dtrain.strategy.fsdp import FSDP

FSDP_PARTS = PARTS | {"strategy": STRATEGIES["fsdp"]}


@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_two_ranks_are_one_process(data: dict[str, Any]) -> None:
    (reference,) = resident(1, partial(few_steps, PARTS | {"data": data}, {}, microbatch=8))
    for reshard, reduce, microbatch in (("forward", "last", 4), ("forward", "every", 1), ("never", "last", 2)):
        parts = FSDP_PARTS | {"data": data, "strategy": STRATEGIES["fsdp"] | {"reshard": reshard, "reduce": reduce}}
        for rank in resident(2, partial(few_steps, parts, {"dp_shard": 2}, microbatch=microbatch)):
            agree(rank, reference)


def test_one_rank_may_be_sharded_too() -> None:
    (reference,), (run,) = resident(1, few_steps, PARTS, {}), resident(1, few_steps, FSDP_PARTS, {"dp_shard": 1})
    agree(run, reference)


@pytest.mark.parametrize(
    "model",
    [
        {"_target_": "dtrain.model.mlp.MLP", "inputs": "auto", "outputs": "auto", "width": 5, "layers": 2},
        {"_target_": "dtrain.model.cnn.CNN", "inputs": "auto", "outputs": "auto", "width": 3, "stages": 2, "blocks": 1},
    ],
    ids=["mlp", "cnn"],
)
def test_every_model_of_the_house_is_the_same_on_shards(model: dict[str, Any]) -> None:
    """Widths that do not divide by two, so that some shards are smaller or empty."""
    objective = "classification.Classification" if "cnn" in model["_target_"] else "regression.Regression"
    data = PARTS["data"] | {"task": objective.split(".")[0], "inputs": [1, 6, 6]}
    parts = PARTS | {"model": model, "data": data, "objective": {"_target_": f"dtrain.objective.{objective}"}}
    (reference,) = resident(1, few_steps, parts, {})
    agree(resident(2, few_steps, parts | {"strategy": STRATEGIES["fsdp"]}, {"dp_shard": 2})[0], reference)


def sharded(mesh: Mesh, *, tied: bool = True, **changed: Any) -> tuple[torch.nn.Module, FSDP]:
    strategy = FSDP(**{"reshard": "forward", "offload": "none"} | changed)
    model = construct(PARTS["model"] | {"vocab": 16, "tied": tied}, facts={}, seed=0)
    return parallelize(model, mesh, strategy, precision=build(PARTS["precision"]), seed=0), strategy


def held_elements(mesh: Mesh) -> tuple[int, int, bool]:
    model, _ = sharded(mesh)
    optimizer = build(
        {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        model=model,
    )
    model(tokens(2, 8)).square().sum().backward()
    optimizer.step()
    here = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    moments = sum(
        v.to_local().numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, DTensor)
    )
    return here, moments, model.head.weight is model.embed.weight


def test_a_rank_holds_its_part_of_weights_and_optimizer_state() -> None:
    whole = sum(p.numel() for p in construct(PARTS["model"] | {"vocab": 16}, facts={}, seed=0).parameters())
    for weights, moments, tied in on_resident_mesh(held_elements, dp_shard=2):
        assert weights == whole / 2
        assert moments == whole
        assert tied, "a tied weight stays one"


def collectives_per_microbatch(mesh: Mesh, **changed: Any) -> list[list[str]]:
    model, strategy = sharded(mesh, **changed)
    called = []
    for number in range(3):
        with Collectives() as seen, strategy.sync(model, number == 2):
            model(tokens(2, 8, seed=mesh.rank)).square().sum().backward()
        called.append(seen.names)
    return called


def test_gradients_cross_ranks_in_the_last_microbatch_alone() -> None:
    for called in on_resident_mesh(collectives_per_microbatch, dp_shard=2):
        reduced = [sum("reduce_scatter" in name for name in names) for names in called]
        assert reduced == [0, 0, 3], "one for each block and one for the root"


@pytest.mark.parametrize(("reshard", "gathers"), [("forward", [4, 4, 4]), ("never", [3, 0, 0])])
def test_what_is_gathered_is_freed_or_kept_through_the_step(reshard: str, gathers: list[int]) -> None:
    """Two blocks and the root; blocks but the last once more for the backward, in every microbatch."""
    for called in on_resident_mesh(partial(collectives_per_microbatch, reshard=reshard), dp_shard=2):
        assert [sum("gather" in name for name in names) for names in called] == gathers


def test_gradients_cross_ranks_in_every_microbatch_where_asked() -> None:
    for called in on_resident_mesh(partial(collectives_per_microbatch, reduce="every"), dp_shard=2):
        assert [sum("reduce_scatter" in name for name in names) for names in called] == [3, 3, 3]


def reduced_early(mesh: Mesh) -> set[str]:
    """Which weights have a gradient on their shard before the backward of the last block to run."""
    model, strategy = sharded(mesh, tied=False)
    there: set[str] = set()

    def look(*_: Any) -> None:
        there.update(
            name for name, weight in model.named_parameters() if isinstance(weight, DTensor) and weight.grad is not None
        )

    for block in blocks(model):
        block.register_full_backward_pre_hook(look)
    with Collectives() as seen, strategy.sync(model, True):
        model(tokens(2, 8, seed=mesh.rank)).square().sum().backward()
    assert sum("reduce_scatter" in name for name in seen.names) == 4, "the head, two blocks, the root"
    early = set(there)
    look()
    assert {"head.weight", "embed.weight", "norm.weight"} <= there
    return early


def test_the_head_is_reduced_while_the_blocks_go_on_and_not_with_the_root() -> None:
    for early in on_resident_mesh(reduced_early, dp_shard=2):
        assert "head.weight" in early
        assert not {"embed.weight", "norm.weight"} & early


def test_the_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Identity()])
    model = torch.nn.ModuleDict(
        {
            "deep": torch.nn.ModuleDict({"list": inner}),
            "flat": torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2))),
        }
    )
    assert [type(block).__name__ for block in blocks(model)] == ["Linear", "Sequential"]


class Odd(torch.nn.Module):
    """One layer twice, and containers that cannot be called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.again = torch.nn.ModuleList([self.first, torch.nn.Linear(4, 4), self.first])
        self.once_more = torch.nn.ModuleList([self.again[1]])
        self.pairs = torch.nn.ModuleList(
            [torch.nn.ModuleDict({"a": torch.nn.Linear(4, 3)}), torch.nn.ModuleList([torch.nn.Linear(3, 3)])]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.again, *self.once_more):
            x = torch.tanh(layer(x))
        logits: torch.Tensor = self.pairs[1][0](self.pairs[0]["a"](x))
        return logits


def test_layers_that_come_twice_and_containers_are_no_trouble() -> None:
    parts = PARTS | {"model": {"_target_": f"{__name__}.Odd"}, "data": PARTS["data"] | {"task": "classification"}}
    parts |= {"objective": {"_target_": "dtrain.objective.classification.Classification"}}
    (reference,) = resident(1, few_steps, parts, {})
    agree(resident(2, few_steps, parts | {"strategy": STRATEGIES["fsdp"]}, {"dp_shard": 2})[0], reference)


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(WordsError, match=r"strategy\.reshard=always: allowed are forward and never"):
        FSDP(reshard="always", offload="none")
    with pytest.raises(WordsError, match=r"strategy\.offload=disk: allowed are none and cpu"):
        FSDP(reshard="forward", offload="disk")  # type: ignore[arg-type]
    with pytest.raises(WordsError, match=r"strategy\.reduce=never: allowed are last and every"):
        FSDP(reshard="forward", offload="none", reduce="never")  # type: ignore[arg-type]
