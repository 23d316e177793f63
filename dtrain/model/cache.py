"""Keys and values of the tokens so far, so that each new token costs one position and not the whole sequence.

Shapes: B sequences, T new tokens of each, K key-value heads, D head width.
"""

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAKES = {"cache", "past_key_values"}
"""Argument of a model of transformers that takes a cache, by version."""
ROOM = 64
"""Positions that a cache has room for at first; it doubles when they are full."""


class KVCache:
    """The number of tokens of each sequence in the caches; all layers share it. `most`: sequences at a time."""

    most = math.inf

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


class TransformersCache(KVCache):
    """The cache of a model of transformers, for one sequence; `inner` is of its own classes. `padded`: a forward may
    get more tokens than are kept.
    """

    most = 1

    def __init__(self, model: Any, *, padded: bool) -> None:
        super().__init__()
        self._model, self._padded, self._takes, self._seen = model, padded, _takes(model), 0
        self.inner: Any = None

    def begin(self, sequences: int) -> None:
        """Raises ValueError for several sequences, whose lengths may differ."""
        if sequences != 1:
            raise ValueError("the cache of a model of transformers is of one sequence")
        super().begin(sequences)
        self._seen, self.inner = 0, sys.modules["transformers"].DynamicCache(config=self._model.config)
        if self._padded and self.can_forget:
            self.inner.activate_past_recording()

    @property
    def can_forget(self) -> bool:
        """Whether tokens can be removed from the end: not from the state of a recurrence."""
        return hasattr(self.inner, "activate_past_recording") and not any(self.inner.is_linear)

    def advance(self, tokens_B: Tensor) -> None:
        super().advance(tokens_B)
        if self._padded:
            self.inner.crop(int(self.lengths_B) - self._seen)
            self._seen = int(self.lengths_B)

    def add(self, _: nn.Module, args: Any, arguments: Any) -> tuple[Any, Any]:
        """Give the cache to a forward."""
        tokens_BT: Tensor = args[0] if args else arguments["input_ids"]
        self._seen += tokens_BT.shape[1]
        return args, arguments | dict.fromkeys(self._takes, self.inner) | {"use_cache": True}


def _takes(model: Any) -> set[str]:
    """The argument of a decoder of transformers for a cache; none of another model."""
    known = sys.modules.get("transformers")
    if not known or not isinstance(model, known.PreTrainedModel) or model.config.is_encoder_decoder:
        return set()
    return inspect.signature(model.forward).parameters.keys() & TAKES if model.can_generate() else set()


@contextmanager
def kv_cache(model: nn.Module, *, padded: bool = False) -> Iterator[KVCache | None]:
    """A context in which a model that `keeps_keys`, or a decoder of transformers, is called with the new tokens alone;
    None for another model. `padded`: with more tokens behind them, which are not kept.
    """
    if _takes(model):
        theirs = TransformersCache(model, padded=padded)
        theirs.begin(1)
        if padded and not theirs.can_forget:
            yield None
            return
        hook = model.register_forward_pre_hook(theirs.add, with_kwargs=True)
        try:
            yield theirs
        finally:
            hook.remove()
        return
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
