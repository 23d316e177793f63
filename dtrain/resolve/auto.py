"""strategy=auto: the cheapest layout that fits, by arithmetic: bytes each rank must hold, and seconds of computing, talking and waiting."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.resolve.ranks import about, choose
from dtrain.resolve.size import Size, size_of

STATE = {"adamw": 8, "sgd": 4, "muon": 5, "adafactor": 0.1}
"""Bytes of optimizer state per parameter."""
SPEED = {"cuda": (4e14, 3e11, 2.5e10, 2e-5), "cpu": (5e10, 2e9, 2e9, 2e-4)}
"""device -> multiply-adds x 2 per second, bytes per second inside a node, between nodes, seconds until a collective begins: one H100 at half its
peak, NVLink, 200 Gbit/s; one CPU core and loopback."""
ROOM = 0.85
"""Of a device's memory, what a run may plan with: the rest goes to buffers, fragments and the libraries."""
MODES = ("ddp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class Layout:
    """One way to run: how the data axes hold state, and the degrees beside them; `held` bytes on each rank, `seconds` per step."""

    mode: str
    tp: int
    pp: int
    held: float
    seconds: float

    @property
    def words(self) -> str:
        return " ".join([f"strategy={self.mode}", *(f"mesh.{axis}={getattr(self, axis)}" for axis in ("pp", "tp") if getattr(self, axis) > 1)])


def strategy(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """The strategy, and in `layout` the degrees that `auto` chose where the user said none."""
    ranks = draft["nodes"] * draft["devices"]
    if config.choices["strategy"] != "auto":
        return {"strategy": choose(config, "strategy", "", draft["why"], "")}
    facts = {"vocab": about(config.data).get("vocab", 256), "inputs": 64, "outputs": 10}
    size = size_of(config.choices["model"], config.model, config.data, facts)
    if ranks == 1 or size is None:
        word, reason = ("single", "one rank") if ranks == 1 else ("ddp", f"{ranks} ranks, and the model's size is not known before it is built")
        return {"strategy": choose(config, "strategy", word, draft["why"], reason)}
    room = cluster.memory * ROOM / (1 if draft["device"] == "cuda" else ranks // max(1, draft["nodes"] if cluster.external else 1))
    layouts = sorted(_layouts(config, draft, size), key=lambda layout: layout.seconds)
    fitting = [layout for layout in layouts if layout.held <= room]
    best = fitting[0] if fitting else min(layouts, key=lambda layout: layout.held)
    draft["layout"] = {axis: degree for axis, degree in (("tp", best.tp), ("pp", best.pp)) if degree > 1}
    return {"strategy": choose(config, "strategy", best.mode, draft["why"], _reason(best, layouts, room, size, fits=bool(fitting)))}


def _layouts(config: Config, draft: Mapping[str, Any], size: Size) -> Iterator[Layout]:
    """Every legal one that keeps what the user said of the mesh."""
    ranks, devices, asked = draft["nodes"] * draft["devices"], draft["devices"], config.mesh
    heads = math.gcd(*(config.model[name] for name in about(config.model).get("tp", ()) if isinstance(config.model.get(name), int)), 0) or 1
    beside = (asked.cp or 1) * (asked.dp_replicate or 1)
    for tp in _degrees(asked.tp, math.gcd(devices, heads)):
        for pp in _degrees(asked.pp, size.blocks if config.model.get("tied") is not True and "blocks" in about(config.model) else 1):
            data = ranks // (tp * pp * (asked.cp or 1))
            if tp * pp * beside > ranks or ranks % (tp * pp * beside) or config.batch % data or config.batch // data < pp:
                continue
            for mode in MODES if (asked.dp_shard is None or asked.dp_shard == 1) and data > 1 else MODES[:1] if data == 1 else MODES[1:]:
                if mode == "ddp" or asked.dp_replicate is None or asked.dp_replicate == 1:
                    yield _layout(config, draft, size, mode, tp, pp, data)


def _degrees(asked: int | None, most: int) -> list[int]:
    return [asked] if asked else [degree for degree in range(1, most + 1) if most % degree == 0]


def _layout(config: Config, draft: Mapping[str, Any], size: Size, mode: str, tp: int, pp: int, data: int) -> Layout:
    local, cp = config.batch // data, config.mesh.cp or 1
    micro = config.microbatch or (max(1, local // (2 * pp)) if pp > 1 else local // (config.accumulate or 1)) or 1
    part, shards = size.parameters / (tp * pp), data * cp if mode != "ddp" else 1
    block = size.parameters / size.blocks / tp
    numbers = 2 if "true" in str(config.choices["precision"]) else 4
    weights = {"ddp": part, "zero1": part + part / shards, "zero2": part + part / shards, "fsdp": part / shards + 2 * block}[mode]
    gradients = {"ddp": part, "zero1": part, "zero2": part / shards + block, "fsdp": part / shards + block}[mode]
    state = STATE.get(str(config.choices["optim"]), 8) * part / shards
    kept = size.kept / size.blocks if config.choices["remat"] == "full" else size.kept
    activations = kept * micro * min(pp, local // micro or 1) / (tp * pp * cp)
    rate, near, far, wait = SPEED[draft["device"]]
    compute = 6 * size.work * config.batch / (data * cp * tp * pp) / rate
    bubble = (pp - 1) / max(1, local // micro)
    wire = numbers * part * (1 - 1 / (data * cp)) * (3 if mode == "fsdp" else 2) / (far if draft["nodes"] > 1 else near)
    split = 8 * numbers * size.blocks / pp * size.width / cp * local * (1 - 1 / tp) / near
    handed = 2 * numbers * size.width / cp * local * (pp > 1) / (far if draft["nodes"] > 1 else near)
    calls = {"ddp": 1 + numbers * part / 25e6, "zero1": 2 * size.blocks / pp, "zero2": 2 * size.blocks / pp, "fsdp": 3 * size.blocks / pp}[mode]
    calls = calls * (data * cp > 1) + local / micro * (4 * size.blocks / pp * (tp > 1) + 2 * (pp > 1))
    seconds = compute * (1 + bubble) + wire + split + handed + wait * calls
    return Layout(mode, tp, pp, numbers * (weights + gradients + activations) + state, seconds)


def _reason(best: Layout, layouts: list[Layout], room: float, size: Size, *, fits: bool) -> str:
    count = f"{size.parameters / 1e9:.2f}B" if size.parameters >= 1e8 else f"{size.parameters / 1e6:.2f}M"
    said = f"{count} parameters need about {_bytes(best.held)} of {_bytes(room)} on each rank"
    if not fits:
        return f"{best.words} needs least, {said}: more than there is. Type a smaller batch or microbatch, remat=full, or more devices"
    tight = min((layout for layout in layouts if layout.seconds < best.seconds), key=lambda layout: layout.seconds, default=None)
    other = min((layout for layout in layouts if layout.words != best.words and layout.held <= room), key=lambda layout: layout.seconds, default=None)
    if tight:
        return f"{best.words}, {said}; {tight.words} would be faster and need {_bytes(tight.held)}"
    return f"{best.words}, {said}" + (f"; next is {other.words}, {other.seconds / best.seconds:.2f}x the time" if other else "")


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
