"""A mixture of experts: it is the sum a naive loop computes, drops nothing, and its bias moves towards equal loads."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import tokens
from torch import Tensor

from dtrain.model import balance
from dtrain.model.moe import Mixture, MoE, by_expert, one_by_one

EXPERTS, ACTIVE, WIDTH = 5, 2, 8


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(module: torch.nn.Module) -> Any:
    """So that no output is zero and no two scores are near each other."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator(parameter.numel()))
    return module


def mixture(**changed: Any) -> Mixture:
    return filled(
        Mixture(
            **{"width": WIDTH, "hidden": 12, "experts": EXPERTS, "active": ACTIVE, "shared": 0, "rate": 0.1} | changed
        )
    )


def small_moe(**changed: Any) -> MoE:
    arguments = {
        "vocab": 13,
        "layers": 2,
        "heads": 2,
        "width": WIDTH,
        "hidden": 12,
        "experts": EXPERTS,
        "active": ACTIVE,
    }
    return filled(MoE(**arguments | changed))


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=generator(), requires_grad=True)


def naive(layer: Mixture, x_BTC: Tensor) -> Tensor:
    """Every expert on every token, and zero weight for those that were not chosen; written from the papers."""
    scores = torch.sigmoid(x_BTC @ layer.router.weight.T)
    out = torch.zeros_like(x_BTC) if layer.shared is None else layer.shared(x_BTC)
    biased = scores + layer.bias
    chosen = biased >= biased.sort(dim=-1, descending=True).values[..., layer.active - 1 : layer.active]
    weights = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
    for index, (gate, up, down) in enumerate(
        zip(layer.experts.gate, layer.experts.up, layer.experts.down, strict=True)
    ):
        out = out + weights[..., index : index + 1] * ((F.silu(x_BTC @ gate.T) * (x_BTC @ up.T)) @ down.T)
    return out


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("active", [1, 2, 3, EXPERTS])
def test_it_is_the_weighted_sum_over_the_chosen_experts(active: int, shared: int) -> None:
    layer = mixture(active=active, shared=shared)
    layer.bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
    x, again = states(3, 7), states(3, 7)
    output, expected = layer(x), naive(layer, again)
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-6)
    weights = list(layer.parameters())
    gradients = torch.autograd.grad(expected.square().sum(), [again, *weights])
    for mine, theirs in zip(torch.autograd.grad(output.square().sum(), [x, *weights]), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6 * max(1.0, theirs.abs().max().item()))


def test_the_bias_decides_who_is_chosen_and_has_no_part_in_the_weights() -> None:
    layer, x = mixture(), states(20)
    layer.bias[3] = 10.0
    weights, chosen = layer.route(x)
    assert (chosen == 3).sum(-1).eq(1).all(), "an expert of large bias is always chosen"
    torch.testing.assert_close(weights.sum(-1), torch.ones(20))
    scores = torch.sigmoid(x @ layer.router.weight.T).gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    assert not layer.bias.requires_grad


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    layer = mixture()
    layer.bias[:2] = 10.0
    layer(states(2, 6)).square().sum().backward()
    for weight in layer.experts.parameters():
        assert weight.grad is not None
        assert (weight.grad.flatten(1).abs().sum(1) > 0).tolist() == [True, True, False, False, False]


def test_a_later_token_never_changes_an_earlier_output() -> None:
    model, seen = small_moe(), tokens(3, 10)
    before = model(seen)
    for position in range(1, 10):
        other = seen.clone()
        other[:, position] = (other[:, position] + 1) % 13
        assert torch.allclose(model(other)[:, :position], before[:, :position], atol=1e-6)


def test_a_sample_does_not_see_the_others_of_its_batch() -> None:
    """No capacity, hence nothing dropped because others came first."""
    model, seen = small_moe(), tokens(4, 6)
    assert torch.allclose(model(seen)[2:3], model(seen[2:3]), atol=1e-6)


def test_load_counts_the_rows_of_training_forwards() -> None:
    layer = mixture()
    layer.eval()(states(4, 5))
    assert not layer.load.any()
    for _ in range(2):
        layer.train()(states(4, 5))
    expected = layer.route(states(4, 5).flatten(0, 1))[1].flatten().bincount(minlength=EXPERTS)
    assert torch.equal(layer.load, 2 * expected)
    assert "load" not in layer.state_dict(), "every rank counts its own"


@pytest.mark.parametrize("times", [1, 2])
def test_the_bias_of_busy_experts_goes_down_and_of_idle_ones_up(times: int) -> None:
    """Counting everything twice, as when activations are computed again for the backward, changes nothing."""
    layers, asked = [mixture(), mixture()], []
    layers[0].load.copy_(times * torch.tensor([1, 2, 3, 4, 0]))
    others = times * torch.tensor([4, 4, 4, 0, 3, 0, 0, 0, 0, 5])

    def sum_over_batch(loads: Tensor) -> Tensor:
        asked.append(loads.tolist())
        return loads + others

    for _ in range(2):
        balance(layers, sum_over_batch)
    idle = [0] * EXPERTS
    assert asked == [[times * count for count in (1, 2, 3, 4, 0)] + idle, 2 * idle], (
        "all layers at once, and the count began anew"
    )
    torch.testing.assert_close(layers[0].bias, torch.tensor([-0.1, -0.2, -0.2, 0.2, 0.1]))
    torch.testing.assert_close(layers[1].bias, torch.tensor([0.2, 0.2, 0.2, 0.2, -0.2]))


def test_balancing_makes_loads_equal() -> None:
    layer, x = mixture(rate=0.01), states(64, 8)
    layer.bias[0] = 0.3

    def spread() -> float:
        layer(x)
        return (layer.load.max() / layer.load.float().mean()).item()

    before = spread()
    for _ in range(60):
        layer.balance(layer.load.clone())
        after = spread()
    assert before > 1.5 and after < 1.1


def test_under_autocast_experts_are_multiplied_in_bf16_and_routed_in_fp32() -> None:
    layer = mixture(width=16, hidden=24, shared=1)
    x = torch.randn(3, 7, 16, generator=generator())
    expected, (_, chosen) = layer(x), layer.route(x.flatten(0, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
        weights, again = layer.route(x.flatten(0, 1))
    assert output.dtype == torch.bfloat16 and weights.dtype == torch.float32
    assert torch.equal(again, chosen)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=3e-2 * expected.abs().max().item())
    output.float().square().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.isfinite().all()
        for weight in layer.parameters()
    )


@pytest.mark.parametrize("load", [[3, 0, 5], [0, 0, 8], [2, 6, 0]])
def test_grouped_products_are_the_products_one_by_one(load: list[int]) -> None:
    x = torch.randn(8, 16, generator=generator()).bfloat16().requires_grad_()
    weight = torch.randn(3, 24, 16, generator=generator()).bfloat16().requires_grad_()
    expected = torch.cat([rows @ one.T for rows, one in zip(x.split(load), weight, strict=True)])
    output = by_expert(x, torch.tensor(load), weight)(x, weight)
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
    upstream = torch.randn(8, 24, generator=generator()).bfloat16()
    for mine, theirs in zip(
        torch.autograd.grad(output, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=5e-2)


@pytest.mark.often("load0")
@pytest.mark.parametrize("load", [[3, 0, 5], [0, 0, 8], [2, 6, 0]])
def test_products_inside_of_a_graph_are_those_outside_bit_for_bit(load: list[int]) -> None:
    x, upstream = (torch.randn(8, width, generator=generator()) for width in (9, 5))
    weight = torch.randn(3, 5, 9, generator=generator()).requires_grad_()
    x.requires_grad_()
    expected, output = by_expert(x, torch.tensor(load), weight)(x, weight), one_by_one(x, torch.tensor(load), weight)
    assert torch.equal(output, expected)
    for mine, theirs in zip(
        torch.autograd.grad(output, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    torch.library.opcheck(one_by_one, (x, torch.tensor(load), weight))


def test_the_bias_has_values_on_meta_and_is_in_the_checkpoint() -> None:
    with torch.device("meta"):
        model = MoE(vocab=13, layers=1, heads=2, width=WIDTH, hidden=12, experts=EXPERTS, active=ACTIVE)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model.blocks[0].feed_forward.bias, torch.zeros(EXPERTS))
    assert "blocks.0.feed_forward.bias" in model.state_dict()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_number_of_weights_follows_the_formula(shared: int, tied: bool) -> None:
    vocab, layers, width, hidden = 101, 3, 32, 48
    model = MoE(
        vocab=vocab,
        layers=layers,
        heads=4,
        kv_heads=2,
        width=width,
        hidden=hidden,
        experts=6,
        active=2,
        shared=shared,
        tied=tied,
    )
    block = 3 * width * width + 3 * width * hidden * (6 + shared) + 6 * width + 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == layers * block + width + vocab * width * (
        1 if tied else 2
    )


def test_a_token_costs_what_it_costs_in_a_gpt() -> None:
    layer = MoE(vocab=5, layers=1, heads=2, width=768, experts=4, active=3, shared=1).blocks[0].feed_forward
    assert (layer.active + 1) * layer.experts.up.shape[1] == 2048


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"active": 6}, "active"), ({"active": 0}, "active"), ({"experts": 0}, "experts"), ({"shared": -1}, "shared"), ({"heads": 3}, "heads"),
     ({"kv_heads": 3}, "heads"), ({"layers": 0}, "layers")],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_key(changed: dict[str, int], key: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{key}"):
        small_moe(**changed)


def test_every_parameter_is_filled_and_the_first_loss_is_that_of_guessing() -> None:
    model = MoE(vocab=64, layers=2, heads=2, width=32, experts=4, active=2, shared=1)
    for name, parameter in model.named_parameters():
        whole = torch.full(parameter.shape, float("nan"))
        model.init_weight(name, whole, generator(len(name)))
        assert torch.isfinite(whole).all(), name
        if name.endswith(("experts.gate", "experts.up")):
            assert whole.std().item() == pytest.approx(32**-0.5, rel=0.05)
        with torch.no_grad():
            parameter.copy_(whole)
    logits = model(tokens(4, 32, vocab=64))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(4, 32, vocab=64, seed=1).flatten())
    assert loss.item() == pytest.approx(torch.log(torch.tensor(64.0)).item(), abs=0.1)


def test_every_weight_has_a_gradient() -> None:
    model = small_moe(tied=False, shared=1)
    model(tokens(4, 8)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("shared", [0, 1])
def test_the_table_of_tensor_parallelism_names_modules_that_are_there(shared: int) -> None:
    model = small_moe(shared=shared)
    for name in model.tp_plan:
        model.get_submodule(name.replace("*", "0"))
    assert ("blocks.*.feed_forward.shared.up" in model.tp_plan) == bool(shared)
