"""A decoder-only transformer as one would write it today.

Shapes: B batch, T tokens, C width, H heads, K key-value heads, D = C / H head width, V vocabulary.
Pre-norm blocks (RMSNorm, arXiv 1910.07467), rotary positions (arXiv 2104.09864), SwiGLU (arXiv 2002.05202),
grouped-query attention (arXiv 2305.13245), normalised queries and keys (arXiv 2302.05442), output projections that
start at zero (arXiv 2203.03466), embeddings times sqrt(C) (arXiv 1706.03762).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.model import documents
from dtrain.model.cache import LayerCache


def product_type(x: Tensor) -> torch.dtype:
    """The type in which matrices are multiplied: that of autocast, or else of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rms_norm(x: Tensor, weight_C: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight over the last dim, in the type of `x`. autocast computes it in fp32 on a GPU from torch 2.12
    on, and in no other case (https://docs.pytorch.org/docs/stable/amp.html), so it is off here.
    """
    weight_C = None if weight_C is None else weight_C.to(x.dtype)
    if not torch.is_autocast_enabled(x.device.type):
        return F.rms_norm(x, x.shape[-1:], weight_C)
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], weight_C)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return rms_norm(x_BTC, self.weight)


class Scale(nn.Module):
    """x times a number, in the type of matrix products."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x.to(product_type(x)) * self.by


class Embedding(nn.Embedding):
    """Rows times sqrt(C), in the type of matrix products: so is the residual stream, whatever the type of the
    weight.
    """

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__(vocab, width)
        self.scale = Scale(width**0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        scaled_BTC: Tensor = self.scale(super().forward(tokens_BT))
        return scaled_BTC


class Rotary:
    """cos and sin of every position and frequency, kept for the longest sequence seen, or for the positions asked for
    last.
    """

    def __init__(self, width: int, base: float) -> None:
        self.width, self.base = width, base
        self._cached: tuple[Tensor, Tensor] | None = None
        self._asked: tuple[Tensor, tuple[Tensor, Tensor]] | None = None

    def __call__(self, tokens: int, device: torch.device, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Two tensors [T, 1, D] in fp32 (or [B, T, 1, D] for `position_ids` [B, T]), for `rotate`."""
        if torch.compiler.is_compiling():  # a graph that is computed twice may set no attribute
            return self._angles(torch.arange(tokens, device=device) if position_ids is None else position_ids)
        if position_ids is not None:
            if self._asked is None or self._asked[0] is not position_ids:
                self._asked = position_ids, self._angles(position_ids)
            return self._asked[1]
        if self._cached is None or self._cached[0].shape[0] < tokens or self._cached[0].device != device:
            self._cached = self._angles(torch.arange(tokens, device=device))
        cos, sin = self._cached
        return cos[:tokens], sin[:tokens]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        powers = -torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float32) / self.width
        frequencies = self.base**powers
        angles = (positions.float()[..., None] * frequencies)[..., None, :]
        return torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[..., i], x[..., i + D/2]) by the angle of their position; the sign of the first half is in
    `sin`.
    """
    return (x_BTHD * cos + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin).to(x_BTHD.dtype)


def products(x_BTC: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """The output of each layer. In a compiled block where autocast casts the weights, one product computes all: the
    cast writes them side by side, and the backward adds up no gradients of `x_BTC`.
    """
    is_joined = torch.compiler.is_compiling() and all(_is_cast(layer, product_type(x_BTC)) for layer in layers)
    return joined(x_BTC, layers) if is_joined else [layer(x_BTC) for layer in layers]


def joined(x_BTC: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
    """The outputs of linear layers without a bias, by one product."""
    weights = [layer.weight for layer in layers]
    return F.linear(x_BTC, torch.cat(weights)).split([len(weight) for weight in weights], -1)


def _is_cast(layer: nn.Module, product: torch.dtype) -> bool:
    """Whether autocast casts the weight of a linear layer, which no adapter, precision or split of tensor parallelism
    has changed.
    """
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) is nn.Linear and not hooks and layer.weight.dtype != product


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.cache: LayerCache | None = None
        self.head_width = width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x_BTC: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        D = self.head_width
        q, k, v = products(x_BTC, self.q, self.k, self.v)
        B, T = q.shape[:2]  # a split sequence is whole here
        q, k, v_BKTD = q.view(B, T, -1, D), k.view(B, T, -1, D), v.view(B, T, -1, D).transpose(1, 2)
        if self.cache is not None:
            position_ids = self.cache.shared.positions(T, q.device)
        cos, sin = self.rotary(T, q.device, position_ids)
        q_BHTD = rotate(rms_norm(q), cos, sin).transpose(1, 2).to(v_BKTD.dtype)
        k_BKTD = rotate(rms_norm(k), cos, sin).transpose(1, 2).to(v_BKTD.dtype)
        if self.cache is not None:
            x_BHTD = self.cache.attend(q_BHTD, k_BKTD, v_BKTD)
        else:
            grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
            if mask is not None and mask.is_floating_point():
                mask = mask.to(q_BHTD.dtype)
            x_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BKTD, v_BKTD, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        return self.out(x_BHTD.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = products(x_BTC, self.gate, self.up)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width: int, attention: Attention, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), attention
        self.feed_forward_norm, self.feed_forward = RMSNorm(width), feed_forward

    def forward(self, x_BTC: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), position_ids, mask)
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))


class Decoder(nn.Module):
    """Tokens [B, T] -> logits [B, T, V]: embedding, blocks, norm and head."""

    pipeline = ("embed", "blocks", "norm", "head")
    fused: ClassVar = ("embed.scale", "norm")
    """Modules that are compiled beside the blocks. Rows are looked up outside: compiled, their gradients would add up
    in any order."""
    keeps_keys: ClassVar = True
    """Every attention has a `cache`, and is called with the new tokens alone while it is set."""
    as_transformers: Mapping[str, Any]
    """config.json of a model of transformers that computes the same, for an export."""

    def __init__(self, vocab: int, width: int, blocks: Iterable[nn.Module], *, tied: bool) -> None:
        super().__init__()
        self.embed = Embedding(vocab, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """`position_ids` [B or 1, T]: where in its document each token stands (dtrain/model/documents.py); None: rows
        are one document each.
        """
        x_BTC = self.embed(input_ids)
        mask = documents.mask(position_ids, product_type(x_BTC))
        for block in self.blocks:
            x_BTC = block(x_BTC, position_ids, mask)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


@final
class GPT(Decoder):
    """Tokens [B, T] -> logits [B, T, V].

    `pipeline` lists the modules in the order they run, where it may be cut; `tp_plan` says how tensor parallelism
    splits them.

    `kv_heads=None` means as many as heads; `hidden=None` is 8/3 of the width rounded up to a multiple of 64, as many
    weights as a plain feed-forward of 4x. Raises ValueError when heads do not divide.
    """

    tp_plan: ClassVar[Mapping[str, str]] = {
        "embed": "embedding_rowwise",
        "blocks.*.attention_norm": "sequence_parallel",
        "blocks.*.attention.q": "colwise",
        "blocks.*.attention.k": "colwise",
        "blocks.*.attention.v": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.feed_forward_norm": "sequence_parallel",
        "blocks.*.feed_forward.gate": "colwise",
        "blocks.*.feed_forward.up": "colwise",
        "blocks.*.feed_forward.down": "rowwise",
        "norm": "sequence_parallel",
        "head": "colwise_gather_output",
    }

    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        heads: int,
        width: int,
        kv_heads: int | None = None,
        hidden: int | None = None,
        tied: bool = False,
        rope_base: float = 10000.0,
    ) -> None:
        kv_heads = kv_heads or heads
        check_sizes(vocab=vocab, layers=layers, heads=heads, width=width, kv_heads=kv_heads)
        hidden = hidden or 64 * math.ceil(width * 8 / 3 / 64)
        rotary = Rotary(width // heads, rope_base)
        blocks = (
            Block(width, Attention(width, heads, kv_heads, rotary), FeedForward(width, hidden)) for _ in range(layers)
        )
        super().__init__(vocab, width, blocks, tied=tied)
        self.as_transformers = described(
            "qwen3", "Qwen3ForCausalLM", vocab=vocab, layers=layers, heads=heads, width=width, kv_heads=kv_heads,
            rope_base=rope_base,
        ) | {"intermediate_size": hidden}  # fmt: skip

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Norms one, output projections zero, everything else 1 / sqrt(fan in), embedding and head a quarter of it.

        The residual stream starts at 1/4 of what the norms make of it. At a tenth of that they magnify rounding: the
        loss of two meshes parts 100x faster.
        """
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("attention.out.weight", "feed_forward.down.weight")):
            weight.zero_()
        elif name.startswith(("embed.", "head.")):
            weight.normal_(std=0.25 * weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)


def described(
    kind: str, name: str, *, vocab: int, layers: int, heads: int, width: int, kv_heads: int, rope_base: float
) -> dict[str, Any]:
    """config.json of a decoder of transformers for one of ours, whose head is not tied there."""
    return {
        "architectures": [name], "model_type": kind, "vocab_size": vocab, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": width // heads, "hidden_act": "silu", "rms_norm_eps": torch.finfo(torch.float32).eps,
        "attention_bias": False, "tie_word_embeddings": False, "dtype": "float32", "bos_token_id": None,
        "eos_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": rope_base},
    }  # fmt: skip


def check_sizes(*, heads: int, kv_heads: int, width: int, **sizes: int) -> None:
    """Raises ValueError for sizes below 1, and for heads that do not divide."""
    for name, size in {**sizes, "heads": heads, "width": width}.items():
        if size < 1:
            raise ValueError(f"model.{name}={size} must be at least 1")
    if width % heads or (width // heads) % 2:
        raise ValueError(f"model.width={width} must be an even multiple of model.heads={heads}")
    if heads % kv_heads:
        raise ValueError(f"model.heads={heads} must be a multiple of model.kv_heads={kv_heads}")
