"""Attention of queries to a block of keys, by the kernel of torch that computes it: the output, and the logarithms of
its sums, by which blocks are joined (ring.py).

    flash       on a GPU, in 16 bits (FlashAttention-2, arXiv 2307.08691)
    efficient   on a GPU, what flash does not take: fp32, other widths of heads (arXiv 2112.05682)
    cpu         on the CPU: torch's flash kernel for it
    products    elsewhere, and for values of another width than the keys: matrix products in fp32 or more, over tiles
                of ROWS queries

All of them need memory linear in the tokens. Shapes: B batch, H heads, K key-value heads, G = H / K, T queries, S keys
(as many if causal), D head width.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

ROWS = 1024
"""Queries whose scores `products` computes at one time."""
ALIGNED = 32
"""The efficient kernel's logarithms are those of a multiple of so many queries; what is above the last is infinite."""
HIDDEN = float("-inf")
aten: Any = torch.ops.aten


class Backward(Protocol):
    """Gradients of q, k and v from one block, given the gradient of the output [B, H, T, D], and the output `out` and
    the logarithms `lse` over all blocks.
    """

    def __call__(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Kernel(NamedTuple):
    """`forward(q_BHTD, k_BKSD, v_BKSD, causal, scale)` -> (output [B, H, T, D], logarithms of its sums [B, H, T])."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Backward


def kernel_of(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Kernel:
    """The kernel for such tensors, and for any slices of their rows and tokens."""
    if q_BHTD.device.type == "cpu":
        return CPU if v_BKSD.shape[-1] == q_BHTD.shape[-1] else PRODUCTS
    if q_BHTD.device.type == "cuda":
        asked = torch.backends.cuda
        if asked.can_use_flash_attention(asked.SDPAParams(q_BHTD, k_BKSD, v_BKSD, None, 0.0, False, True)):
            return FLASH
        k, v = (_each_head(x, q_BHTD.shape[1]) for x in (k_BKSD[:, :, :1], v_BKSD[:, :, :1]))
        if asked.can_use_efficient_attention(asked.SDPAParams(q_BHTD[:, :, :1], k, v, None, 0.0, False, False)):
            return EFFICIENT
    return PRODUCTS


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention(*map(_dense, (q, k, v)), 0.0, causal, scale=scale)[:2]
    return out, lse


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty(0, dtype=torch.int64, device=q.device)  # of the generator, for dropout
    lengths = None, None, q.shape[2], k.shape[2]  # the first two: of rows of several lengths
    given = *map(_dense, (gradient, q, k, v, out)), lse.contiguous(), *lengths, 0.0, causal, state, state
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)
    return dq, dk, dv


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (_each_head(x, q.shape[1]) for x in (k, v))
    given = *map(_dense, (q, k, v)), None, True, 0.0, causal
    out, lse = aten._scaled_dot_product_efficient_attention(*given, scale=scale)[:2]
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    K, (k, v) = k.shape[1], (_each_head(x, q.shape[1]) for x in (k, v))
    state = torch.empty((), dtype=torch.int64, device=q.device)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % ALIGNED), value=torch.inf)
    given = *map(_dense, (gradient, q, k, v)), None, _dense(out), lse.contiguous(), state, state, 0.0
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(*given, wanted, causal, scale=scale)
    return dq, _each_group(dk, K), _each_group(dv, K)


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (_each_head(x, q.shape[1]) for x in (k, v))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*map(_dense, (q, k, v)), 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    K, (k, v) = k.shape[1], (_each_head(x, q.shape[1]) for x in (k, v))
    given = *map(_dense, (gradient, q, k, v, out)), lse, 0.0, causal
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, scale=scale)
    return dq, _each_group(dk, K), _each_group(dv, K)


def _products(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _raised(q.unflatten(1, (k.shape[1], -1)), k, v)
    outs, sums = [], []
    for rows, columns in _tiles(q.shape[3], k.shape[2], causal):
        scores = _scores(q[..., rows, :], k[..., columns, :], scale, rows, causal)
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("bkgts,bksd->bkgtd", scores.sub_(lse[..., None]).exp_(), v[..., columns, :]))
        sums.append(lse)
    return torch.cat(outs, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)


def _products_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The equations are those of FlashAttention-2, arXiv 2307.08691."""
    delta = (gradient.to(lse.dtype) * out).sum(-1)
    gradient, q, lse, delta = (x.unflatten(1, (k.shape[1], -1)) for x in (gradient, q, lse, delta))
    gradient, q, k, v = _raised(gradient, q, k, v)
    dk, dv, parts = torch.zeros_like(k), torch.zeros_like(v), []
    for rows, columns in _tiles(q.shape[3], k.shape[2], causal):
        q_t, gradient_t, k_s, v_s = q[..., rows, :], gradient[..., rows, :], k[..., columns, :], v[..., columns, :]
        weights = _scores(q_t, k_s, scale, rows, causal).sub_(lse[..., rows, None]).exp_()
        dv[..., columns, :] += torch.einsum("bkgts,bkgtd->bksd", weights, gradient_t)
        weights *= torch.einsum("bkgtd,bksd->bkgts", gradient_t, v_s).sub_(delta[..., rows, None]).mul_(scale)
        dk[..., columns, :] += torch.einsum("bkgts,bkgtd->bksd", weights, q_t)
        parts.append(torch.einsum("bkgts,bksd->bkgtd", weights, k_s))
    return torch.cat(parts, 3).flatten(1, 2), dk, dv


def _tiles(T: int, S: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys that they attend to)."""
    for first in range(0, T, ROWS):
        yield slice(first, first + ROWS), slice(0, first + ROWS if causal else S)


def _scores(q_BKGTD: Tensor, k_BKSD: Tensor, scale: float, rows: slice, causal: bool) -> Tensor:
    """[B, K, G, T, S] of the queries `rows` of a block."""
    scores = torch.einsum("bkgtd,bksd->bkgts", q_BKGTD, k_BKSD).mul_(scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(rows.start + 1)
        scores.masked_fill_(hidden, HIDDEN)
    return scores


def _raised(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _dense(x: Tensor) -> Tensor:
    """`x` with the numbers of a head next to each other, as the fused kernels expect them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _each_head(x_BKSD: Tensor, H: int) -> Tensor:
    """[B, H, S, D]: keys or values, repeated for each query head of their group."""
    K = x_BKSD.shape[1]
    return x_BKSD if K == H else x_BKSD[:, :, None].expand(-1, -1, H // K, -1, -1).flatten(1, 2)


def _each_group(x_BHSD: Tensor, K: int) -> Tensor:
    """[B, K, S, D]: the sums over the query heads of a group."""
    return x_BHSD if x_BHSD.shape[1] == K else x_BHSD.unflatten(1, (K, -1)).sum(2)


FLASH = Kernel("flash", _flash, _flash_backward)
EFFICIENT = Kernel("efficient", _efficient, _efficient_backward)
CPU = Kernel("cpu", _cpu, _cpu_backward)
PRODUCTS = Kernel("products", _products, _products_backward)
