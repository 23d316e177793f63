"""Gradients and optimizer state are sharded over dp_shard; parameters are whole while a step runs (ZeRO-2, arXiv
1910.02054).

Like zero1, but gradients are reduced in every microbatch, and a rank keeps only the sum of its shard.
"""

from typing import Literal

from dtrain.strategy.fsdp import FSDP


def build(*, offload: Literal["none", "cpu"]) -> FSDP:
    """`offload` as in FSDP."""
    return FSDP(reshard="never", reduce="every", offload=offload)
