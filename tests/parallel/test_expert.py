"""Expert parallelism: the outputs and gradients of one rank, wherever the experts lie and however unevenly tokens ask for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import resident
from small import mesh_of, tokens
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import balance
from dtrain.model.mlp import MLP
from dtrain.model.moe import Experts, MoE
from dtrain.model.seeds import fill
from dtrain.parallel import expert
from dtrain.parallel.order import materialize
from dtrain.planned import MeshShape

EXPERTS = 4
SAMPLES = 4


def on_experts(work: Callable[..., Any], *arguments: Any, **degrees: int) -> list[Any]:
    """`work(mesh, *arguments)` on every rank; `ep` makes no ranks of its own."""

    return resident(MeshShape(**degrees).ranks, _rank, work, arguments, degrees)


def _rank(work: Callable[..., Any], arguments: tuple[Any, ...], degrees: dict[str, int]) -> Any:
    with mesh_of(**degrees) as mesh:
        return work(mesh, *arguments)


def model_on(mesh: Mesh, **changed: Any) -> MoE:
    """Built on meta, split, then filled; so that no output is zero."""
    arguments = {
        "vocab": 13,
        "layers": 2,
        "heads": 2,
        "width": 8,
        "hidden": 12,
        "experts": EXPERTS,
        "active": 2,
        "shared": 1,
    }
    with torch.device("meta"):
        model = MoE(**arguments | changed)
    expert.apply(model, mesh)
    materialize(model, mesh.device)
    model.init_weight = lambda name, weight, generator: weight.normal_(std=0.3, generator=generator)  # type: ignore[method-assign]
    fill(model, 7)
    return model


def passed(mesh: Mesh, favourites: tuple[int, ...] = (), autocast: bool = False) -> dict[str, Any]:
    """Logits of this rank's samples, gradients of the sum over the batch, bias after `balance`, and which part of the experts is here."""
    model = model_on(mesh, width=16, hidden=24) if autocast else model_on(mesh)
    mixtures = [block.feed_forward for block in model.blocks]
    for mixture in mixtures:
        mixture.bias[list(favourites)] = 10.0
    share = tokens(SAMPLES, 6).chunk(mesh.data_ranks)[mesh.data_rank]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(share)
    loads = torch.stack([mixture.load for mixture in mixtures]).clone()
    logits.float().square().mul(0.01).sum().backward()
    balance(mixtures, mesh.sum)
    return {
        "logits": logits.detach().float(),
        "gradients": {name: summed(parameter, mesh) for name, parameter in model.named_parameters()},
        "bias": torch.stack([mixture.bias for mixture in mixtures]),
        "loads": loads,
        "held": mixtures[0].experts.gate.to_local().shape if mesh.shape.ep > 1 else None,
    }


def summed(parameter: torch.nn.Parameter, mesh: Mesh) -> Tensor:
    """The whole gradient. That of an expert already is a sum over the rows of all ranks of `ep`; strategies see to the others."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        dist.all_reduce(gradient)
        return gradient
    assert gradient.placements == (Shard(0),)
    dist.all_reduce(gradient.to_local(), group=mesh.axis("expert_shard", view="experts").get_group())
    return gradient.full_tensor()


def agree(run: list[dict[str, Any]], reference: dict[str, Any], tolerance: float = 2e-6) -> None:
    logits = reference["logits"]
    torch.testing.assert_close(
        torch.cat([rank["logits"] for rank in run]), logits, rtol=0, atol=tolerance * logits.abs().max().item()
    )
    for rank in run:
        assert torch.equal(rank["bias"], reference["bias"])
        for name, expected in reference["gradients"].items():
            limit = tolerance * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(
                rank["gradients"][name], expected, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 4), (4, 2)])
def test_experts_on_several_ranks_are_those_of_one(world: int, ep: int) -> None:
    (reference,) = on_experts(passed, dp_shard=1)
    run = on_experts(passed, dp_shard=world, ep=ep)
    agree(run, reference)
    assert [list(rank["held"]) for rank in run] == [[EXPERTS // ep, 12, 8]] * world, "each rank holds its part"
    loads = torch.stack([rank["loads"] for rank in run])
    assert torch.equal(loads.sum(0), reference["loads"])
    assert len(loads.sum(-1).unique()) == 1 and len(loads[:, 0].unique()) > 1, "ranks ask for as many rows, unevenly"


def test_a_rank_whose_experts_nobody_asks_for() -> None:
    """It answers all the same, and its experts have a gradient of zero."""
    (reference,) = on_experts(passed, (0, 1), dp_shard=1)
    run = on_experts(passed, (0, 1), dp_shard=2, ep=2)
    agree(run, reference)
    assert run[1]["loads"][:, 2:].eq(0).all()
    assert run[1]["gradients"]["blocks.0.feed_forward.experts.up"][2:].eq(0).all()


def test_rows_travel_in_bf16_under_autocast() -> None:
    """Sizes that grouped products take; also on the rank that gets no rows."""
    for favourites in ((), (0, 1)):
        (reference,) = on_experts(passed, favourites, True, dp_shard=1)
        agree(on_experts(passed, favourites, True, dp_shard=2, ep=2), reference, 2e-2)


def recomputed(mesh: Mesh) -> tuple[list[Tensor], list[Tensor]]:
    model, share = model_on(mesh), tokens(SAMPLES, 6).chunk(mesh.data_ranks)[mesh.data_rank]
    runs = []
    for again in (False, True):
        x = model.embed(share)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        runs.append(torch.autograd.grad(x.square().sum(), list(model.blocks.parameters())))
    return tuple(
        [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in run] for run in runs
    )  # type: ignore[return-value]


def test_rows_travel_again_when_activations_are_recomputed() -> None:
    for kept, again in on_experts(recomputed, dp_shard=2, ep=2):
        for mine, theirs in zip(again, kept, strict=True):
            assert torch.equal(mine, theirs)


def part_of_values(mesh: Mesh) -> tuple[Tensor, Tensor, bool]:
    torch.manual_seed(0)
    experts = Experts(EXPERTS, 8, 12)
    before = experts.up.detach().clone()
    experts.down.requires_grad_(False)
    expert.apply(torch.nn.ModuleList([experts]), mesh)
    return (
        before.chunk(mesh.shape.ep)[mesh.rank % mesh.shape.ep],
        experts.up.to_local().detach(),
        experts.down.requires_grad,
    )  # type: ignore[attr-defined]


def test_a_model_that_has_values_keeps_its_part_of_them() -> None:
    for expected, values, trained in on_experts(part_of_values, dp_shard=2, ep=2):
        assert torch.equal(values, expected)
        assert not trained, "what was frozen stays so"


def refused(mesh: Mesh) -> str:
    with pytest.raises(WordsError) as error:
        expert.apply(Experts(3, 8, 12), mesh)
    return str(error.value)


def test_experts_that_do_not_divide_are_refused_by_name() -> None:
    for sentence in on_experts(refused, dp_shard=2, ep=2):
        assert "model.experts=3" in sentence and "mesh.ep=2" in sentence


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(WordsError, match="MLP holds no experts"):
        expert.check(MLP(inputs=2, outputs=1, width=2, layers=1), 2)
