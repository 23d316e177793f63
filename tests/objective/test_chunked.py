"""Cross entropy of deferred logits: loss and gradients of whole ones, on every mesh, with a chunk of logits at a time."""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from paired import dpo
from paired import parts_of as pairs
from pool import resident
from small import PARTS, STRATEGIES, UNEVEN, alike, few_steps, joined, small_gpt, tokens
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dtrain.errors import WordsError
from dtrain.loop import step
from dtrain.model.hf import TASKS
from dtrain.objective import answer, chunked, fused, head
from dtrain.objective.head import Deferred, Head, LossOptions, defer, deferring
from dtrain.objective.next_token import NextToken
from dtrain.objective.vocabulary import cross_entropy, token_nats
from dtrain.planned import PipelineShape
from dtrain.predict.chunks import LARGE_VOCABULARY, in_chunks

NEXT = PARTS["objective"]
DDP, FSDP = STRATEGIES["ddp"], STRATEGIES["fsdp"]
SPLIT = {"sequence": "split", "loss": "split"}
MESHES: dict[str, tuple[Any, dict[str, int], dict[str, Any]]] = {
    "ddp 2": (DDP, {"dp_replicate": 2}, {}),
    "fsdp 2": (FSDP, {"dp_shard": 2}, {"microbatch": 2}),
    "tp 2": (DDP, {"tp": 2}, {}),
    "tp 2, split": (DDP, {"tp": 2}, {"tensors": SPLIT}),
    "pp 2": (DDP, {"pp": 2}, {"microbatch": 2}),
}
MORE = {
    "fsdp 2 x tp 2": (FSDP, {"dp_shard": 2, "tp": 2}, {"tensors": SPLIT}),
    "pp 2, in two parts": (DDP, {"pp": 2}, {"microbatch": 2, "pipeline": PipelineShape("interleaved_zero_bubble", 2)}),
    "pp 2 x tp 2": (DDP, {"pp": 2, "tp": 2}, {"microbatch": 2}),
    "fsdp 2 x pp 2": (FSDP, {"dp_shard": 2, "pp": 2}, {"microbatch": 2}),
}
LONG = PARTS | {"data": PARTS["data"] | {"sequence": 12}}
UNTIED = PARTS | {"data": UNEVEN, "model": PARTS["model"] | {"tied": False, "layers": 4}}


def counted(*arguments: Any, **changed: Any) -> dict[str, Any]:
    """`few_steps`, and how many losses of deferred logits this rank computed."""
    with patch.object(chunked, "_apply", side_effect=chunked._apply) as calls:
        made = few_steps(*arguments, **changed)
    return made | {"chunked": calls.call_count}


def compiled(*arguments: Any, **changed: Any) -> dict[str, Any]:
    """`counted`, with the graphs of what is compiled where blocks are, on a GPU."""
    graphs = patch.object(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    fused.kernel.cache_clear()
    with graphs, patch.object(head, "WRITTEN", ()), patch.object(step, "is_compiled", return_value=True):
        made = counted(*arguments, **changed)
    fused.kernel.cache_clear()
    return made


def run(
    mesh: tuple[Any, dict[str, int], dict[str, Any]],
    parts: dict[str, Any],
    chunk: int,
    by: Callable[..., dict[str, Any]] = counted,
    **more: Any,
) -> dict[str, Any]:
    strategy, degrees, changed = mesh
    made = {**parts, "strategy": strategy, "objective": parts["objective"] | {"chunk": chunk}}
    runs = resident(math.prod(degrees.values()), partial(by, made, degrees, steps=2, **changed, **more))
    assert any(each["chunked"] for each in runs) == (chunk > 0)
    pp = degrees.get("pp", 1)
    return joined(runs[:: len(runs) // pp]) if pp > 1 else runs[0]


whole = cache(lambda name: run((PARTS["strategy"], {}, {}), KINDS[name], 0))
KINDS = {
    "untied": UNTIED,
    "tied": PARTS,
    "long": LONG,
    "dpo": pairs() | {"objective": dpo()},
}


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(other["losses"]), rtol=tolerance, atol=0)
    alike(one["gradients"], other["gradients"], tolerance)


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_those_of_whole_logits(mesh: str) -> None:
    same(run(MESHES[mesh], UNTIED, 7), whole("untied"))


@pytest.mark.parametrize("chunk", [1, 5, 10**6])
def test_one_chunk_and_several_have_the_gradients_of_whole_logits(chunk: int) -> None:
    same(run((PARTS["strategy"], {}, {}), UNTIED, chunk), whole("untied"))


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("mesh", MORE)
def test_gradients_are_those_of_whole_logits_on_more_ranks(mesh: str) -> None:
    same(run(MORE[mesh], UNTIED, 7), whole("untied"))


@pytest.mark.campaign("8 ranks")
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of what else of torch it uses
@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2, split", "pp 2"])
def test_so_they_are_where_the_loss_is_compiled(mesh: str) -> None:
    same(run(MESHES[mesh], UNTIED, 7, compiled), whole("untied"))


@pytest.mark.parametrize("mesh", ["ddp 2", "fsdp 2", "tp 2"])
def test_tied_weights_get_both_gradients(mesh: str) -> None:
    same(run(MESHES[mesh], PARTS, 7), whole("tied"))


def test_a_split_sequence() -> None:
    same(run((DDP, {"cp": 2}, {}), LONG, 7), whole("long"))


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", "pp 2"])
def test_pairs_of_dpo(mesh: str) -> None:
    same(run(MESHES[mesh], KINDS["dpo"], 7), whole("dpo"), tolerance=2e-6)  # 1.4e-6 on an EPYC


class Largest(TorchDispatchMode):
    """The most rows of a vocabulary of 13 that a tensor had."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        shapes = [each.shape for each in tree_leaves(out) if isinstance(each, Tensor) and type(each) is not Deferred]
        sizes = (shape[:-1].numel() for shape in shapes if shape[-1:] == (13,) and not func.is_view)
        self.rows = max([self.rows, *sizes])
        return out


def deferred(model: nn.Module, chunk: int = 3) -> nn.Module:
    defer(model, chunk)
    return model


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_more_logits_than_a_chunk_exist(dtype: torch.dtype, each: bool) -> None:
    model, batch = deferred(small_gpt(width=16)), tokens(2, 5)
    runs = []
    for chunk in (0, 3):
        with Largest() as largest, deferring(chunk), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(batch)
            loss = (token_nats(logits, batch) if each else cross_entropy(logits, batch)).sum() * 0.1
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        runs.append((loss.detach(), gradients))
    assert largest.rows == 3
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-6, atol=0)
    for here, there in zip(runs[1][1], runs[0][1], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=close * there.abs().max().item())


class Products(TorchDispatchMode):
    """Sizes of tensors that a backward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sizes += [each.numel() for each in tree_leaves(args) if isinstance(each, Tensor)]
        return func(*args, **kwargs or {})


def with_weight(build: Callable[[Tensor], Tensor], weight: Tensor, gradient: Tensor) -> tuple[list[Tensor], int]:
    """Gradients of `build(loss)` for `gradient`, where chunks were formed with `weight`; the largest tensor that the
    backward of the loss alone reads.
    """
    hidden = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head = torch.randn(13, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = cross_entropy(Deferred(hidden, head, None, LossOptions(4, weight=weight)), tokens(1, 10)[0])
    with Products() as products:
        gradients = torch.autograd.grad(build(loss), [hidden, head], gradient)
    return list(gradients), max(products.sizes, default=0)


BUILT: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "the loss itself": (lambda loss: loss, True),
    "beside another loss": (lambda loss: loss + 2.0, True),
    "multiplied": (lambda loss: loss * 0.5, False),
}


@pytest.mark.parametrize("built", BUILT)
@pytest.mark.parametrize("known", [True, False])
def test_gradients_of_chunks_are_formed_with_the_weight_of_the_step(built: str, known: bool) -> None:
    """Its backward then reads neither; any other gradient that comes is right too."""
    build, untouched = BUILT[built]
    weight = torch.tensor(0.3)
    expected, _ = with_weight(build, torch.tensor(7.0), torch.tensor(0.3))
    found, largest = with_weight(build, weight, weight.view(()) if known else torch.tensor(0.3))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert (largest <= 1) == (untouched and known)


def penalty(loss: Tensor, weight: Tensor) -> Tensor:
    """Of the gradient, which has gradients itself."""
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    return gradient.square().sum()


def read_before(loss: Tensor, weight: Tensor) -> Tensor:
    torch.autograd.grad(loss, weight, retain_graph=True)
    return loss


@pytest.mark.parametrize(
    ("loss_of", "use"), [(cross_entropy, penalty), (token_nats, penalty), (cross_entropy, read_before)]
)
def test_an_objective_that_takes_gradients_of_a_loss_in_chunks_is_told_what_to_type(
    loss_of: Callable[..., Tensor], use: Callable[..., Tensor]
) -> None:
    """What it would get in silence is a penalty without a gradient."""
    model, batch = deferred(small_gpt()), tokens(2, 5)
    with deferring(3), pytest.raises(WordsError, match=r"gradients of gradients.*Type objective\.chunk=0"):
        use(loss_of(model(batch), batch).sum(), model.norm.weight).backward()


@pytest.fixture
def wide_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand-ins on the CPU for what torch has on a GPU: products of 16 bits that are written in fp32. Their names."""
    called: list[str] = []

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        called.append("mm")
        return a.to(out_dtype) @ b.to(out_dtype)

    def added(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **_: Any) -> Tensor:
        called.append("addmm")
        assert out is total
        return out.add_(a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(chunked, "writes_wide", lambda device: True)
    with torch.library._scoped_library("aten", "IMPL") as kernels:
        kernels.impl("mm.dtype", product, "CPU")
        kernels.impl("addmm.dtype_out", added, "CPU")
        yield called


@pytest.mark.parametrize(("chunk", "calls"), [(10, ["mm"]), (4, ["mm", "addmm", "addmm"])])
def test_on_a_gpu_the_gradient_of_the_weight_is_added_up_in_one_pass(
    chunk: int, calls: list[str], wide_kernels: list[str]
) -> None:
    """And no chunk is rounded to 16 bits: as close to fp32 as one product of all tokens."""
    hidden = torch.randn(10, 8, dtype=torch.bfloat16)
    head = torch.randn(13, 8, dtype=torch.bfloat16)
    results = []
    for rows in (chunk, 0):
        x, w = hidden.float().requires_grad_(), head.float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=rows > 0):
            logits = Deferred(x, w, None, LossOptions(rows)) if rows else x @ w.T
            cross_entropy(logits, tokens(1, 10)[0]).backward()
        results.append(w.grad)
    assert wide_kernels == calls
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=3e-2)


def test_what_a_gpu_multiplies_has_these_types_and_shapes() -> None:
    """torch's own stand-ins for tensors of a GPU."""
    with FakeTensorMode():
        a, b = (torch.empty(10, n, dtype=torch.bfloat16, device="cuda") for n in (13, 8))
        total = chunked.wide_product(None, a.T, b)
    assert total.shape == (13, 8) and total.dtype == torch.float32 and total.device.type == "cuda"
    a, b, total = (
        each.to("meta") for each in (torch.empty(13, 10).bfloat16(), torch.empty(10, 8).bfloat16(), torch.empty(13, 8))
    )
    with patch.object(chunked, "writes_wide", return_value=True):
        assert chunked.wide_product(total, a, b) is total


@pytest.mark.parametrize("each", [False, True])
def test_the_gradient_of_hidden_states_waits_in_the_type_of_the_products(each: bool) -> None:
    hidden, head = torch.randn(10, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits = Deferred(hidden, head, None, LossOptions(4))
        loss = token_nats(logits, tokens(1, 10)[0]).sum() if each else cross_entropy(logits, tokens(1, 10)[0])
    if not each:
        assert loss.grad_fn.gradients[0].dtype == torch.bfloat16  # type: ignore[union-attr]
    loss.backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32


class Capped(nn.Module):
    """Its forward goes on with the logits, as that of gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_gpt()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.head

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) / 3) * 3


def test_what_else_reads_logits_gets_them_whole() -> None:
    """A softcap in the model's forward, a metric, an objective of another kind."""
    batch = tokens(2, 5)
    model = deferred(Capped())
    assert type(model.inner.head) is Head
    plain, plain_gpt = model(batch), model.inner(batch)
    with deferring(3):
        assert torch.equal(model(batch), plain)
        logits = model.inner(batch)
        assert type(logits) is Deferred and logits.shape == plain.shape and logits.requires_grad
        assert torch.equal(answer(logits), plain_gpt)
        assert torch.equal(logits.argmax(-1), plain_gpt.argmax(-1))
        assert torch.equal(logits[:, -1] + 1, plain_gpt[:, -1] + 1)


def halved(logits: Tensor) -> None:
    logits.mul_(0.5)


def halved_view(logits: Tensor) -> None:
    logits.view(-1, 13).mul_(0.5)


def hidden_token(logits: Tensor) -> None:
    with torch.no_grad():
        logits[..., 3] = -100.0


def replaced(logits: Tensor) -> None:
    logits.data = logits.data * 0.5


def smaller_gradient(logits: Tensor) -> None:
    logits.register_hook(lambda gradient: gradient * 0.5)


def looked_at(logits: Tensor) -> None:
    with torch.inference_mode():
        logits.detach().argmax(-1)


@pytest.mark.parametrize(
    ("change", "chunked_loss"),
    [
        (halved, False),
        (halved_view, False),
        (hidden_token, False),
        (replaced, False),
        (smaller_gradient, False),
        (looked_at, False),
        (lambda logits: logits.argmax(-1), True),
    ],
)
def test_logits_that_are_changed_in_place_are_what_the_loss_sees(
    change: Callable[[Tensor], Any], chunked_loss: bool
) -> None:
    model, batch, runs = deferred(small_gpt()), tokens(2, 5), []
    for chunk in (0, 3):
        with deferring(chunk), patch.object(chunked, "_apply", side_effect=chunked._apply) as calls:
            logits = model(batch)
            change(logits)
            loss = cross_entropy(logits, batch)
            runs.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert calls.called == chunked_loss
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_head_that_is_computed_again_in_the_backward(reentrant: bool) -> None:
    model, runs = deferred(small_gpt()), []
    hidden = torch.randn(2, 5, model.head.in_features, requires_grad=True)
    for chunk in (0, 3):
        with deferring(chunk):
            logits = checkpoint(lambda x: model.head(x.tanh()), hidden, use_reentrant=reentrant)
            cross_entropy(logits, tokens(2, 5)).backward()
        runs.append([hidden.grad, model.head.weight.grad])
        hidden.grad = model.head.weight.grad = None
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-6)


def test_a_target_outside_of_the_vocabulary_is_an_error() -> None:
    model = deferred(small_gpt())
    for targets in (torch.full((2, 5), 13), torch.full((2, 5), -1)):
        with deferring(3), pytest.raises(WordsError, match="but the model has 13 classes"):
            NextToken().loss(model(tokens(2, 5)), {"inputs": None, "targets": targets})


def test_a_large_vocabulary_is_chunked_and_a_small_one_is_not() -> None:
    assert in_chunks("auto", LARGE_VOCABULARY) and in_chunks(7, 13)
    assert not in_chunks("auto", LARGE_VOCABULARY - 1) and not in_chunks(0, 10**6)
    assert type(deferred(small_gpt()).head) is Head
    model = small_gpt()
    defer(model, "auto")
    assert type(model.head) is nn.Linear


def test_a_head_in_a_block_and_one_that_trains_alone_compute_at_once() -> None:
    inside = nn.Sequential(nn.Linear(4, 13))
    defer(inside, 3)
    assert type(inside[0]) is nn.Linear
    model = deferred(small_gpt())
    model.requires_grad_(False).head.weight.requires_grad_()
    with deferring(3):
        assert type(model(tokens(2, 5))) is Tensor


class Plain(nn.Module):
    """A model without a table of its modules, as most are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.project = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13)
        self.extra = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.up(self.embed(x)).tanh())


def test_the_widest_layer_is_the_head_of_a_model_that_names_none() -> None:
    model, batch, runs = deferred(Plain()), tokens(2, 5), []
    assert [name for name, module in model.named_modules() if type(module) is Head] == ["project"]
    for chunk in (0, 3):
        with deferring(chunk):
            logits = model(batch)
            assert (type(logits) is Deferred) == bool(chunk)
            loss = cross_entropy(logits, batch)
            runs.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters())[:5])])
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=1e-6)


SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 13,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "task", "computed"),
    [
        ("llama", "causal_lm", 0),
        ("gpt2", "causal_lm", 0),
        ("phi", "causal_lm", 0),
        ("bert", "masked_lm", 0),
        ("gemma2", "causal_lm", 1),
    ],
)
def test_models_of_transformers(kind: str, task: str, computed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied, with a bias, and one that caps its logits, which are computed whole."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = getattr(transformers, TASKS[task]).from_config(config).eval()
    defer(model, 3)
    batch, runs = tokens(2, 5), []
    whole = Deferred.whole
    calls = []
    monkeypatch.setattr(Deferred, "whole", lambda self: calls.append(1) or whole(self))
    for chunk in (0, 3):
        with deferring(chunk):
            loss = NextToken().loss(model(batch), {"inputs": None, "targets": batch.roll(1, 1)}).sum
        runs.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    assert len(calls) == computed
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-6, atol=0)
    for here, there in zip(runs[1][1], runs[0][1], strict=True):
        assert (here is None) == (there is None)
        if there is not None:
            torch.testing.assert_close(here, there, rtol=0, atol=2e-6 * there.abs().max().item() + 1e-9)


@pytest.mark.gpu
def test_a_gpu_adds_products_of_16_bits_in_fp32() -> None:
    a, b = (torch.randn(4096, n, device="cuda").bfloat16() for n in (1000, 256))
    once = chunked.wide_product(None, a.T, b)
    twice = chunked.wide_product(once.clone(), a.T, b)
    right = a.T.double() @ b.double()
    torch.testing.assert_close(once.double(), right, rtol=0, atol=1e-5 * right.abs().max().item())
    torch.testing.assert_close(twice.double(), 2 * right, rtol=0, atol=2e-5 * right.abs().max().item())
