"""Context parallelism (`mesh.cp=2`): every sequence is split over the ranks of the axis cp; only attention sees it
whole.

Everything else in a transformer treats tokens one by one, so a rank needs only its tokens and their positions
(split_check.py checks that):

    cp = {"group": mesh.group("cp"), "rank": mesh.coordinate["cp"], "size": mesh.shape.cp}
    context = Context(**cp, method="ring", device=mesh.device)
    part, position_ids = context.split(batch), context.position_ids(T)
    with context.active():
        loss = loss_of(model(part["inputs"], position_ids=position_ids), part["targets"])  # of this rank's tokens
        loss.backward()  # inside the context, because attention may be recomputed

The gradients and losses of the ranks are parts of one sum.

    ring      keys and values pass from rank to rank, and each rank joins the attention of its queries to them, block
              by block, from torch's fused kernels (Ring Attention, arXiv 2310.01889; ring.py, kernels.py). Of 2 x size
              chunks rank r holds chunks r and 2 x size - 1 - r, so that all ranks have the same work under a causal
              mask (for the reason, Striped Attention, arXiv 2311.09431; this zigzag layout is that of
              https://github.com/zhuzilin/ring-flash-attention and of Llama 3, arXiv 2407.21783). Any number of heads.
    ulysses   ranks exchange sequence for heads, each computes some heads over the whole sequence with torch's own
              kernel, of packed rows each document by itself, and they exchange back (DeepSpeed Ulysses, arXiv
              2309.14509). Rank r holds chunks 2r and 2r + 1; the number of heads must be a multiple of size.

Shapes: B batch, H heads, T a rank's tokens, D head width.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, Literal, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.autograd.function import once_differentiable

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import documents
from dtrain.parallel import ring

Method = Literal["ring", "ulysses"]
CPU = torch.device("cpu")
SDPA = torch.ops.aten.scaled_dot_product_attention.default

_open: list["Context"] = []
"""The active contexts, innermost last."""


@final
class Context:
    """One of the `size` ranks that share every sequence; all of them call the same methods in the same order.

    `device`: that of `position_ids`.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, size: int, method: Method, device: torch.device = CPU
    ) -> None:
        self.group, self.rank, self.size, self.method, self.device = group, rank, size, method, device
        self.checked = False
        """Whether a model was compared with itself on whole sequences (split_check.py)."""
        self.packed = False
        """Whether the rows of the newest batch hold several documents: its positions say so."""
        self.held: Tensor | None = None
        """`documents` of the forward that is running, for a model that builds its masks elsewhere."""
        self._positions: dict[int, Tensor] = {}
        self._calls = 0
        self._seen: tuple[Tensor, Any] | None = None
        """The newest documents of this rank's tokens, and what follows from those of all ranks."""

    def split(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch: every tensor [B, T, ...] is cut along dim 1, where T is the length of the first
        input with tokens; other tensors stay whole.

        Raises WordsError if T is not a multiple of 2 x size, and for a batch that cannot be split: an `attention_mask`
        with zeros, `position_ids` that are not those of documents, targets that are not one per token.
        """
        T = length_of(batch["inputs"], self.size)
        self.packed = documents.is_packed(batch["inputs"])
        self._check_length(T)

        def cut(part: Any, name: str) -> Any:
            if isinstance(part, Mapping):
                return {key: cut(value, key) for key, value in part.items()}
            self._check_meaning(part, name)
            return self.cut(part) if isinstance(part, Tensor) and part.ndim >= 2 and part.shape[1] == T else part

        parts = {key: cut(value, key) for key, value in batch.items()}
        targets = batch.get("targets")
        if isinstance(targets, Tensor) and targets.shape[1:2] != (T,):
            raise WordsError(
                f"mesh.cp={self.size}: dim 1 of the inputs is read as {T} tokens, but the targets "
                f"{list(targets.shape)} are not one per token, so they cannot be split with them. Type mesh.cp=1."
            )
        return parts

    def position_ids(self, T: int) -> Tensor:
        """The positions of this rank's tokens in the sequence of T: int64 [1, T / size], the same tensor every time.
        Raises WordsError as `split` does.
        """
        if T not in self._positions:
            self._check_length(T)
            self._positions[T] = self.cut(torch.arange(T, device=self.device)[None])
        return self._positions[T]

    def documents(self, position_ids: Tensor) -> Tensor | None:
        """A mask for `attention`: the documents of this rank's tokens, int64 [B, 1, 1, T]; None if rows are
        one document each.
        """
        if not self.packed:
            return None
        places = self.position_ids(position_ids.shape[1] * self.size)
        return documents.starts(position_ids, places)[:, None, None]

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """F.scaled_dot_product_attention of this rank's tokens [B, H, T, D] over the whole sequence. `attn_mask`: None,
        or `documents`; attention is causal in each.

        Raises WordsError for a mask, dropout, keys of another sequence, and heads that do not divide.
        """
        self._calls += 1
        self._check_call(query, key, attn_mask, dropout_p, enable_gqa)
        if torch.is_autocast_enabled(query.device.type):
            query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.method == "ulysses":
            lengths = None if attn_mask is None else self._of_all(attn_mask, _lengths)
            return self._by_heads(query, key, value, causal=is_causal, scale=scale, lengths=lengths)
        place = ring.Ring(self.group, self.rank, self.size)
        if attn_mask is None:
            pieces = ring.pieces_of(place, query.shape[2], is_causal)
        else:
            pieces = self._of_all(attn_mask, partial(_pieces, place))
        return ring.attention(query, key, value, pieces=pieces, scale=scale, ring=place)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which F.scaled_dot_product_attention is `attention`. Raises WordsError if nothing called it.

        The attribute is replaced, for torch.compile, and also the operator behind it, for code that imported the
        function earlier. Both apply to every thread (a CUDA backward that recomputes runs in its own). A TorchFunction
        mode would not: it is off in a backward.
        """
        _replace_operator()
        before, replaced, fast = self._calls, F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
        F.scaled_dot_product_attention = self._replacement
        # with its fast path nn.MultiheadAttention calls another kernel in evaluation
        torch.backends.mha.set_fastpath_enabled(False)
        _open.append(self)
        try:
            with documents.replaced(self.documents):
                yield
        finally:
            _open.pop()
            F.scaled_dot_product_attention = replaced
            torch.backends.mha.set_fastpath_enabled(fast)
        if self._calls == before:
            raise WordsError(
                f"mesh.cp={self.size}: the model never called F.scaled_dot_product_attention, the only place where a "
                "rank sees beyond its part of the sequence. Write its attention with that function (Hugging Face: "
                "attn_implementation=sdpa, where the model has it), or type mesh.cp=1."
            )

    @cached_property
    def _replacement(self) -> Callable[..., Tensor]:
        """Always the same object, because compiled code has a guard on it; not compiled, because it communicates."""
        return torch.compiler.disable(self.attention) if "torch._dynamo" in sys.modules else self.attention

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's two chunks along a dim of tokens."""
        parts, first, second = x.chunk(2 * self.size, dim), 2 * self.rank, 2 * self.rank + 1
        if self.method == "ring":
            first, second = self.rank, 2 * self.size - 1 - self.rank
        return torch.cat([parts[first], parts[second]], dim)

    def _of_all(self, mine: Tensor, follows: Callable[[list[Tensor]], Any]) -> Any:
        """`follows` of the documents of each rank's tokens; the layers of a forward share it. All ranks call it."""
        if self._seen is None or self._seen[0] is not mine:
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(parts, mine.contiguous(), group=self.group)
            self._seen = mine, follows([part[:, 0, 0] for part in parts])
        return self._seen[1]

    def _by_heads(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: list[list[int]] | None
    ) -> Tensor:
        """`lengths`: of the documents of packed rows, in their order; each is attended to by itself."""
        H, K = q.shape[1], k.shape[1]
        if H % self.size:
            raise WordsError(
                f"mesh.cp={self.size}: ulysses splits the heads of attention, and {H} heads do not divide by "
                f"{self.size}. Type context.attention=ring."
            )
        copies = math.lcm(K, self.size) // K
        k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
        q, k, v = (_Exchange.apply(x, 1, 2, self) for x in (q, k, v))  # type: ignore[no-untyped-call]
        attend = partial(SDPA.decompose, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        with torch._C.DisableTorchFunction():  # a mode such as that of strategy/reach.py would call the operator again
            if lengths is None:
                out = attend(q, k, v, None, 0.0, causal)
            else:
                rows = zip(*(x.split(1) for x in (q, k, v)), lengths, strict=True)
                out = torch.cat([_by_documents(row, each, attend) for *row, each in rows])
        return _Exchange.apply(out, 2, 1, self)  # type: ignore[no-any-return, no-untyped-call]

    def _check_length(self, T: int) -> None:
        chunks = 2 * self.size
        if T % chunks:
            lower = T // chunks * chunks
            fits = " or ".join(str(length) for length in (lower, lower + chunks) if length)
            raise WordsError(
                f"mesh.cp={self.size}: a sequence of {T} tokens does not split into {chunks} chunks. Give the data "
                f"rows of {fits} tokens: by data.sequence where the data has it, or by data.pad and data.length."
            )

    def _check_meaning(self, part: Any, name: str) -> None:
        if name == "attention_mask" and not (part == 1).all():
            raise WordsError(
                f"mesh.cp={self.size}: the attention_mask of the data hides tokens, which a split sequence cannot do. "
                "Do not pad samples, or type mesh.cp=1."
            )
        if name == documents.POSITIONS and (part.ndim != 2 or not _are_documents(part)):
            raise WordsError(
                f"mesh.cp={self.size}: the position_ids of the data are not 0, 1, 2, ... of one document after the "
                "other, and others cannot be split. Type mesh.cp=1."
            )

    def _check_call(self, q: Tensor, k: Tensor, mask: Tensor | None, dropout: float, grouped: bool) -> None:
        H, K = q.shape[1], k.shape[1]
        if mask is not None and mask.dtype != torch.int64:
            problem = "an attn_mask, which covers only a part of the sequence. Use is_causal=True or no mask"
        elif dropout > 0:
            problem = f"dropout_p={dropout}, which works on whole sequences only. Set the dropout of attention to 0"
        elif q.ndim != 4 or q.shape[2] != k.shape[2]:
            problem = f"queries {list(q.shape)} and keys {list(k.shape)}. Pass [B, H, T, D] of one sequence"
        elif H % K or (H != K and not grouped):
            problem = f"{H} query heads and {K} key heads. Pass enable_gqa=True, and a multiple of the key heads"
        elif q.shape[2] % 2:
            problem = f"{q.shape[2]} tokens, which are not two chunks of one length. Split the batch with Context.split"
        else:
            return
        raise WordsError(
            f"mesh.cp={self.size}: the model calls F.scaled_dot_product_attention with {problem}, or type mesh.cp=1."
        )


def _by_documents(row: Sequence[Tensor], lengths: list[int], attend: Callable[..., Tensor]) -> Tensor:
    """Causal attention in each document of a row."""
    parts = zip(*(x.split(lengths, 2) for x in row), strict=True)
    return torch.cat([attend(*part, None, 0.0, True) for part in parts], 2)


def _lengths(starts: list[Tensor]) -> list[list[int]]:
    """Of the documents of each whole row, from the documents of each rank's tokens [B, T]."""
    rows = torch.cat(starts, 1).cpu()
    return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in rows]


def _pieces(place: ring.Ring, starts: list[Tensor]) -> ring.Pieces:
    return ring.pieces_of_documents(place, torch.stack(starts).cpu())


def _are_documents(position_ids_BT: Tensor) -> bool:
    first, after = position_ids_BT[:, 0], position_ids_BT[:, 1:]
    return bool((first == 0).all() and ((after == 0) | (after == position_ids_BT[:, :-1] + 1)).all())


def length_of(inputs: Any, size: int) -> int:
    """The number of tokens of the first input that has a dim of tokens. Raises WordsError if there is none."""
    for part in inputs.values() if isinstance(inputs, Mapping) else [inputs]:
        if isinstance(part, Tensor) and (part.ndim == 3 or (part.ndim == 2 and not part.is_floating_point())):
            return part.shape[1]
        if isinstance(part, Tensor) and part.ndim > 3:
            raise WordsError(
                f"mesh.cp={size}: the inputs {list(part.shape)} look like images, which have no sequence to split. "
                "Type mesh.cp=1."
            )
    raise WordsError(
        f"mesh.cp={size}: the inputs have no dim of tokens to split; integers [B, T] are needed. Type mesh.cp=1."
    )


@cache
def _replace_operator() -> library.Library:
    """From now on the operator calls the innermost active context, if there is one.
    https://docs.pytorch.org/docs/stable/library.html
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        if _open and torch.compiler.is_compiling():  # tracing would communicate
            raise WordsError(
                "model: to be split and compiled, it must call F.scaled_dot_product_attention by that name. Type "
                "compile=none."
            )
        return _open[-1].attention(*args, **kwargs) if _open else SDPA.decompose(*args, **kwargs)

    operators = library.Library("aten", "IMPL")
    for key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA"):
        operators.impl("scaled_dot_product_attention", called, key)
    return operators


class _Exchange(torch.autograd.Function):
    """Split dim `cut` over the ranks and concatenate dim `join` from them; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, context: Context) -> Tensor:
        ctx.back = join, cut, context
        return _exchange(x, cut, join, context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, *ctx.back), None, None, None


def _exchange(x: Tensor, cut: int, join: int, context: Context) -> Tensor:
    sent = torch.stack(x.chunk(context.size, cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.group)
    return torch.cat(received.unbind(), join)


def innermost() -> Context | None:
    """The innermost active context, or None."""
    return _open[-1] if _open else None


def context_of(mesh: Mesh, method: Method) -> Context | None:
    """The context of a mesh; None if every rank has whole sequences."""
    if mesh.shape.cp == 1:
        return None
    return Context(mesh.group("cp"), mesh.coordinate["cp"], mesh.shape.cp, method, mesh.device)


def check(model: nn.Module) -> None:
    """Raises WordsError for a model without an argument for the positions of its tokens."""
    takes = inspect.signature(model.forward).parameters.values()
    if not any(parameter.name == "position_ids" or parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        raise WordsError(
            f"mesh.cp: the forward of {type(model).__name__} takes no position_ids, so it cannot know the "
            "positions of a part of a sequence. Add it to a model of sequences (integers [1, T]), or leave out mesh.cp."
        )
