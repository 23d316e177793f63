"""strategy=auto: the cheapest layout that fits, by arithmetic: bytes each rank must hold, and seconds of computing, talking and waiting.

The axes of the data come first; the model itself is split only where they alone do not fit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.resolve import batch, divide, mesh, pipeline
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
    micro: int
    held: float
    seconds: float

    @property
    def words(self) -> str:
        return " ".join(
            [
                f"strategy={self.mode}",
                *(f"mesh.{axis}={getattr(self, axis)}" for axis in ("pp", "tp") if getattr(self, axis) > 1),
                f"microbatch={self.micro}",
            ]
        )


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
    layouts = [layout for layout in _layouts(config, draft, size) if _legal(config, cluster, draft, layout)]
    simple = [layout for layout in layouts if layout.tp == (config.mesh.tp or 1) and layout.pp == (config.mesh.pp or 1)]
    if not simple:  # something else is wrong with the words, and the rules behind this one say what
        return {"strategy": choose(config, "strategy", "ddp", draft["why"], f"{ranks} ranks")}
    fitting = [layout for layout in simple if layout.held <= room] or [layout for layout in layouts if layout.held <= room]
    best = min(fitting, key=lambda layout: layout.seconds) if fitting else min(layouts, key=lambda layout: layout.held)
    draft["layout"] = {axis: degree for axis, degree in (("tp", best.tp), ("pp", best.pp)) if degree > 1}
    draft["microbatch"] = best.micro
    return {"strategy": choose(config, "strategy", best.mode, draft["why"], _reason(best, layouts, room, size, fits=bool(fitting)))}


def _legal(config: Config, cluster: Cluster, draft: Mapping[str, Any], layout: Layout) -> bool:
    """Whether the rules that follow would take it."""
    trial = {**draft, "strategy": config.options["strategy"][layout.mode], "layout": {"tp": layout.tp, "pp": layout.pp}, "microbatch": layout.micro}
    try:
        for rule in (mesh.degrees, pipeline.shape, batch.arithmetic, divide.model):
            trial.update(rule(config, cluster, trial))
    except WordsError:
        return False
    return True


def _layouts(config: Config, draft: Mapping[str, Any], size: Size) -> Iterator[Layout]:
    """Every one that keeps what the user said of the mesh, legal or not."""
    ranks, asked = draft["nodes"] * draft["devices"], config.mesh
    for tp in _degrees(asked.tp, draft["devices"]):
        for pp in _degrees(asked.pp, min(ranks, size.blocks)):
            data = ranks // (tp * pp * (asked.cp or 1))
            for mode in MODES if data > 1 else MODES[:1]:
                if ranks % (tp * pp * (asked.cp or 1)) == 0:
                    for micro in _microbatches(config, data, pp):
                        yield _layout(config, draft, size, mode, tp, pp, data, micro)


def _microbatches(config: Config, data: int, pp: int) -> list[int]:
    """What the user said; else all samples of a rank at once, and every half of that."""
    local = max(1, config.batch // data)
    if config.microbatch or config.accumulate:
        return [config.microbatch or max(1, local // (config.accumulate or 1))]
    least = 2 * pp if pp > 1 else 1
    return [local // parts for parts in range(1, local + 1) if local % parts == 0 and (parts >= least or parts == local)] or [1]


def _degrees(asked: int | None, most: int) -> list[int]:
    return [asked] if asked else [degree for degree in range(1, most + 1) if most % degree == 0]


def _layout(config: Config, draft: Mapping[str, Any], size: Size, mode: str, tp: int, pp: int, data: int, micro: int) -> Layout:
    local, cp = max(1, config.batch // data), config.mesh.cp or 1
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
    wire = numbers * part * (1 - 1 / (data * cp)) * (1 + 2 * local / micro if mode == "fsdp" else 2) / (far if draft["nodes"] > 1 else near)
    split = 8 * numbers * size.blocks / pp * size.width / cp * local * (1 - 1 / tp) / near
    handed = 2 * numbers * size.width / cp * local * (pp > 1) / (far if draft["nodes"] > 1 else near)
    wire = max(0.0, wire - compute * 2 / 3)  # what the backward does not hide
    calls = {"ddp": 1 + numbers * part / 25e6, "zero1": 2 * size.blocks / pp, "zero2": 2 * size.blocks / pp, "fsdp": 3 * size.blocks / pp}[mode]
    calls = calls * (data * cp > 1) * (local / micro if mode in ("zero2", "fsdp") else 1) + local / micro * (
        4 * size.blocks / pp * (tp > 1) + 2 * (pp > 1)
    )
    seconds = compute * (1 + bubble) + wire + split + handed + wait * calls
    return Layout(mode, tp, pp, micro, numbers * (weights + gradients + activations) + state, seconds)


def _reason(best: Layout, layouts: list[Layout], room: float, size: Size, *, fits: bool) -> str:
    count = f"{size.parameters / 1e9:.2f}B" if size.parameters >= 1e8 else f"{size.parameters / 1e6:.2f}M"
    said = f"{count} parameters need about {_bytes(best.held)} of {_bytes(room)} on each rank"
    if not fits:
        return f"{best.words} needs least, {said}: more than there is. Type a smaller batch or microbatch, remat=full, or more devices"
    tight = min((layout for layout in layouts if layout.seconds < best.seconds), key=lambda layout: layout.seconds, default=None)
    other = min(
        (layout for layout in layouts if (layout.mode, layout.tp, layout.pp) != (best.mode, best.tp, best.pp) and layout.held <= room),
        key=lambda layout: layout.seconds,
        default=None,
    )
    if tight:
        return f"{best.words}, {said}; {tight.words} would be faster and need {_bytes(tight.held)}"
    return f"{best.words}, {said}" + (f"; next is {other.words}, {other.seconds / best.seconds:.2f}x the time" if other else "")


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
