"""Optimizer state is sharded over dp_shard; parameters and gradients are whole while a step runs (ZeRO-1, arXiv
1910.02054).

Between steps a rank keeps only its shard of the parameters: FSDP2 with blocks that stay gathered from the forward to
the end of the backward, and with gradients reduced once per step. It communicates as much as ddp.
"""

from typing import Literal

from dtrain.strategy.fsdp import FSDP


def build(*, offload: Literal["none", "cpu"]) -> FSDP:
    """`offload` as in FSDP."""
    return FSDP(reshard="never", reduce="last", offload=offload)
