"""strategy=auto: picks the fastest layout that fits in memory, by a cost model: bytes per rank, and seconds of compute,
communication and waiting.

Data-parallel axes come first; the model itself is split only if they alone do not fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import Part, about
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import BatchShape, MeshShape, PipelineShape
from dtrain.predict import formulas
from dtrain.predict.advice import STRENGTH
from dtrain.predict.memory import Memory, memory
from dtrain.predict.shapes import Shapes, types_of
from dtrain.predict.state_bytes import holding_of
from dtrain.predict.work import work
from dtrain.resolve import batch, fit, mesh, model_axes, pipeline
from dtrain.resolve.ranks import choose

SPEED = {"cuda": (4e14, 3e11, 2.5e10, 2e-5), "cpu": (5e10, 2e9, 2e9, 2e-4)}
"""device -> FLOP per second, bytes per second inside a node, bytes per second between nodes, and latency of a
collective in seconds: one H100 at half its peak, NVLink, 200 Gbit/s; one CPU core and loopback.
"""
USABLE = 0.85
"""Fraction of a device's memory that a plan may use; the rest is for fragmentation and libraries."""
VOCABULARY = 50257
"""Assumed vocabulary of a tokenizer that is not loaded: that of GPT-2."""


@dataclass(frozen=True)
class Layout:
    """A candidate layout, with the fields of a Plan that predictions read; `seconds`: predicted time per step."""

    mode: str
    seconds: float
    shapes: Shapes
    device: str
    mesh: MeshShape
    pipeline: PipelineShape
    tensor: Mapping[str, Any]
    context: Mapping[str, Any]
    batch: BatchShape
    ema: float | None
    strategy: Part
    precision: Part
    remat: Part
    compile: Part
    model: Part
    data: Part
    objective: Part
    optim: Part
    checkpoint: Part

    @cached_property
    def memory(self) -> Memory:
        return memory(self, self.shapes)

    @property
    def peak(self) -> int:
        """Peak bytes on the fullest rank."""
        return self.memory.peak

    @property
    def words(self) -> str:
        return " ".join(
            [
                f"strategy={self.mode}",
                *(f"mesh.{axis}={getattr(self.mesh, axis)}" for axis in ("pp", "tp") if getattr(self.mesh, axis) > 1),
                f"microbatch={self.batch.microbatch}",
            ]
        )

    @property
    def kind(self) -> tuple[str, int, int]:
        return self.mode, self.mesh.tp, self.mesh.pp


def strategy(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose the strategy; `auto` also writes its degrees of tp and pp to `layout` in the draft."""
    ranks = draft["nodes"] * draft["devices"]
    if config.choices["strategy"] != "auto":
        return {"strategy": choose(config, "strategy", "", draft["why"], "")}
    modes = _modes(config)
    seeds = [] if ranks == 1 else _seeds(config, cluster, draft, modes)
    if not seeds:
        word, reason = (
            ("single", "one rank")
            if ranks == 1
            else ("ddp", f"{ranks} ranks, and the model's size is not known before it is built")
        )
        return {"strategy": choose(config, "strategy", word, draft["why"], reason)}
    budget = (
        cluster.memory
        * USABLE
        / (1 if draft["device"] == "cuda" else ranks // max(1, draft["nodes"] if cluster.external else 1))
    )
    layouts = sorted(_layouts(config, cluster, draft, seeds), key=lambda layout: layout.seconds)
    simple = [
        layout
        for layout in layouts
        if layout.mesh.tp == (config.mesh.tp or 1) and layout.mesh.pp == (config.mesh.pp or 1)
    ]
    if not simple:  # other words are wrong; later rules report them
        return {"strategy": choose(config, "strategy", "ddp", draft["why"], f"{ranks} ranks")}
    fits = next((layout for some in (simple, layouts) for layout in some if layout.peak <= budget), None)
    best = fits or min(layouts, key=lambda layout: layout.peak)
    draft["layout"] = {axis: getattr(best.mesh, axis) for axis in ("tp", "pp") if getattr(best.mesh, axis) > 1}
    draft["microbatch"] = best.batch.microbatch
    return {
        "strategy": choose(
            config, "strategy", best.mode, draft["why"], _reason(best, layouts, budget, fits=fits is not None)
        )
    }


def _modes(config: Config) -> list[str]:
    """Strategies that `auto` may choose (fact `try`), in ascending order of memory saved."""
    parts = {word: part for word, part in config.options["strategy"].items() if about(part).get("try")}
    return sorted(parts, key=lambda word: STRENGTH["strategy"](parts[word]))


def _seeds(config: Config, cluster: Cluster, draft: Mapping[str, Any], modes: Sequence[str]) -> list[Layout]:
    """One layout per mode on one rank, with the shapes of the model; empty if its shapes cannot be known here."""
    trial, groups = {**draft, "why": {}}, ("remat", "optim", "checkpoint")
    try:
        trial |= fit.objective(config, cluster, trial)
        data, model = fit.synthetic(config, cluster, trial)["data"], dict(config.model)
        if model.get("vocab") == "auto" and formulas.facts_of(data).get("vocab") is None:
            model["vocab"] = VOCABULARY
        seed = Layout(
            modes[0], 0.0, Shapes((), 0, 0, 0, 0, 1), draft["device"], MeshShape(cp=config.mesh.cp or 1),
            PipelineShape(), vars(config.tensor),
            vars(config.context), BatchShape(1, 1, 1, 1), config.ema, compile=draft["compile"],
            precision=draft["precision"], model=model, data=data,
            objective=trial["objective"], strategy=config.options["strategy"][modes[0]],
                **{group: dict(getattr(config, group)) for group in groups},
        )  # fmt: skip
        seeds = [replace(seed, mode=mode, strategy=config.options["strategy"][mode]) for mode in modes]
        shapes = [formulas.shapes(seed) for seed in seeds]
    except (WordsError, TypeError, KeyError, ValueError, ZeroDivisionError):  # later rules report wrong words
        return []
    return [replace(seed, shapes=each) for seed, each in zip(seeds, shapes, strict=True) if each is not None]


def _layouts(config: Config, cluster: Cluster, draft: Mapping[str, Any], seeds: list[Layout]) -> Iterator[Layout]:
    """Every valid layout that respects the user's mesh degrees and microbatch."""
    ranks, asked = draft["nodes"] * draft["devices"], config.mesh
    for tp in _degrees(asked.tp, draft["devices"]):
        for pp in _degrees(asked.pp, ranks):
            taken = tp * pp * (asked.cp or 1)
            if ranks % taken or (pp > max(1, seeds[0].shapes.listed) and not asked.pp):
                continue
            for seed in seeds if ranks > taken else seeds[:1]:
                for micro in _microbatches(config, ranks // taken, pp):
                    trial = {
                        **draft,
                        "strategy": seed.strategy,
                        "layout": {"tp": tp, "pp": pp},
                        "microbatch": micro,
                    }
                    decided = _decided(config, cluster, trial)
                    if decided:
                        layout = replace(seed, **decided)
                        yield replace(layout, seconds=_seconds(layout, draft))


def _decided(config: Config, cluster: Cluster, trial: dict[str, Any]) -> dict[str, Any]:
    """Fields that later rules decide for this trial; empty if one of them refuses it."""
    try:
        for rule in (mesh.degrees, pipeline.shape, batch.arithmetic, model_axes.model):
            trial.update(rule(config, cluster, trial))
    except WordsError:
        return {}
    return {name: trial[name] for name in ("strategy", "mesh", "pipeline", "batch")} if "batch" in trial else {}


def _microbatches(config: Config, data: int, pp: int) -> list[int]:
    """The user's microbatch; otherwise every divisor of a rank's samples, or, if there are many, the largest below each
    power of two.
    """
    local = max(1, config.batch // data)
    if config.microbatch or config.accumulate:
        return [config.microbatch or max(1, local // (config.accumulate or 1))]
    least = 2 * pp if pp > 1 else 1
    sizes = [local // parts for parts in mesh.divisors(local) if parts >= least or parts == local]
    return sizes if len(sizes) <= 16 else list({size.bit_length(): size for size in reversed(sizes)}.values())


def _degrees(asked: int | None, most: int) -> Sequence[int]:
    return [asked] if asked else mesh.divisors(most)


def _seconds(layout: Layout, draft: Mapping[str, Any]) -> float:
    """Predicted seconds per step: compute, the pipeline bubble, communication that does not overlap with two thirds of
    the compute, and the latency of each collective.
    """
    shape, shapes, batches, holding = layout.mesh, layout.shapes, layout.batch.accumulate, holding_of(layout)
    rate, near, far, wait = SPEED[draft["device"]]
    slow, numbers, several = far if draft["nodes"] > 1 else near, types_of(layout).param, shape.batch > 1
    part, blocks = shapes.parameters / (shape.tp * shape.pp), shapes.listed / shape.pp
    width = max(block.passes for block in shapes.blocks) / shape.cp * layout.batch.local
    compute = work(layout, shapes).total / shape.ranks / rate
    sent = numbers * part * (1 - 1 / shape.batch) * (1 + 2 * batches if holding.frees else 2) / slow
    split = 8 * numbers * blocks * width * (1 - 1 / shape.tp) / near
    handed = 2 * numbers * width * (shape.pp > 1) / slow
    calls = (3 if holding.frees else 2) * blocks if holding.shards else 1 + numbers * part / 25e6
    calls = calls * several * (batches if holding.frees or holding.every else 1) + batches * (
        4 * blocks * (shape.tp > 1) + 2 * (shape.pp > 1)
    )
    return compute * (1 + (shape.pp - 1) / batches) + max(0.0, sent - compute * 2 / 3) + split + handed + wait * calls


def _reason(best: Layout, layouts: list[Layout], budget: float, *, fits: bool) -> str:
    """Explain the choice of `best`; `layouts` are sorted, the fastest first."""
    parameters = best.shapes.parameters
    count = f"{parameters / 1e9:.2f}B" if parameters >= 1e8 else f"{parameters / 1e6:.2f}M"
    need = f"{count} parameters need about {_bytes(best.peak)} of {_bytes(budget)} on each rank"
    if not fits:
        return (
            f"{best.words} needs the least memory, {need}, which is more than there is. Type a smaller batch or "
            "microbatch, remat=full, or more devices"
        )
    if layouts[0].seconds < best.seconds:
        return f"{best.words}, {need}; {layouts[0].words} would be faster and need {_bytes(layouts[0].peak)}"
    other = next((layout for layout in layouts if layout.kind != best.kind and layout.peak <= budget), None)
    return f"{best.words}, {need}" + (
        f"; next is {other.words}, {other.seconds / best.seconds:.2f}x the time" if other else ""
    )


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
