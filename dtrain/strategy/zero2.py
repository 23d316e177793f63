"""Gradients and optimizer state are sharded over dp_shard; parameters are whole while a step runs (ZeRO-2, arXiv
1910.02054).

As zero1, but the gradients of every microbatch cross ranks at once, and a rank keeps the sum of its shard.
"""

from typing import Literal

from dtrain.strategy.fsdp import FSDP


def build(*, offload: Literal["none", "cpu"]) -> FSDP:
    """`offload` as in FSDP."""
    return FSDP(reshard="never", reduce="every", offload=offload)
