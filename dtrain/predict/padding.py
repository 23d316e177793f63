"""Says where sharded weights hold much padding: each is cut along its first dim, and on more ranks than that has rows
every rank holds, gathers and updates a row all the same.

dtrain plan cluster=h100x8 nodes=512 strategy=fsdp mesh.dp_replicate=2
"""

import math
from dataclasses import replace

from dtrain.planned import MeshShape, Plan
from dtrain.predict.prediction import predict
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import gathered, holding_of, piece, shards_of

MOST = 0.05
"""Padding, as a fraction of the weights, that is not worth a word."""


def padding(plan: Plan, shapes: Shapes) -> float:
    """Numbers that only fill up the shards of all ranks, as a fraction of those that are weights."""
    weights = [(weight, block.count) for block in shapes.blocks for weight in block.weights if weight.shape]
    held = sum(count * shards_of(plan, weight) * math.prod(piece(plan, weight)) for weight, count in weights)
    needed = sum(count * math.prod(gathered(plan, weight)) for weight, count in weights)
    return held / needed - 1 if needed else 0.0


def sentence(plan: Plan, shapes: Shapes) -> str:
    """How much of what is sharded is padding, and the words that leave less and fit; empty if it is little."""
    if not holding_of(plan).shards or (now := padding(plan, shapes)) <= MOST:
        return ""
    ranks = plan.mesh.dp_shard * plan.mesh.cp
    text = f"{ranks} ranks share weights of fewer rows: padding adds {now:.0%} to their bytes"
    for mesh in _copies(plan.mesh):
        then = padding(replace(plan, mesh=mesh), shapes)
        if then <= MOST and predict(replace(plan, mesh=mesh), shapes).fits:
            words = f"mesh.dp_replicate={mesh.dp_replicate} mesh.dp_shard={mesh.dp_shard}"
            return f"{text}. Type {words}: {mesh.dp_replicate} copies, as strategy=hsdp has them, add {then:.0%}"
    return text


def _copies(mesh: MeshShape) -> list[MeshShape]:
    """Meshes with more copies of the model and the same samples on each rank, the fewest copies first."""
    fewer = (mesh.dp_shard // parts for parts in range(2, mesh.dp_shard) if mesh.dp_shard % parts == 0)
    meshes = (replace(mesh, dp_shard=size, dp_replicate=mesh.data // size) for size in fewer)
    return [other for other in meshes if (other.dp_shard * other.cp) % other.ep == 0]
