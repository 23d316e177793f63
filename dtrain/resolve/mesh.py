"""Degrees of the mesh axes: their product is the world size; one axis of the strategy absorbs the ranks you did not
assign.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.config.sections import Mesh
from dtrain.errors import WordsError
from dtrain.planned import AXES, MeshShape


def degrees(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Decide all degrees together; an error names the product that does not match."""
    nodes, devices = draft["nodes"], draft["devices"]
    ranks, facts, name = nodes * devices, about(draft["strategy"]), config.choices["strategy"] or "of yours"
    asked = {axis: getattr(config.mesh, axis) for axis in AXES if getattr(config.mesh, axis) is not None}
    ep = 1 if config.mesh.ep is None else config.mesh.ep
    fill, inside = facts.get("fill"), facts.get("inside")
    if "fill" in facts and fill is None and ranks > 1:
        raise WordsError(
            f"strategy={name} is one rank, but nodes x devices = {nodes} x {devices} = {ranks}. Type strategy=ddp or "
            "strategy=fsdp."
        )
    spread = {axis: degree for axis, degree in asked.items() if axis not in (fill, inside)}
    if inside and inside not in asked and fill not in asked:
        asked[inside] = max(1, ranks // math.prod(spread.values()) // 2)
        if nodes > 1:
            asked[inside] = devices // math.prod(spread.get(axis, 1) for axis in ("cp", "tp"))
    used = math.prod(asked.values())
    product = " x ".join(f"{axis}={degree}" for axis, degree in asked.items())
    spare = next((axis for axis in (fill, inside) if axis and axis not in asked), None)
    if "fill" not in facts and spare is None and used != ranks:
        raise WordsError(
            f"strategy={draft['strategy'].get('_target_')} does not state fill, the axis that takes the ranks you "
            f"did not assign. Type mesh.dp_replicate={ranks}, or give its class about = {{'fill': 'dp_replicate'}}."
        )
    most = cluster.gpus if draft["device"] == "cuda" else math.inf
    shards = inside is not None or fill == "dp_shard"
    if used < 1 or ranks % used or (spare is None and used != ranks):
        enough = _enough(max(1, used), nodes, devices, most, exact=spare is None)
        raise WordsError(
            f"mesh: {product or 'all axes 1'} is {used} ranks, but nodes x devices = {nodes} x {devices} = {ranks}. "
            f"Type {' or '.join([enough, *_instead(config, asked, ranks, spare is not None, shards=shards)])}."
        )
    shape = MeshShape(**asked, **({spare: ranks // used} if spare else {}), ep=ep)
    if inside and (shape.dp_replicate == 1 or shape.dp_shard == 1):
        raise WordsError(
            f"strategy={name}: {shape.dp_replicate} replica(s) of {shape.dp_shard} shard(s) is not hybrid. It needs at "
            f"least 2 x 2: type {_hybrid(shape, config.mesh, most)}."
        )
    if facts.get("holds") == "copies" and shape.dp_shard > 1:
        copies, pipeline = shape.dp_replicate * shape.dp_shard, f" mesh.pp={shape.pp}" if fill == "pp" else ""
        raise WordsError(
            f"mesh.dp_shard={shape.dp_shard}: strategy={name} shards nothing. Type strategy=fsdp{pipeline}, or "
            f"mesh.dp_replicate={copies} for copies."
        )
    if about(config.adapter).get("packs") and (facts.get("holds") == "shards" or ranks > shape.dp_replicate):
        whole = "strategy=single" if ranks == 1 else "strategy=ddp"
        raise WordsError(
            f"adapter={config.word('adapter')} holds the packed base whole on every rank. Type "
            f"{whole} without other axes of the mesh, or adapter=lora, whose base can be split."
        )
    experts = config.model.get("experts")
    if shape.batch % ep:
        raise WordsError(
            f"mesh.ep={ep}: experts are shared out over the ranks of the batch, dp_replicate={shape.dp_replicate} x "
            f"dp_shard={shape.dp_shard} x "
            f"cp={shape.cp} = {shape.batch}, which {ep} does not divide. "
            f"{nearest_divisors('mesh.ep', ep, math.gcd(shape.batch, experts if isinstance(experts, int) else 0))}"
        )
    return {"mesh": shape}


def _enough(used: int, nodes: int, devices: int, most: float, *, exact: bool) -> str:
    """Words for as many ranks as the degrees need, or (not `exact`) a multiple: by other devices of a node, which has
    at `most` so many, by other nodes, or by both.
    """
    here, there = used // math.gcd(used, nodes), used // math.gcd(used, devices)
    if here <= most and (not exact or nodes * here == used):
        return f"devices={here}"
    if not exact or there * devices == used:
        return f"nodes={there}"
    return _spread(used, most)


def _spread(ranks: int, most: float) -> str:
    """So many ranks on as few nodes as have at `most` so many devices."""
    devices = max(size for size in divisors(ranks) if size <= most)
    return f"nodes={ranks // devices} devices={devices}"


def _hybrid(shape: MeshShape, asked: Mesh, most: float) -> str:
    """Words for two or more replicas of two or more shards, on nodes of at `most` so many devices."""
    inside, others = shape.cp * shape.tp, shape.pp * shape.cp * shape.tp
    if asked.dp_replicate is None and asked.dp_shard is None and 2 * inside <= most:
        return f"nodes={2 * shape.pp} devices={2 * inside}, or strategy=fsdp"
    replicas, shards = (max(2, degree or 2) for degree in (asked.dp_replicate, asked.dp_shard))
    words = f"{_spread(replicas * shards * others, most)} mesh.dp_replicate={replicas} mesh.dp_shard={shards}"
    return words if asked.dp_shard else f"{words}, or strategy=fsdp"


@cache
def divisors(of: int) -> Sequence[int]:
    """Divisors in ascending order, built from prime factors because world sizes can be large."""
    products, left, factor = [1], of, 2
    while left > 1:
        factor = factor if factor * factor <= left else left
        powers = [1]
        while left % factor == 0:
            left //= factor
            powers.append(powers[-1] * factor)
        products = [degree * power for degree in products for power in powers]
        factor += 1
    return sorted(products)


def nearest_divisors(key: str, wanted: int, of: int) -> str:
    """Suggest the divisors of `of` next to `wanted`: `Type mesh.tp=2 or mesh.tp=4.`"""
    below, above = [d for d in divisors(of) if d < wanted][-1:], [d for d in divisors(of) if d > wanted][:1]
    return f"Type {' or '.join(f'{key}={degree}' for degree in below + above)}."


def undivided(shape: MeshShape, owner: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """A sentence for each of these sizes of `owner` that tp does not divide."""
    for name, size in sizes.items():
        if size % shape.tp:
            fits = nearest_divisors("mesh.tp", shape.tp, math.gcd(*sizes.values(), shape.ranks))
            yield f"mesh.tp={shape.tp} does not divide {owner}.{name}={size}. {fits}"


def _instead(config: Config, asked: Mapping[str, int], ranks: int, open_ended: bool, *, shards: bool) -> list[str]:
    """Suggest changes of a single degree: for each axis the nearest degrees whose product with the others is the number
    of ranks, or divides it if `open_ended` (another axis absorbs the rest), and which the model can take.
    """
    words = list[str]()
    for axis, degree in asked.items():
        if axis == "dp_shard" and not shards:
            continue
        others = math.prod(asked.values()) // max(1, degree)
        if not others or ranks % others:
            continue
        fits = divisors(ranks // others) if open_ended else [ranks // others]
        near = sorted(fits, key=lambda d: abs(math.log(d / max(1, degree))))
        words += [f"mesh.{axis}={d}" for d in near if d != degree and _can_take(config, axis, d)][:2]
    return words[:3]


def _can_take(config: Config, axis: str, degree: int) -> bool:
    """Whether the sizes that the words give are divided by this degree of an axis; True where they give none."""
    part, facts = config.model, about(config.model)
    sizes = {"tp": [part.get(name) for name in facts.get("tp", ())], "cp": [config.data.get("sequence")]}.get(axis, [])
    step = 2 * degree if axis == "cp" else degree
    names = facts.get("blocks", ()) if axis == "pp" else ()
    blocks = [count for name in names if isinstance(count := part.get(name), int)]
    if names and len(blocks) == len(names) and math.prod(blocks) < degree:
        return False
    return degree == 1 or not any(isinstance(size, int) and size % step for size in sizes)
