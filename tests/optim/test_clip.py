"""One clip for every mesh, equal to torch's own on one process."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import ranks
from pretended import Pretended
from small import PARTS, STRATEGIES, Collectives, mesh_of, on_resident_mesh
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.optim.clip import clip
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape


def model_with_gradients(size: float = 1.0) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return model


@pytest.mark.parametrize("bound", [0.1, 1.0, 1e9])
def test_it_is_the_clip_of_torch(bound: float) -> None:
    mine, theirs = model_with_gradients(), model_with_gradients()
    norm = clip(list(mine.parameters()), bound)
    assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), bound))
    assert all(torch.allclose(a.grad, b.grad) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_without_a_bound_the_norm_is_told_and_nothing_changes() -> None:
    mine, before = model_with_gradients(), model_with_gradients()
    assert clip(list(mine.parameters()), None) > 1
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("bound", [None, 0.5, 1e9])
def test_scaled_gradients_come_back_to_their_size(bound: float | None) -> None:
    plain, scaled = model_with_gradients(), model_with_gradients(1024.0)
    norms = clip(list(plain.parameters()), bound), clip(list(scaled.parameters()), bound, scale=1024.0)
    assert torch.allclose(*norms)
    assert all(torch.allclose(a.grad, b.grad) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


def test_parameters_without_gradients_are_passed_over() -> None:
    model = model_with_gradients()
    model[0].weight.grad = None
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert torch.allclose(clip(list(model.parameters()), 1.0), expected)
    assert clip([torch.nn.Parameter(torch.ones(2))], 1.0) == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_no_number_shows_in_the_norm(bad: float) -> None:
    model = model_with_gradients()
    model[0].weight.grad[0, 0] = bad
    assert not torch.isfinite(clip(list(model.parameters()), 1.0))


GPT = PARTS["model"] | {"tied": False}
MIXTURE = {
    "_target_": "dtrain.model.moe.MoE",
    "vocab": 13,
    "layers": 1,
    "heads": 2,
    "width": 8,
    "hidden": 12,
    "experts": 4,
    "active": 2,
    "shared": 1,
}


def clipped(mesh: Mesh, model: dict[str, Any], strategy: str, scale: float) -> tuple[float, dict[str, torch.Tensor]]:
    made = construct(model, facts={"vocab": 13}, seed=0)
    chosen = build(STRATEGIES.get(strategy, PARTS["strategy"]))
    parallelize(made, mesh, chosen, precision=build(PARTS["precision"]), seed=0, pipeline=PipelineShape())
    for parameter in made.parameters():
        parameter.grad = parameter.detach() * 3 * scale
    norm = clip(list(made.parameters()), 1.0, scale=scale, stages=mesh.shape.pp)
    return norm.item(), {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in made.named_parameters()
    }  # type: ignore[union-attr]


@pytest.mark.often(
    "ddp-{'tp': 2}", "fsdp-{'pp': 2, 'dp_shard': 2}", "fsdp-{'dp_shard': 2, 'tp': 2}", "fsdp-{'dp_shard': 2, 'ep': 2}"
)
@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("fsdp", {"dp_shard": 2}),
        ("fsdp", {"dp_replicate": 2, "dp_shard": 2}),
        ("ddp", {"tp": 2}),
        ("ddp", {"pp": 2}),
        ("ddp", {"dp_replicate": 2, "tp": 2}),
        ("fsdp", {"pp": 2, "dp_shard": 2}),
        ("fsdp", {"dp_shard": 2, "tp": 2}),
        ("fsdp", {"dp_shard": 2, "ep": 2}),
        ("ddp", {"dp_replicate": 4, "ep": 2}),
    ],
    ids=str,
)
def test_pieces_have_the_norm_of_the_whole(strategy: str, degrees: dict[str, int]) -> None:
    """Copies must not count twice: of hybrid shards, of norms beside split matrices, of experts; and stages add up."""
    model = MIXTURE if "ep" in degrees else GPT
    ((norm, gradients),) = on_resident_mesh(partial(clipped, model=model, strategy="single", scale=1.0), dp_shard=1)
    seen = set()
    for found, theirs in on_resident_mesh(partial(clipped, model=model, strategy=strategy, scale=4.0), **degrees):
        assert found == pytest.approx(norm, rel=1e-6)
        for name, gradient in theirs.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-9)
        seen |= set(theirs)
    assert seen == set(gradients)


def beside(mesh: Mesh, strategy: str) -> tuple[float, float, list[str]]:
    made = construct(GPT, facts={"vocab": 13}, seed=0)
    parallelize(
        made, mesh, build(STRATEGIES[strategy]), precision=build(PARTS["precision"]), seed=0, pipeline=PipelineShape()
    )
    for parameter in made.parameters():
        parameter.grad = parameter.detach() * 3
    number = torch.tensor(2.0 + mesh.rank)
    with Collectives() as called:
        norm = clip(list(made.parameters()), 1.0, beside=number)
    return norm.item(), number.item(), called.names


@pytest.mark.parametrize(("strategy", "degrees"), [("fsdp", {"dp_shard": 2}), ("ddp", {"dp_replicate": 2})])
def test_a_number_that_travels_beside_is_summed_over_the_ranks(strategy: str, degrees: dict[str, int]) -> None:
    ((norm, _),) = on_resident_mesh(partial(clipped, model=GPT, strategy="single", scale=1.0), dp_shard=1)
    for found, total, collectives in on_resident_mesh(partial(beside, strategy=strategy), **degrees):
        assert found == pytest.approx(norm, rel=1e-6)
        assert total == 5.0 and collectives == ["allreduce_"], "with the norm, in one"


def test_gradients_of_every_type_are_bounded_together() -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3 + 4j if parameter.is_complex() else 5)
    norm = clip(parameters, 1.0)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx((12 * 25) ** 0.5)
    total = sum(
        float(parameter.grad.abs().double().square().sum()) for parameter in parameters if parameter.grad is not None
    )
    assert total == pytest.approx(1, rel=1e-2), "bfloat16 has three digits"


def test_a_sparse_gradient_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    torch.nn.functional.embedding(torch.tensor([1]), parameter, sparse=True).sum().backward()
    with pytest.raises(WordsError, match=r"a parameter \[4, 2\] is sparse"):
        clip([parameter], 1.0)


def test_the_loss_beside_the_norm_of_gradients_that_rest_on_the_cpu_stays_on_its_device() -> None:
    def work() -> tuple[str, float, float]:
        with mesh_of(pp=2):
            loss = Pretended(torch.tensor(3.0))
            norm = clip(list(model_with_gradients().parameters()), None, stages=2, beside=loss)
            return loss.device.type, float(loss.held), float(norm)

    alone = float(clip(list(model_with_gradients().parameters()), None))
    assert [(device, loss, pytest.approx(norm)) for device, loss, norm in ranks(2, work)] == [
        ("pretended", 6.0, 2**0.5 * alone)
    ] * 2
