"""Ring attention: keys and values pass from rank to rank, and each rank joins the attention of its queries to every
block (arXiv 2310.01889).

A block is computed by one of torch's fused kernels, forward and backward (kernels.py). No mask is needed: the chunks of
a causal sequence, and the documents of packed rows, meet as whole rectangles or as causal squares, the pieces of a
block.

Shapes: B batch, H heads, K key-value heads, T a rank's tokens, D head width, R ranks.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.parallel.kernels import kernel_of

ALL = slice(None)


class Ring(NamedTuple):
    """This rank among the `size` ranks of the ring."""

    group: dist.ProcessGroup
    rank: int
    size: int


class Piece(NamedTuple):
    """Queries of this rank that attend to keys of another, in some rows of the batch; `causal`: they are as many, and
    each attends to the keys up to its own place.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool


Pieces = Sequence[Sequence[Piece]]
"""Of the block of each rank; every query is in a piece of its own rank's block."""


def attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, pieces: Pieces, scale: float, ring: Ring
) -> Tensor:  # fmt: skip
    """[B, H, T, D] of this rank's queries over the keys of all ranks, which hold chunks rank and 2 x size - 1 - rank of
    the sequence.
    """
    return _Ring.apply(q_BHTD, k_BKTD, v_BKTD, pieces, scale, ring)  # type: ignore


def pieces_of(ring: Ring, T: int, causal: bool) -> Pieces:
    """The pieces of rows of one document each."""
    pieces = list[list[Piece]]()
    for source in range(ring.size):
        queries, keys = _seen(ring, source, T) if causal else (slice(0, T), slice(0, T))
        pieces.append([Piece(ALL, queries, keys, causal and source == ring.rank)])
    return pieces


def pieces_of_documents(ring: Ring, starts_RBT: Tensor) -> Pieces:
    """The pieces of packed rows, in which tokens attend to those before them in their document. `starts_RBT`: of each
    rank's tokens the place at which their document begins, in the memory of the host.

    A rank's tokens are in the order of the sequence, so those of a document follow one another. Two blocks share few
    documents, and see each of them as a rectangle.
    """
    pieces = list[list[Piece]]()
    for source in range(ring.size):
        queries, keys = _seen(ring, source, starts_RBT.shape[2])
        block = list[Piece]()
        for row in range(starts_RBT.shape[1]):
            mine = _documents(starts_RBT[ring.rank, row], queries)
            theirs = _documents(starts_RBT[source, row], keys)
            shared = (
                Piece(slice(row, row + 1), mine[start], theirs[start], source == ring.rank)
                for start in mine
                if start in theirs
            )
            block += shared
        pieces.append(block)
    return pieces


def _documents(starts_T: Tensor, tokens: slice) -> dict[int, slice]:
    """The start of each document -> its tokens, of some tokens of a row."""
    starts, counts = torch.unique_consecutive(starts_T[tokens], return_counts=True)
    ends = (tokens.start + counts.cumsum(0)).tolist()
    return {
        start: slice(end - count, end) for start, count, end in zip(starts.tolist(), counts.tolist(), ends, strict=True)
    }


def _seen(ring: Ring, source: int, T: int) -> tuple[slice, slice]:
    """(queries of this rank, keys of `source`) that meet: a causal mask shows or hides a chunk of another rank as a
    whole.

    Of an earlier rank, the first chunk comes before both chunks of this rank and the second after them; both chunks of
    a later rank come between them.
    """
    if source == ring.rank:
        return slice(0, T), slice(0, T)
    return (slice(0, T), slice(0, T // 2)) if source < ring.rank else (slice(T // 2, T), slice(0, T))


class _Ring(torch.autograd.Function):
    """Blocks of keys and values pass from rank to rank; partial results are joined by the logarithms of their sums
    (arXiv 2112.05682).

    The backward passes the blocks round once more: each is that of its kernel, given output and logarithms over all
    blocks, as in https://github.com/zhuzilin/ring-flash-attention. The gradients of keys and values follow one rank
    behind, and are home after the last step.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, pieces: Pieces, scale: float, ring: Ring
    ) -> Tensor:
        ctx.pieces, ctx.scale, ctx.ring, ctx.kernel = pieces, scale, ring, kernel_of(q_BHTD, k_BKTD, v_BKTD)
        high = torch.promote_types(q_BHTD.dtype, torch.float32)
        B, H, T, _ = q_BHTD.shape
        # tokens before heads, as sdpa does: what follows joins the heads without a copy
        out = torch.empty(B, T, H, v_BKTD.shape[3], dtype=high, device=q_BHTD.device).transpose(1, 2)
        lse = torch.empty(B, H, T, dtype=high, device=q_BHTD.device)
        with torch.autocast(q_BHTD.device.type, enabled=False):
            for source, (k, v) in _pass_round(ring, [k_BKTD.contiguous(), v_BKTD.contiguous()]):
                for rows, queries, keys, causal in pieces[source]:
                    block = q_BHTD[rows, :, queries], k[rows, :, keys], v[rows, :, keys]
                    more = ctx.kernel.forward(*block, causal, scale)
                    join = _put if source == ring.rank else _join
                    join(out[rows, :, queries], lse[rows, :, queries], *more)
        out_BHTD = out.to(q_BHTD.dtype)
        ctx.save_for_backward(q_BHTD, k_BKTD, v_BKTD, out_BHTD, lse)
        return out_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BKTD, v_BKTD, out_BHTD, lse = ctx.saved_tensors
        ring, moving = ctx.ring, None
        dq, *sums = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q_BHTD, k_BKTD, v_BKTD))
        with torch.autocast(q_BHTD.device.type, enabled=False):
            for source, (k, v) in _pass_round(ring, [k_BKTD.contiguous(), v_BKTD.contiguous()]):
                parts = list[tuple[Tensor, Tensor, Tensor]]()
                for rows, queries, keys, causal in ctx.pieces[source]:
                    gradient, q, out, logs = (x[rows, :, queries] for x in (gradient_BHTD, q_BHTD, out_BHTD, lse))
                    block = q, k[rows, :, keys], v[rows, :, keys]
                    part = ctx.kernel.backward(gradient, *block, out=out, lse=logs, causal=causal, scale=ctx.scale)
                    parts.append(part)
                sums = moving.wait() if moving else sums
                for (rows, queries, keys, _), part in zip(ctx.pieces[source], parts, strict=True):
                    for whole, add, tokens in zip((dq, *sums), part, (queries, keys, keys), strict=True):
                        whole[rows, :, tokens] += add
                moving = _Transfer(ring, sums)
            assert moving
            dk, dv = moving.wait()
        return dq.to(q_BHTD.dtype), dk.to(k_BKTD.dtype), dv.to(v_BKTD.dtype), None, None, None


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


def _put(out: Tensor, lse: Tensor, first: Tensor, first_lse: Tensor) -> None:
    out.copy_(first)
    lse.copy_(first_lse)


def _join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a block's result to `out` and `lse`, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_()[..., None]).addcmul_(more, (more_lse - total).exp_()[..., None])
    lse.copy_(total)
