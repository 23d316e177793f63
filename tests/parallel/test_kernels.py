"""Each kernel gives the output, logarithms and gradients of a block that fp64 gives, in memory that is linear in its tokens."""

import pytest
import torch
from torch import Tensor

from dtrain.parallel import kernels
from dtrain.parallel.kernels import CPU, EFFICIENT, FLASH, PRODUCTS, Kernel, kernel_of


def far(here: Tensor, there: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((here - there).abs().max() / there.abs().max()).item()


def block(H: int, K: int, T: int, S: int, D: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """(gradient of the output, q, k, v), as models give them: transposed views."""
    sizes = ((H, T), (H, T), (K, S), (K, S))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, T, H, D, generator=generator).to(device, dtype).transpose(1, 2) for H, T in sizes]


def whole(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    """Output, logarithms and gradients of q, k and v by torch's derivatives in fp64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    copies = q.shape[1] // k.shape[1]
    scores = 0.3 * q @ k.repeat_interleave(copies, 1).mT
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=q.device).triu(1)
    out = scores.softmax(-1) @ v.repeat_interleave(copies, 1)
    return [out, scores.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), gradient.double())]


def of_kernel(kernel: Kernel, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    out, lse = kernel.forward(q, k, v, causal, 0.3)
    return [out, lse, *kernel.backward(gradient, q, k, v, out=out.to(q.dtype), lse=lse, causal=causal, scale=0.3)]


CASES = [(causal, K, S) for causal, S in ((True, 40), (False, 40), (False, 23)) for K in (6, 2, 1)]


@pytest.mark.parametrize("kernel", [CPU, PRODUCTS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
    ids=str,
)
def test_a_kernel_gives_what_fp64_gives(
    kernel: Kernel, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ROWS", 16)
    for causal, K, S in CASES:
        given = block(6, K, 40, S, 8, dtype)
        for here, there in zip(of_kernel(kernel, *given, causal), whole(*given, causal), strict=True):
            assert far(here.double(), there) < bound, (causal, K, S)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, PRODUCTS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_kernel_of_a_gpu_gives_what_fp64_gives(kernel: Kernel, dtype: torch.dtype) -> None:
    if kernel is FLASH and dtype == torch.float32:
        pytest.skip("flash multiplies in 16 bits")
    for causal, K, S in CASES:
        given = block(6, K, 40, S, 8, dtype, "cuda")
        for here, there in zip(of_kernel(kernel, *given, causal), whole(*given, causal), strict=True):
            assert far(here.double(), there) < (2e-6 if dtype == torch.float32 else 2e-2), (causal, K, S)
    _, *given = block(6, 2, 64, 64, 64, dtype, "cuda")
    assert kernel_of(*given) is (EFFICIENT if dtype == torch.float32 else FLASH)


def test_the_cpu_has_a_fused_kernel_for_heads_of_one_width() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        _, q, k, v = block(4, 2, 8, 8, 6, dtype)
        assert kernel_of(q, k, v) is CPU
        assert kernel_of(q, k, v[..., :4]) is PRODUCTS


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT], ids=lambda kernel: kernel.name)
def test_calls_of_a_gpu_are_those_that_torch_takes(kernel: Kernel) -> None:
    """Not its numbers: torch's shapes of the two operators, without a GPU."""
    device = torch.device("meta")
    gradient, q, k, v = (x.to(device) for x in block(6, 2, 40, 40, 8, torch.bfloat16))
    out, lse = kernel.forward(q, k, v, True, 0.3)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    parts = kernel.backward(gradient, q, k, v, out=out, lse=lse, causal=True, scale=0.3)
    assert [part.shape for part in parts] == [q.shape, k.shape, v.shape]
