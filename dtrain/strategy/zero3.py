"""Parameters, gradients and optimizer state are sharded over dp_shard: fsdp with reduce=every (ZeRO-3, arXiv
1910.02054).
"""

from typing import Literal

from dtrain.strategy.fsdp import FSDP


def build(*, offload: Literal["none", "cpu"]) -> FSDP:
    """`offload` as in FSDP."""
    return FSDP(reshard="forward", reduce="every", offload=offload)
