"""The elementwise part of a chunked cross entropy: gradients of torch's own, as it is written and compiled, without logits in fp32."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import commands
import pytest
import torch
import torch.nn.functional as F
from small import small_gpt, tokens
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtrain.objective import fused, head, vocabulary
from dtrain.objective.head import defer, deferring, is_compiled
from dtrain.objective.vocabulary import cross_entropy, token_nats

# torch's own compiler warns of what else of torch it uses
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, V = 6, 13
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """What torch.compile was given to compile; it is run as it is written."""
    torch._dynamo.reset()
    fused.kernel.cache_clear()
    made: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    compile = torch.compile
    with patch.object(torch, "compile", lambda function: compile(function, backend=keep, fullgraph=True)):
        yield made
    fused.kernel.cache_clear()
    torch._dynamo.reset()


def logits_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits whose exponentials overflow, and targets, of which some do not count."""
    torch.manual_seed(0)
    targets = torch.tensor([3, 0, -100, 12, 7, -100])
    return (torch.randn(ROWS, V) * 5 + 300).to(dtype), targets


def torchs(logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row, and the gradient of their sum times `scale`, in fp64."""
    high = logits.double().requires_grad_()
    nats = F.cross_entropy(high, targets, ignore_index=-100, reduction="none")
    return nats.detach(), torch.autograd.grad((nats * scale).sum(), high)[0]


def halves(logits: Tensor, targets: Tensor, scale: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    """The same from two parts of the vocabulary."""
    parts = [part.contiguous() for part in logits.split([8, 5], 1)]
    each = [fused.sums(part, compiled=compiled) for part in parts]
    largest = torch.maximum(each[0][0], each[1][0])
    sums = sum(some * (most - largest).exp() for most, some in each)
    counts = (targets != -100).float()
    for first, part in zip((0, 8), parts, strict=True):
        index = targets - first
        index = index.where((index >= 0) & (index < part.shape[1]), -1)
        fused.gradient_(part, largest, sums, index, scale * counts, compiled=compiled)
    target = logits.gather(1, targets.clamp(0)[:, None])[:, 0].float()
    return (sums.log() + largest - target) * counts, torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_they_are_those_of_torch(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused.BLOCK, "cpu", 4 * V * rows)
    check(dtype, compiled=False)


@pytest.mark.campaign("commands")
@pytest.mark.parametrize("dtype", CLOSE)
def test_so_they_are_compiled(dtype: torch.dtype, graphs: list[Any]) -> None:
    check(dtype, compiled=True)
    assert len(graphs) == 5


def check(dtype: torch.dtype, *, compiled: bool) -> None:
    logits, targets = logits_of(dtype)
    counts, scale = (targets != -100).float(), torch.linspace(0.1, 2.0, ROWS)
    nats, gradient = torchs(logits, targets, torch.ones(ROWS))
    _, scaled = torchs(logits, targets, scale)
    whole = logits.clone()
    target = whole.gather(1, targets.clamp(0)[:, None])[:, 0].float()
    index = targets.where(counts > 0, -1)
    found = fused.nats_(whole, target, index, counts_R=counts, scale=torch.tensor(0.3), compiled=compiled)
    torch.testing.assert_close(found.double(), nats, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(whole.double(), 0.3 * gradient, rtol=CLOSE[dtype], atol=1e-6)
    found, parts = halves(logits, targets, scale, compiled)
    torch.testing.assert_close(found.double(), nats, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(parts.double(), scaled, rtol=CLOSE[dtype], atol=2e-6)


class Wide(TorchDispatchMode):
    """The most rows of a vocabulary that a new tensor of more than 16 bits had."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.shape[-1:] == (V,) and each.dtype.itemsize > 2:
                self.rows = max(self.rows, each.untyped_storage().nbytes() // (V * each.dtype.itemsize))
        return out


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_more_logits_in_fp32_than_a_block_exist(
    dtype: torch.dtype, each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fused.BLOCK, "cpu", 4 * V * 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model, batch = small_gpt(width=16), tokens(2, 9)
    defer(model, ROWS)
    with deferring(ROWS), torch.autocast("cpu", dtype):
        logits = model(batch)
        with Wide() as wide:
            loss = (token_nats(logits, batch) if each else cross_entropy(logits, batch)).sum()
    with Wide() as backward:
        loss.backward()
    assert wide.rows == 2
    assert backward.rows == (2 if each or dtype == torch.float16 else 0)


def test_chunks_of_all_steps_are_two_graphs_without_a_break(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a whole chunk, and one of any fewer tokens."""
    monkeypatch.setattr(head, "WRITTEN", ())
    model = small_gpt()
    defer(model, ROWS)
    for length in (ROWS, 8, 10, 9, 8):
        with deferring(ROWS, compiled=True):
            batch = tokens(2, length)
            cross_entropy(model(batch), batch).backward()
    assert len(graphs) == 2


def test_the_loss_is_compiled_where_blocks_are() -> None:
    model = small_gpt()
    assert not is_compiled(model)
    model.blocks[0]._compiled_call_impl = model.blocks[0]._call_impl  # as its method compile does
    assert is_compiled(model)


KERNELS = """
import re
import sys

import torch
from torch._inductor.utils import run_and_get_code

from dtrain.objective import fused

rows, vocab = 64, 4096
torch.set_default_device(sys.argv[1])
logits = torch.randn(rows, vocab, dtype=torch.bfloat16)
index, counts = torch.randint(vocab, (rows,)), torch.ones(rows)
target = logits.gather(1, index[:, None])[:, 0].float()
_, (code,) = run_and_get_code(fused.nats_, logits, target, index, counts_R=counts, scale=torch.ones(()), compiled=True)
kernels = re.findall(r"async_compile\\.(?:cpp_pybinding|triton)\\(", code)
buffers = re.findall(r"empty_strided_(?:cpu|cuda)\\(\\((\\d+), (\\d+)\\)[^\\n]*float32", code)
print(len(kernels), sum(int(a) * int(b) >= rows * vocab for a, b in buffers))
"""


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.campaign("commands")), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_chunk_is_one_kernel_without_logits_in_fp32(device: str) -> None:
    """On a GPU two at most: one for the sums, and one for the gradient."""
    ended = commands.python("-c", KERNELS, device)
    assert ended.returncode == 0, ended.stderr
    kernels, wide = map(int, ended.stdout.split())
    assert 1 <= kernels <= (1 if device == "cpu" else 2)
    assert wide == 0


def online_softmaxes(function: Callable[..., Any], *inputs: Any) -> int:
    """Passes that join a maximum and a sum, of those that torch's compiler makes of a function on a GPU: its own pass
    over the graph, without a GPU.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import post_grad
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        traced = make_fx(function, select_decomp_table())(*(torch.empty(shape, dtype=dtype) for shape, dtype in inputs))
        for node in traced.graph.nodes:
            if isinstance(value := node.meta.get("val"), Tensor):
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    post_grad.lazy_init(torch.device("cuda"))
    post_grad.pass_patterns[1].apply(traced.graph)
    return sum("prepare_softmax_online" in str(node.target) for node in traced.graph.nodes)


def without_kept_dims(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    x_RV = logits_RV.float()
    largest_R1 = x_RV.amax(1, keepdim=True)
    return largest_R1[:, 0], (x_RV - largest_R1).exp().sum(1)


def test_the_compiler_makes_one_pass_of_maximum_and_sum() -> None:
    logits = ((ROWS, V), torch.bfloat16)
    row, index, scale = ((ROWS,), torch.float32), ((ROWS,), torch.int64), ((), torch.float32)
    assert online_softmaxes(fused._sums, logits) == 1
    assert online_softmaxes(fused._nats_, logits, row, index, row, scale) == 1
    assert online_softmaxes(partial(vocabulary._of_torch, reduction="sum"), logits, index) == 1
    assert online_softmaxes(without_kept_dims, logits) == 0, "the count sees nothing"
