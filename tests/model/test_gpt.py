"""A causal transformer: what it may see, what its variants equal, how many weights it has."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import small_gpt, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from dtrain.model.gpt import GPT, Rotary, joined, rotate
from dtrain.model.seeds import fill
from dtrain.parallel.order import materialize


@pytest.mark.parametrize("changed", [{}, {"kv_heads": 1}, {"tied": False}, {"heads": 4}])
def test_a_later_token_never_changes_an_earlier_output(changed: dict[str, object]) -> None:
    model, seen = small_gpt(**changed), tokens(3, 10)
    before = model(seen)
    for position in range(1, 10):
        other = seen.clone()
        other[:, position] = (other[:, position] + 1) % 13
        after = model(other)
        assert torch.allclose(after[:, :position], before[:, :position], atol=1e-6)
        assert (after[:, position:] - before[:, position:]).abs().amax(-1).min() > 1e-4, (
            "and it does change all later ones"
        )


def test_a_sample_does_not_see_the_others_of_its_batch() -> None:
    model, seen = small_gpt(), tokens(4, 6)
    assert torch.allclose(model(seen)[2:3], model(seen[2:3]), atol=1e-6)


def test_the_order_of_tokens_matters() -> None:
    model = small_gpt()
    assert not torch.allclose(
        model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1], atol=1e-4
    )


def test_grouped_heads_are_full_heads_that_share_keys_and_values() -> None:
    grouped, full = small_gpt(heads=4, kv_heads=2, width=16), small_gpt(heads=4, width=16)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            state[name] = state[name].view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(state)
    assert torch.allclose(grouped(tokens(2, 9)), full(tokens(2, 9)), atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    cos, sin = Rotary(8, 10000.0)(30, torch.device("cpu"))
    query, key = (
        torch.randn(8, generator=torch.Generator().manual_seed(0)),
        torch.randn(8, generator=torch.Generator().manual_seed(1)),
    )
    q = rotate(query.expand(1, 30, 1, 8), cos, sin)[0, :, 0]
    k = rotate(key.expand(1, 30, 1, 8), cos, sin)[0, :, 0]
    scores = q @ k.T
    for distance in range(0, 25, 6):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)
    assert (scores[:, 0].diff().abs() > 1e-4).any(), "and it does depend on the distance"
    assert torch.allclose(q.norm(dim=-1), query.norm().expand(30), atol=1e-5), "turning keeps lengths"


def test_a_short_sequence_after_a_long_one_is_turned_as_before() -> None:
    model = small_gpt()
    before = model(tokens(1, 5))
    model(tokens(1, 12))
    assert torch.equal(model(tokens(1, 5)), before)


def test_a_tied_head_is_the_embedding() -> None:
    tied, free = small_gpt(tied=True), small_gpt(tied=False)
    assert tied.head.weight is tied.embed.weight
    assert free.head.weight is not free.embed.weight
    assert "head.weight" not in dict(tied.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (4, 1)])
def test_the_number_of_weights_follows_the_formula(tied: bool, heads: int, kv: int) -> None:
    vocab, layers, width, hidden = 101, 3, 32, 48
    model = GPT(vocab=vocab, layers=layers, heads=heads, kv_heads=kv, width=width, hidden=hidden, tied=tied)
    attention = 2 * width * width + 2 * width * (width * kv // heads)
    expected = layers * (attention + 3 * width * hidden + 2 * width) + width + vocab * width * (1 if tied else 2)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_the_feed_forward_is_as_wide_as_a_plain_one_of_four_times() -> None:
    block = GPT(vocab=5, layers=1, heads=2, width=96).blocks[0]
    assert block.feed_forward.up.out_features == 256


@pytest.mark.parametrize(
    "arguments", [{"width": 9, "heads": 2}, {"width": 6, "heads": 2}, {"width": 8, "heads": 4, "kv_heads": 3}]
)
def test_heads_that_do_not_divide_are_refused_by_key(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"model\.heads"):
        GPT(vocab=5, layers=1, **arguments)


def test_every_parameter_is_filled_and_the_first_loss_is_that_of_guessing() -> None:
    model = GPT(vocab=64, layers=2, heads=2, width=32)
    for name, parameter in model.named_parameters():
        whole = torch.full(parameter.shape, float("nan"))
        model.init_weight(name, whole, torch.Generator().manual_seed(len(name)))
        assert torch.isfinite(whole).all(), name
        with torch.no_grad():
            parameter.copy_(whole)
    logits = model(tokens(4, 32, vocab=64))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(4, 32, vocab=64, seed=1).flatten())
    assert loss.item() == pytest.approx(torch.log(torch.tensor(64.0)).item(), abs=0.1)


def test_every_weight_has_a_gradient() -> None:
    model = small_gpt(tied=False)
    model(tokens(2, 8)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_embeddings_begin_at_a_size_that_does_not_depend_on_the_vocabulary() -> None:
    model = GPT(vocab=400, layers=1, heads=2, width=64)
    fill(model, seed=0)
    for weight in (model.embed.weight, model.head.weight):
        assert float(weight.detach().std()) == pytest.approx(0.25 * 64**-0.5, rel=0.05)


class Norms(TorchFunctionMode):
    """The types of the inputs and the result of each norm."""

    def __init__(self) -> None:
        super().__init__()
        self.types = list[set[torch.dtype]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func is F.rms_norm:
            self.types.append({each.dtype for each in (*args, out) if isinstance(each, Tensor)})
        return out


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """The casts of autocast on a GPU, which torch makes without one too, of tensors without memory."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


def test_norms_on_a_gpu_run_in_one_type_whatever_the_lists_of_autocast_have(
    cuda_autocast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.12 on, autocast makes its norms fp32."""
    # a position is indexed, which torch does not do for a GPU that it was not built for
    monkeypatch.setattr(Rotary, "__call__", lambda _, T, device, positions: [torch.empty(T, 1, 4, device=device)] * 2)
    with FakeTensorMode(), torch.no_grad():
        with torch.device("meta"):
            model = GPT(vocab=16, layers=2, heads=2, width=8).requires_grad_(False)
        materialize(model, torch.device("cuda"))
        assert F.linear(torch.empty(1, 8, device="cuda"), model.head.weight).dtype == torch.bfloat16, "it casts"
        with Norms() as norms:
            logits = model(torch.zeros(2, 4, dtype=torch.long, device="cuda"))
    assert norms.types == [{torch.bfloat16}] * 9, "four in each block, and the last"
    assert logits.dtype == torch.bfloat16


def test_one_product_of_several_layers_has_their_outputs_and_gradients() -> None:
    layers, x = [torch.nn.Linear(8, outputs, bias=False) for outputs in (8, 4, 12)], torch.randn(2, 5, 8)
    both = list[list[Tensor]]()
    for outputs in ([layer(x.requires_grad_()) for layer in layers], joined(x, layers)):
        weights = [each.weight for each in layers]
        both.append([*outputs, *torch.autograd.grad(sum(each.sin().sum() for each in outputs), [x, *weights])])
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("cast", "hooks", "expected"), [(True, False, 4), (True, True, 6), (False, False, 7)], ids=["plain", "hook", "fp32"]
)
def test_a_compiled_block_multiplies_once_by_matrices_of_one_input_that_autocast_casts(
    cast: bool, hooks: bool, expected: int
) -> None:
    """Hooks are those of tensor parallelism, for one; fp32 weights would be copied for nothing."""
    block, graphs = small_gpt().blocks[0], list[torch.fx.GraphModule]()
    if hooks:
        block.attention.k.register_forward_hook(lambda *_: None)
    block.compile(backend=lambda graph, _: graphs.append(graph) or graph)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        block(torch.randn(1, 4, 8, dtype=torch.bfloat16 if cast else torch.float32))
    (graph,) = graphs
    assert sum(node.target is torch._C._nn.linear for node in graph.graph.nodes) == expected
