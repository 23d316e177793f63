"""Keys and values of the tokens so far, so that each new token costs one position and not the whole sequence.

Shapes: B sequences, T new tokens of each, K key-value heads, D head width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOM = 64
"""Positions that a cache has room for at first; it doubles when they are full."""


class KVCache:
    """The number of tokens of each sequence in the caches; all layers share it."""

    def __init__(self) -> None:
        self.lengths_B = torch.zeros(0, dtype=torch.long)
        self._positions: Tensor | None = None

    def begin(self, sequences: int) -> None:
        self.lengths_B = torch.zeros(sequences, dtype=torch.long)
        self._positions = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """[B, T]: where the next tokens stand. The same tensor for every layer of a forward."""
        if self._positions is None or self._positions.shape[1] != tokens:
            self._positions = (self.lengths_B[:, None] + torch.arange(tokens)).to(device)
        return self._positions

    def advance(self, tokens_B: Tensor) -> None:
        """Keep so many of the newest tokens of each sequence; what came after them was padding, and is written over."""
        self.lengths_B = self.lengths_B + tokens_B
        self._positions = None


class LayerCache:
    """Keys and values of one attention layer."""

    def __init__(self, shared: KVCache) -> None:
        self.shared = shared
        self._kept: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # its lengths change with each token
    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        """Causal attention of the new tokens to themselves and to all before, which are kept."""
        tokens, grouped = q_BHTD.shape[2], q_BHTD.shape[1] != k_BKTD.shape[1]
        end = int(self.shared.lengths_B.max()) + tokens
        positions_BT = self.shared.positions(tokens, q_BHTD.device)
        keys, values = self._room(k_BKTD, end)
        rows = torch.arange(len(positions_BT), device=positions_BT.device)[:, None]
        keys[rows, :, positions_BT], values[rows, :, positions_BT] = k_BKTD.transpose(1, 2), v_BKTD.transpose(1, 2)
        if end == tokens:
            return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=grouped)
        sees_BTS = torch.arange(end, device=positions_BT.device) <= positions_BT[..., None]
        return F.scaled_dot_product_attention(
            q_BHTD, keys[:, :, :end], values[:, :, :end], attn_mask=sees_BTS[:, None], enable_gqa=grouped
        )

    def _room(self, like_BKTD: Tensor, end: int) -> tuple[Tensor, Tensor]:
        B, K, _, D = like_BKTD.shape
        if self._kept is None or int(self.shared.lengths_B.max()) == 0:
            size = ROOM * -(-end // ROOM)
            self._kept = like_BKTD.new_zeros(B, K, size, D), like_BKTD.new_zeros(B, K, size, D)
        elif self._kept[0].shape[2] < end:
            more = (0, 0, 0, max(end, 2 * self._kept[0].shape[2]) - self._kept[0].shape[2])
            self._kept = F.pad(self._kept[0], more), F.pad(self._kept[1], more)
        return self._kept


@contextmanager
def kv_cache(model: nn.Module) -> Iterator[KVCache | None]:
    """A context in which a model that `keeps_keys` is called with the new tokens alone; None for another model."""
    if not getattr(model, "keeps_keys", False):
        yield None
        return
    cache = KVCache()
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "cache")]
    for layer in layers:
        layer.cache = LayerCache(cache)
    try:
        yield cache
    finally:
        for layer in layers:
            layer.cache = None
