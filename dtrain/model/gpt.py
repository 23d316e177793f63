"""A decoder-only transformer as one would write it today.

Shapes: B batch, T tokens, C width, H heads, K key-value heads, D = C / H head width, V vocabulary.
Pre-norm blocks (RMSNorm, arXiv 1910.07467), rotary positions (arXiv 2104.09864), SwiGLU (arXiv 2002.05202), grouped-query attention
(arXiv 2305.13245), normalised queries and keys (arXiv 2302.05442), output projections that start at zero (arXiv 2203.03466),
embeddings times sqrt(C) (arXiv 1706.03762).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.rms_norm(x_BTC, self.weight.shape, self.weight)


class Rotary:
    """cos and sin of every position and frequency, kept for the longest sequence seen."""

    def __init__(self, width: int, base: float) -> None:
        self.width, self.base = width, base
        self._cached: tuple[Tensor, Tensor] | None = None

    def __call__(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two tensors [T, 1, D] in fp32, for `rotate`."""
        if self._cached is None or self._cached[0].shape[0] < tokens or self._cached[0].device != device:
            frequencies = self.base ** (-torch.arange(0, self.width, 2, device=device, dtype=torch.float32) / self.width)
            angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), frequencies)[:, None]
            self._cached = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
        cos, sin = self._cached
        return cos[:tokens], sin[:tokens]


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[..., i], x[..., i + D/2]) by the angle of their position; the sign of the first half is in `sin`."""
    return (x_BTHD * cos + x_BTHD.roll(x_BTHD.shape[-1] // 2, -1) * sin).to(x_BTHD.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        D = self.head_width
        q, k = self.q(x_BTC).view(B, T, -1, D), self.k(x_BTC).view(B, T, -1, D)
        v_BKTD = self.v(x_BTC).view(B, T, -1, D).transpose(1, 2)
        q_BHTD = rotate(F.rms_norm(q, (D,)), cos, sin).transpose(1, 2).to(v_BKTD.dtype)
        k_BKTD = rotate(F.rms_norm(k, (D,)), cos, sin).transpose(1, 2).to(v_BKTD.dtype)
        grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
        x_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=grouped)
        return self.out(x_BHTD.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), Attention(width, heads, kv_heads)
        self.feed_forward_norm, self.feed_forward = RMSNorm(width), FeedForward(width, hidden)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos, sin)
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, V].

    `kv_heads=None` means as many as heads; `hidden=None` is 8/3 of the width rounded up to a multiple of 64, as many weights as
    a plain feed-forward of 4x. Raises ValueError when heads do not divide.
    """

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
        super().__init__()
        if min(vocab, layers, heads, width) < 1:
            raise ValueError(f"model.vocab={vocab} model.layers={layers} model.heads={heads} model.width={width} must be at least 1")
        kv_heads = kv_heads or heads
        if width % heads or (width // heads) % 2:
            raise ValueError(f"model.width={width} must be an even multiple of model.heads={heads}")
        if heads % kv_heads:
            raise ValueError(f"model.heads={heads} must be a multiple of model.kv_heads={kv_heads}")
        hidden = hidden or 64 * math.ceil(width * 8 / 3 / 64)
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.rotary = Rotary(width // heads, rope_base)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        cos, sin = self.rotary(tokens_BT.shape[1], tokens_BT.device)
        x_BTC = self.embed(tokens_BT) * self.embed.embedding_dim**0.5
        for block in self.blocks:
            x_BTC = block(x_BTC, cos, sin)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Norms one, output projections zero, everything else 1 / sqrt(fan in), embedding and head a quarter of it.

        The residual stream starts at 1/4 of what the norms make of it. At a tenth of that they magnify rounding: the loss of two
        meshes parts 100x faster.
        """
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
        elif name.endswith(("attention.out.weight", "feed_forward.down.weight")):
            weight.zero_()
        elif name.startswith(("embed.", "head.")):
            weight.normal_(std=0.25 * weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
