"""Ring attention: keys and values pass from rank to rank, and each rank accumulates the attention of its queries to
every block (arXiv 2310.01889).

A block is one call of torch's flash kernel for 16-bit types on a GPU, else, and for packed rows, which that kernel does
not know, matrix products in fp32, the same everywhere.

Shapes: B batch, H heads, K key-value heads, G = H / K, T a rank's tokens, S the tokens of a block of keys, D head
width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 1024
"""Queries whose scores exist at one time: memory grows with ROWS x T, not with T x T."""
FLASH = {
    "cuda": (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    ),
    "cpu": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
}
"""Device -> torch's operators behind F.scaled_dot_product_attention: the forward, which returns (output, logarithm of
the sums, state for the backward), and its backward.
"""
HIDDEN = -1e30
"""A score that adds nothing to a sum; finite, because a query may see no key of a block of other documents."""
Pair = tuple[Tensor, Tensor]
WIDEST = 256
"""Largest head width of the CUDA kernel; it must be a multiple of 8."""


class Ring(NamedTuple):
    """This rank among the `size` ranks of the ring."""

    group: dist.ProcessGroup
    rank: int
    size: int


def attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool, scale: float, ring: Ring,
    documents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B, H, T, D] of this rank's queries over the keys of all ranks, which hold chunks rank and 2 x size - 1 - rank of
    the sequence. `documents` int64 [B, T]: of these queries and keys, which meet in one document only.
    """
    return _Ring.apply(q_BHTD, k_BKTD, v_BKTD, documents, causal, scale, ring)  # type: ignore


def takes_flash(query: Tensor) -> bool:
    """Whether blocks of such queries are computed by the flash kernel. Not on the CPU, where meshes are compared in
    fp32.
    """
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= WIDEST
    )


class _Ring(torch.autograd.Function):
    """Blocks of keys and values pass from rank to rank; partial results are merged by the logarithms of their sums
    (arXiv 2112.05682).

    The backward passes the blocks round once more. Their gradients follow one rank behind, and are home after the last
    step.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, documents: Tensor | None, causal: bool, scale: float,
        ring: Ring,
    ) -> Tensor:  # fmt: skip
        ctx.causal, ctx.scale, ctx.ring = causal, scale, ring
        q_BKGTD = q_BHTD.unflatten(1, (k_BKTD.shape[1], -1))
        with torch.autocast(q_BHTD.device.type, enabled=False):
            blocks = _pass_round(ring, _moved(k_BKTD, v_BKTD, documents))
            _, (k, v, *theirs) = next(blocks)
            block_attention = flash_attention if documents is None and takes_flash(q_BHTD) else product_attention
            out, lse = block_attention(q_BKGTD, k, v, causal, scale, *_pairs(documents, theirs))
            for source, (k, v, *theirs) in blocks:
                rows, columns = _seen(ring, source, causal, q_BHTD.shape[2])
                pairs = _pairs(documents, theirs, rows, columns)
                more = block_attention(
                    q_BKGTD[..., rows, :], k[..., columns, :], v[..., columns, :], False, scale, *pairs
                )
                _join(out[..., rows, :], lse[..., rows], *more)
        out_BHTD = out.flatten(1, 2).to(q_BHTD.dtype)
        ctx.save_for_backward(q_BHTD, k_BKTD, v_BKTD, documents, out_BHTD, lse)
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BKTD, v_BKTD, documents, out_BHTD, lse = ctx.saved_tensors
        ring, heads = ctx.ring, (k_BKTD.shape[1], -1)
        q, gradient = q_BHTD.unflatten(1, heads), gradient_BHTD.unflatten(1, heads)
        with torch.autocast(q.device.type, enabled=False):
            block_gradients = flash_gradients if documents is None and takes_flash(q) else product_gradients
            out = out_BHTD.unflatten(1, heads)
            dq = torch.zeros_like(q, dtype=lse.dtype)
            sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k_BKTD, v_BKTD)]
            moving: _Transfer | None = None
            for source, (k, v, *theirs) in _pass_round(ring, _moved(k_BKTD, v_BKTD, documents)):
                rows, columns = _seen(ring, source, ctx.causal, q.shape[3])
                mine = (q[..., rows, :], gradient[..., rows, :], out[..., rows, :], lse[..., rows])
                causal, pairs = ctx.causal and source == ring.rank, _pairs(documents, theirs, rows, columns)
                part, *parts = block_gradients(*mine, k[..., columns, :], v[..., columns, :], causal, ctx.scale, *pairs)
                dq[..., rows, :] += part
                if moving:
                    sums = moving.wait()
                for whole, add in zip(sums, parts, strict=True):
                    whole[..., columns, :] += add
                moving = _Transfer(ring, sums)
            assert moving
            dk, dv = moving.wait()
        return dq.flatten(1, 2).to(q.dtype), dk.to(k_BKTD.dtype), dv.to(v_BKTD.dtype), None, None, None, None


def _moved(k: Tensor, v: Tensor, documents: Tensor | None) -> list[Tensor]:
    """The tensors that pass from rank to rank."""
    return [k.contiguous(), v.contiguous(), *([] if documents is None else [documents])]


def _pairs(
    mine: Tensor | None, theirs: Sequence[Tensor], rows: slice = slice(None), columns: slice = slice(None)
) -> list[Pair]:
    """[(documents of the queries, of the keys) of a block]; empty if rows are one document each."""
    return [] if mine is None else [(mine[:, rows], theirs[0][:, columns])]


def _seen(ring: Ring, source: int, causal: bool, T: int) -> tuple[slice, slice]:
    """(queries of this rank, keys of `source`) that meet: a causal mask shows or hides a chunk of another rank as a
    whole.

    Of an earlier rank, the first chunk comes before both chunks of this rank and the second after them; both chunks of
    a later rank come between them.
    """
    if not causal or source == ring.rank:
        return slice(0, T), slice(0, T)
    return (slice(0, T), slice(0, T // 2)) if source < ring.rank else (slice(T // 2, T), slice(0, T))


class _Transfer:
    """Send `tensors` to the next rank, and receive tensors of the same shapes from the one before."""

    def __init__(self, ring: Ring, tensors: Sequence[Tensor]) -> None:
        self._sent, self._received = tensors, [torch.empty_like(tensor) for tensor in tensors]
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        operations = [dist.P2POp(dist.isend, tensor, group=ring.group, group_peer=after) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, group=ring.group, group_peer=before) for tensor in self._received]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._received


def _pass_round(ring: Ring, tensors: list[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """(source rank, its tensors), this rank's first; the next ones are received meanwhile."""
    for step in range(ring.size):
        transfer = _Transfer(ring, tensors) if step + 1 < ring.size else None
        yield (ring.rank - step) % ring.size, tensors
        if transfer:
            tensors = transfer.wait()


def product_attention(
    q_BKGTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, scale: float, pair: Pair | None = None
) -> tuple[Tensor, Tensor]:
    """(attention [B, K, G, T, D], logarithm of the sum of exponentials of its scores [B, K, G, T]) of one block, in
    fp32 or more. `pair`: documents of the queries [B, T] and of the keys [B, S].
    """
    q, k, v = _raised(q_BKGTD, k_BKSD, v_BKSD)
    outs, sums = [], []
    for rows, columns in _tiles(q.shape[3], k.shape[2], causal):
        scores = _scores(q[..., rows, :], k[..., columns, :], scale, rows, causal, pair)
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("bkgts,bksd->bkgtd", scores.sub_(lse[..., None]).exp_(), v[..., columns, :]))
        sums.append(lse)
    return torch.cat(outs, 3), torch.cat(sums, 3)


def product_gradients(
    q: Tensor, gradient: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    pair: Pair | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v from one block, given the whole output, its gradient, and the lse over all blocks.

    The equations are those of FlashAttention-2, arXiv 2307.08691.
    """
    delta = (gradient.to(lse.dtype) * out).sum(-1)
    q, gradient, k, v = _raised(q, gradient, k, v)
    dk, dv, parts = torch.zeros_like(k), torch.zeros_like(v), []
    for rows, columns in _tiles(q.shape[3], k.shape[2], causal):
        q_t, gradient_t, k_s, v_s = q[..., rows, :], gradient[..., rows, :], k[..., columns, :], v[..., columns, :]
        weights = _scores(q_t, k_s, scale, rows, causal, pair).sub_(lse[..., rows, None]).exp_()
        dv[..., columns, :] += torch.einsum("bkgts,bkgtd->bksd", weights, gradient_t)
        weights *= torch.einsum("bkgtd,bksd->bkgts", gradient_t, v_s).sub_(delta[..., rows, None]).mul_(scale)
        dk[..., columns, :] += torch.einsum("bkgts,bkgtd->bksd", weights, q_t)
        parts.append(torch.einsum("bkgts,bksd->bkgtd", weights, k_s))
    return [torch.cat(parts, 3), dk, dv]


def flash_attention(
    q_BKGTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As `product_attention`, by one kernel that multiplies in the type of its inputs and adds up in fp32."""
    forward, groups = FLASH[q_BKGTD.device.type][0], q_BKGTD.shape[1:3]
    out, lse = forward(
        q_BKGTD.flatten(1, 2), _each_head(k_BKSD, groups), _each_head(v_BKSD, groups), 0.0, causal, scale=scale
    )[:2]
    return out.unflatten(1, groups).float(), lse.unflatten(1, groups)


def flash_gradients(
    q: Tensor, gradient: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    """As `product_gradients`, by the kernel's own backward."""
    backward, groups = FLASH[q.device.type][1], q.shape[1:3]
    inputs = _each_head(k, groups), _each_head(v, groups)
    queries = [x.flatten(1, 2).contiguous() for x in (gradient, q)]
    results = [x.flatten(1, 2).contiguous() for x in (out, lse)]
    if q.device.type == "cuda":  # `unused`: the generator's state for dropout
        unused = torch.empty(0, dtype=torch.int64, device=q.device)
        extra: tuple[Any, ...] = (None, None, q.shape[3], k.shape[2], 0.0, causal, unused, unused)
    else:
        extra = (0.0, causal)
    dq, dk, dv = backward(*queries, *inputs, *results, *extra, scale=scale)
    return [dq.unflatten(1, groups).float(), *(x.unflatten(1, groups).float().sum(2) for x in (dk, dv))]


def _each_head(x_BKSD: Tensor, groups: Sequence[int]) -> Tensor:
    """[B, H, S, D]: keys or values, repeated for each query head of their group."""
    return x_BKSD[:, :, None].expand(-1, -1, groups[1], -1, -1).flatten(1, 2)


def _raised(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _tiles(T: int, S: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys that they attend to)."""
    for first in range(0, T, ROWS):
        yield slice(first, first + ROWS), slice(0, first + ROWS if causal else S)


def _scores(q_BKGTD: Tensor, k_BKSD: Tensor, scale: float, rows: slice, causal: bool, pair: Pair | None) -> Tensor:
    """[B, K, G, T, S] of the queries `rows` of a block."""
    scores = torch.einsum("bkgtd,bksd->bkgts", q_BKGTD, k_BKSD).mul_(scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(rows.start + 1)
        scores.masked_fill_(hidden, HIDDEN)
    if pair is not None:
        mine, theirs = pair[0][:, None, None, rows, None], pair[1][:, None, None, None, : scores.shape[-1]]
        scores.masked_fill_(mine != theirs, HIDDEN)
    return scores


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a block's result to `out` and `lse`, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(more, (more_lse - total).exp_()[..., None])
    lse.copy_(total)
