"""Optimizer state is sharded over dp_shard; parameters and gradients are whole while a step runs (ZeRO-1, arXiv
1910.02054).

Between steps a rank keeps its shard of the parameters: FSDP2 whose gathered blocks live from the forward to the end of
the backward, and whose gradients cross ranks once per step. On the wire that is what ddp costs.
"""

from typing import Literal

from dtrain.strategy.fsdp import FSDP


def build(*, offload: Literal["none", "cpu"]) -> FSDP:
    """`offload` as in FSDP."""
    return FSDP(reshard="never", reduce="last", offload=offload)
