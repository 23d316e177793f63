"""Degrees of the mesh axes: their product is the world, and the strategy takes the ranks nobody asked for."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import AXES, MeshShape
from dtrain.resolve.ranks import about, choose

BUILT = ("dp_replicate", "dp_shard")
"""Axes that work today."""


def strategy(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    ranks = draft["nodes"] * draft["devices"]
    word, reason = ("single", "one rank") if ranks == 1 else ("ddp", f"{ranks} ranks")
    return {"strategy": choose(config, "strategy", word, draft["why"], reason)}


def degrees(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The whole mesh at once; an error names the product that failed."""
    nodes, devices = draft["nodes"], draft["devices"]
    ranks, facts, name = nodes * devices, about(draft["strategy"]), config.choices["strategy"] or "of yours"
    asked = {axis: getattr(config.mesh, axis) for axis in AXES if getattr(config.mesh, axis) is not None}
    problems = [f"mesh.{axis}={degree}: a degree is at least 1." for axis, degree in asked.items() if degree < 1]
    problems += [
        f"mesh.{axis}={degree}: the axis {axis} is not built yet. The axes that work are {' and '.join(BUILT)}."
        for axis, degree in asked.items()
        if axis not in BUILT and degree > 1
    ]
    if problems:
        raise WordsError(*problems)
    fill, inside = facts.get("fill"), facts.get("inside")
    if fill is None and ranks > 1:
        raise WordsError(f"strategy={name} is one rank, but nodes x devices = {nodes} x {devices} = {ranks}. Type strategy=ddp or strategy=fsdp.")
    if inside and inside not in asked and fill not in asked:
        asked[inside] = devices if nodes > 1 else max(1, devices // 2)
    taken = 1
    for degree in asked.values():
        taken *= degree
    said = " x ".join(f"{axis}={degree}" for axis, degree in asked.items())
    spare = next((axis for axis in (fill, inside) if axis and axis not in asked), None)
    if ranks % taken or (spare is None and taken != ranks):
        raise WordsError(
            f"mesh: {said or 'all axes 1'} is {taken} ranks, but nodes x devices = {nodes} x {devices} = {ranks}. "
            f"Type devices={-(-taken // nodes)}, or degrees whose product divides {ranks}."
        )
    shape = MeshShape(**dict(asked.items()), **({spare: ranks // taken} if spare else {}))
    if inside and (shape.dp_replicate == 1 or shape.dp_shard == 1):
        raise WordsError(
            f"strategy={name}: {shape.dp_replicate} replica(s) of {shape.dp_shard} shard(s) is not hybrid. "
            "It needs at least 2 x 2 ranks: type nodes=2 devices=2, or strategy=fsdp."
        )
    if "shards" not in facts and fill == "dp_replicate" and not inside and shape.dp_shard > 1:
        raise WordsError(f"mesh.dp_shard={shape.dp_shard}: strategy={name} shards nothing. Type strategy=fsdp.")
    return {"mesh": shape}
