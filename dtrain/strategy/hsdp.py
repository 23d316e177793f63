"""fsdp inside a node, replicas across nodes (HYBRID_SHARD of arXiv 2304.11277)."""

from dtrain.strategy.fsdp import FSDP

HSDP = FSDP
"""The same class as FSDP; with dp_replicate > 1 its mesh has two axes. strategy=hsdp only asks for another mesh."""
