"""Cross entropy of logits split over the vocabulary, or in 16 bits: value and gradients of torch's own on whole ones in fp32."""

from functools import partial
from typing import Any
from unittest.mock import patch

import commands
import pytest
import torch
import torch.nn.functional as F
from small import Collectives, on_resident_mesh, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtrain.data import IGNORE
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.objective import Loss, answer, head, loss_of, vocabulary
from dtrain.objective.head import deferring
from dtrain.objective.next_token import NextToken
from dtrain.objective.vocabulary import cross_entropy

WEIGHT = 0.3


class Sharpened(NextToken):
    """An objective of a user's own that computes with the logits."""

    def loss(self, outputs: Any, batch: Any) -> Loss:
        sharp = F.log_softmax(outputs / 0.5, -1).gather(-1, batch["targets"][..., None])
        return Loss(-sharp.sum())


def told_of(mesh: Mesh) -> str:
    logits = distribute_tensor(drawn(8), mesh.axis("tp"), [Shard(2)])
    with pytest.raises(WordsError) as caught:
        loss_of(Sharpened(), logits, {"targets": torch.zeros(2, 5, dtype=torch.long)})
    return str(caught.value)


def test_an_objective_that_computes_with_split_logits_is_told_what_to_type() -> None:
    assert all("Type tensor.loss=whole" in text for text in on_resident_mesh(told_of, tp=2))


def drawn(vocab: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(2, 5, vocab, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)


def targets_of(vocab: int, ignored: int) -> Tensor:
    targets = tokens(2, 5, vocab=vocab, seed=2)
    targets.view(-1)[:ignored] = IGNORE
    return targets


def of_torch(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (loss * WEIGHT).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def of_split(mesh: Mesh, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    leaf = distribute_tensor(logits, mesh.axis("tp"), [Shard(2)]).requires_grad_()
    loss = cross_entropy(leaf, targets)
    (loss * WEIGHT).backward()
    assert isinstance(leaf.grad, DTensor)
    return loss.detach(), leaf.grad.full_tensor(), leaf.grad.dtype


@pytest.mark.parametrize("ignored", [0, 4, 10])
@pytest.mark.parametrize("vocab", [13, 16])
def test_value_and_gradient_are_those_of_torch(vocab: int, ignored: int) -> None:
    """Also where the vocabulary does not divide, and where no target counts."""
    logits, targets = drawn(vocab), targets_of(vocab, ignored)
    loss, gradient = of_torch(logits, targets)
    for found, found_gradient, _ in on_resident_mesh(partial(of_split, logits=logits, targets=targets), tp=2):
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-6)


class Largest(TorchDispatchMode):
    """The most numbers that a tensor in fp32 had."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.numbers = max(
            [self.numbers, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x.dtype == torch.float32)]
        )
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", [0, 4, 10])
def test_of_logits_in_16_bits_a_few_rows_at_a_time_are_in_fp32(
    dtype: torch.dtype, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "LOSS_ROWS", 3 * 13 * 4)  # of ten
    logits, targets = drawn(13, scale=8.0, dtype=dtype), targets_of(13, ignored)
    loss, gradient = of_torch(logits, targets)
    leaf = logits.clone().requires_grad_()
    with Largest() as largest:
        found = NextToken().loss(leaf, {"inputs": None, "targets": targets}).sum
        (found * WEIGHT).backward()
    assert leaf.grad is not None and leaf.grad.dtype == dtype
    torch.testing.assert_close(found.detach(), loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)
    assert largest.numbers == 3 * 13


@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of what else of torch it uses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_logits_are_compiled_where_blocks_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph for the sum and one for each token, with the numbers of torch; run as it is written."""
    monkeypatch.setattr(head, "WRITTEN", ())
    vocabulary.fused.kernel.cache_clear()
    logits, targets, compile = drawn(13, scale=8.0, dtype=dtype), targets_of(13, 4), torch.compile
    loss, gradient = of_torch(logits, targets)
    counter = CompileCounter()
    with patch.object(torch, "compile", lambda function: compile(function, backend=counter, fullgraph=True)):
        for each in (False, True, False):
            leaf = logits.clone().requires_grad_()
            with deferring(0, compiled=True), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                found = vocabulary.token_nats(leaf, targets).sum() if each else cross_entropy(leaf, targets)
            (found * WEIGHT).backward()
            torch.testing.assert_close(found.detach(), loss, rtol=1e-6, atol=0)
            torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=1e-6)
    assert counter.frame_count == 2
    vocabulary.fused.kernel.cache_clear()
    with deferring(0, compiled=True, again=True):  # backwards in two parts
        assert not head.compiles(logits)


class Touched(TorchDispatchMode):
    """Bytes of the logits that operators read and write."""

    views = ("view", "detach", "alias", "slice", "select", "expand", "empty", "unsqueeze", "t.default")

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.bytes = vocab, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if not any(name in str(func) for name in self.views):
            wide = (
                x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.shape[-1:] == (self.vocab,)
            )
            self.bytes += sum(x.nbytes for x in wide)
        return out


def test_bytes_of_logits_that_are_touched_as_it_is_written() -> None:
    """What the compiled loss is there for; see below."""
    leaf = drawn(4096, dtype=torch.bfloat16).requires_grad_()
    with Touched(4096) as touched:
        cross_entropy(leaf, targets_of(4096, 0)).backward()
    assert 60 <= touched.bytes / leaf.numel() <= 82


CODE = """
import re

import torch
from torch._inductor.utils import run_and_get_code

from dtrain.objective import fused, head
from dtrain.objective.head import deferring
from dtrain.objective.vocabulary import cross_entropy

head.WRITTEN = ()
rows, vocab = 64, 4096
logits, index = torch.randn(rows, vocab, dtype=torch.bfloat16), torch.randint(vocab, (rows,))
target, counts = logits.gather(1, index[:, None])[:, 0].float(), torch.ones(rows)


def whole():
    leaf = logits.clone().requires_grad_()
    with deferring(0, compiled=True):
        loss = cross_entropy(leaf, index)
    loss.backward()


def chunk():
    fused.nats_(logits.clone(), target, index, counts_R=counts, scale=torch.ones(()), compiled=True)


for run in (chunk, whole):
    _, codes = run_and_get_code(run)
    places = re.findall(r"(<at::BFloat16>::loadu|<float>::loadu|\\.store)\\(\\w+ \\+ static_cast<int64_t>\\(x1 \\+ 4096L\\*x0", "".join(codes))
    print(len(places), sum("float" in place for place in places))
"""


@pytest.mark.campaign("commands")
def test_bytes_of_logits_that_are_touched_compiled() -> None:
    """In the loops of the kernels that torch's compiler makes for a CPU, where the maximum and the sum are a loop each:
    four passes of 2 bytes, over a chunk, and over whole logits in forward and backward. A GPU joins the first two
    (test_fused.py).
    """
    ended = commands.python("-c", CODE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["4", "0", "4", "0"]


def test_a_target_outside_of_the_vocabulary_is_an_error_in_16_bits_too() -> None:
    with pytest.raises(WordsError, match="a target is 13, but the model has 13 classes"):
        NextToken().loss(drawn(13, dtype=torch.bfloat16), {"inputs": None, "targets": torch.full((2, 5), 13)})


def test_three_words_on_four_ranks() -> None:
    """One rank holds no word."""
    logits, targets = drawn(3), targets_of(3, 1)
    loss, gradient = of_torch(logits, targets)
    for found, found_gradient, _ in on_resident_mesh(partial(of_split, logits=logits, targets=targets), tp=4):
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-6)


def refusal(mesh: Mesh, target: int) -> str:
    targets = targets_of(13, 2)
    targets[1, 2] = target
    with pytest.raises(WordsError) as refused:
        NextToken().loss(
            distribute_tensor(drawn(13), mesh.axis("tp"), [Shard(2)]), {"inputs": None, "targets": targets}
        )
    return str(refused.value)


@pytest.mark.parametrize("target", [13, 5000, -1])
def test_a_target_outside_of_the_vocabulary_is_an_error_on_every_rank(target: int) -> None:
    for message in on_resident_mesh(partial(refusal, target=target), tp=2):
        assert f"a target is {target}, but the model has 13 classes" in message


def test_large_logits_do_not_overflow() -> None:
    logits, targets = drawn(13, scale=1e4), targets_of(13, 2)
    loss, gradient = of_torch(logits, targets)
    for found, found_gradient, _ in on_resident_mesh(partial(of_split, logits=logits, targets=targets), tp=2):
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_gradient, gradient, rtol=0, atol=1e-6)


def test_sums_are_in_fp32_and_gradients_in_the_type_of_the_logits() -> None:
    logits, targets = drawn(13, dtype=torch.bfloat16), targets_of(13, 2)
    loss, gradient = of_torch(logits, targets)
    for found, found_gradient, dtype in on_resident_mesh(partial(of_split, logits=logits, targets=targets), tp=2):
        assert found.dtype == torch.float32 and dtype == torch.bfloat16
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-2, atol=1e-3)


def asked(mesh: Mesh) -> tuple[list[str], Any]:
    logits, targets = drawn(13), targets_of(13, 4)
    split = distribute_tensor(logits, mesh.axis("tp"), [Shard(2)])
    with Collectives() as seen:
        loss = NextToken().loss(split, {"inputs": None, "targets": targets}).sum
    whole = NextToken().loss(logits, {"inputs": None, "targets": targets}).sum
    return seen.names, (torch.allclose(loss, whole, rtol=1e-6), torch.equal(answer(split), logits))


def test_the_objective_takes_them_and_the_whole_is_never_gathered() -> None:
    for names, (same, whole) in on_resident_mesh(asked, tp=2):
        assert same and whole
        assert names and not any("gather" in name for name in names)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of what else of torch it uses
def test_whole_logits_on_a_gpu_have_the_loss_and_gradients_of_torch() -> None:
    logits, targets = drawn(4096, scale=8.0, dtype=torch.bfloat16), targets_of(4096, 4)
    loss, gradient = of_torch(logits, targets)
    leaf = logits.cuda().requires_grad_()
    with deferring(0, compiled=True):
        found = cross_entropy(leaf, targets.cuda())
    (found * WEIGHT).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(found.detach().cpu(), loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(leaf.grad.cpu(), gradient, rtol=0, atol=1e-2)
