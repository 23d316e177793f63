"""Parameters, gradients and optimizer state are sharded over dp_shard: fsdp with reduce=every (ZeRO-3, arXiv 1910.02054)."""

from typing import Literal

from dtrain.strategy.fsdp import FSDP


def build(*, rests: Literal["device", "cpu"]) -> FSDP:
    """`rests` as in FSDP."""
    return FSDP(reshard="forward", reduce="every", rests=rests)
