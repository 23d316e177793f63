"""strategy=auto: picks the fastest layout that fits in memory, by a cost model: bytes per rank, and seconds of compute,
communication and waiting.

Data-parallel axes come first; the model itself is split only if they alone do not fit.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import MeshShape, PipelineShape, Plan
from dtrain.predict import formulas
from dtrain.predict.advice import STRENGTH
from dtrain.predict.memory import memory
from dtrain.predict.prediction import LIBRARIES
from dtrain.predict.report import size
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
    """A candidate layout. `plan`: its fields that predictions read, others are None; `seconds`: predicted time per
    step.
    """

    mode: str
    plan: Plan
    shapes: Shapes
    seconds: float = 0.0

    @cached_property
    def peak(self) -> int:
        """Peak bytes on the fullest rank."""
        return memory(self.plan, self.shapes).peak

    @property
    def split(self) -> dict[str, int]:
        """The axes that split the model -> their degrees."""
        return {axis: getattr(self.plan.mesh, axis) for axis in ("pp", "tp") if getattr(self.plan.mesh, axis) > 1}

    @property
    def words(self) -> str:
        degrees = (f"mesh.{axis}={degree}" for axis, degree in self.split.items())
        return " ".join([f"strategy={self.mode}", *degrees, f"microbatch={self.plan.batch.microbatch}"])


def strategy(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose the strategy; `auto` also writes its degrees of tp and pp to `layout` in the draft."""
    ranks = draft["nodes"] * draft["devices"]
    if config.choices["strategy"] != "auto":
        return {"strategy": choose(config, "strategy", "", draft["why"], "")}
    modes = _modes(config)
    seeds = [] if ranks == 1 else _seeds(config, cluster, draft, modes)
    layouts = sorted(_layouts(config, cluster, draft, seeds), key=lambda layout: layout.seconds)
    degrees = config.mesh.tp or 1, config.mesh.pp or 1
    simple = [layout for layout in layouts if (layout.plan.mesh.tp, layout.plan.mesh.pp) == degrees]
    if ranks == 1:
        word, reason = "single", "one rank"
    elif not seeds:
        unknown = "the model's size is not known before it is built; dtrain plan builds it and shows what fits"
        word, reason = "ddp", f"{ranks} ranks, and {unknown}"
    elif not simple:  # other words are wrong; later rules report them
        word, reason = "ddp", f"{ranks} ranks"
    else:
        budget = _budget(cluster, draft)
        fits = next((layout for some in (simple, layouts) for layout in some if layout.peak <= budget), None)
        best = fits or min(layouts, key=lambda layout: layout.peak)
        draft["layout"] = best.split
        draft["microbatch"] = best.plan.batch.microbatch
        word, reason = best.mode, _reason(best, layouts, budget, fits=fits is not None)
    return {"strategy": choose(config, "strategy", word, draft["why"], reason)}


def _budget(cluster: Cluster, draft: Mapping[str, Any]) -> float:
    """Bytes that a rank may use; without a GPU, the ranks of a host share its memory with Python and torch."""
    if draft["device"] == "cuda":
        return cluster.memory * USABLE
    shared: int = draft["devices"] * (1 if cluster.external else draft["nodes"])
    return max(0.0, cluster.memory * USABLE / shared - LIBRARIES)


def _modes(config: Config) -> list[str]:
    """Strategies that `auto` may choose (fact `try`), in ascending order of memory saved."""
    parts = {word: part for word, part in config.options["strategy"].items() if about(part).get("try")}
    return sorted(parts, key=lambda word: STRENGTH["strategy"](parts[word]))


def _seeds(config: Config, cluster: Cluster, draft: Mapping[str, Any], modes: Sequence[str]) -> list[Layout]:
    """One layout per mode on one rank, with the shapes of the model; empty if its shapes cannot be known here."""
    trial: dict[str, Any] = dict.fromkeys(field.name for field in fields(Plan)) | {"why": {}}
    trial |= {name: draft[name] for name in ("nodes", "devices", "device", "compile", "precision")}
    try:
        trial |= fit.objective(config, cluster, trial)
        trial |= fit.synthetic(config, cluster, trial)
        trial |= {group: dict(getattr(config, group)) for group in ("model", "remat", "optim", "checkpoint")}
        trial["model"]["freeze"], trial["adapter"] = [], {}  # more memory than they take
        trial |= {"tensor": vars(config.tensor), "context": vars(config.context), "ema": config.ema}
        trial |= {"mesh": MeshShape(cp=config.mesh.cp or 1), "pipeline": PipelineShape()}
        if trial["model"].get("vocab") == "auto" and formulas.facts_of(trial["data"]).get("vocab") is None:
            trial["model"]["vocab"] = VOCABULARY
        plans = {mode: Plan(**{**trial, "strategy": config.options["strategy"][mode]}) for mode in modes}
        shapes = {mode: formulas.shapes(plan) for mode, plan in plans.items()}
    except (WordsError, TypeError, KeyError, ValueError, ZeroDivisionError):  # later rules report wrong words
        return []
    return [Layout(mode, plans[mode], each) for mode, each in shapes.items() if each is not None]


def _layouts(config: Config, cluster: Cluster, draft: Mapping[str, Any], seeds: list[Layout]) -> Iterator[Layout]:
    """Every valid layout that respects the user's mesh degrees and microbatch."""
    ranks, asked = draft["nodes"] * draft["devices"], config.mesh
    blocks = max([1, *(seed.shapes.listed for seed in seeds)])
    for tp, pp in itertools.product(_degrees(asked.tp, draft["devices"]), _degrees(asked.pp, ranks)):
        split = tp * pp * (asked.cp or 1)
        if ranks % split or (pp > blocks and not asked.pp):
            continue
        for seed in seeds if ranks > split else seeds[:1]:
            for micro in _microbatches(config, ranks // split, pp):
                degrees = {"tp": tp, "pp": pp}
                trial = {**draft, "strategy": seed.plan.strategy, "layout": degrees, "microbatch": micro}
                plan = _planned(config, cluster, seed.plan, trial)
                if plan:
                    yield replace(seed, plan=plan, seconds=_seconds(plan, seed.shapes))


def _planned(config: Config, cluster: Cluster, plan: Plan, trial: dict[str, Any]) -> Plan | None:
    """`plan` with what later rules decide for this trial; None if one of them refuses it."""
    try:
        for rule in (mesh.degrees, pipeline.shape, batch.arithmetic):
            trial |= rule(config, cluster, trial)
    except WordsError:
        return None
    if any(model_axes.model(config, cluster, trial)):
        return None
    return replace(plan, **{name: trial[name] for name in ("strategy", "mesh", "pipeline", "batch")})


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


def _seconds(plan: Plan, shapes: Shapes) -> float:
    """Predicted seconds per step: compute, the pipeline bubble, communication that does not overlap with two thirds of
    the compute, and the latency of each collective.
    """
    shape, batches, holding = plan.mesh, plan.batch.accumulate, holding_of(plan)
    rate, near, far, wait = SPEED[plan.device]
    slow, numbers, several = far if plan.nodes > 1 else near, types_of(plan).param, shape.batch > 1
    part, blocks = shapes.parameters / (shape.tp * shape.pp), shapes.listed / shape.pp
    width = max(block.passes for block in shapes.blocks) / shape.cp * plan.batch.local
    compute = work(plan, shapes).total / shape.ranks / rate
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
    need = f"{count} parameters need about {size(best.peak)} of {size(budget)} on each rank"
    if not fits:
        return (
            f"{best.words} needs the least memory, {need}, which is more than there is. Type a smaller batch or "
            "microbatch, remat=full, or more devices"
        )
    if layouts[0].seconds < best.seconds:
        return f"{best.words}, {need}; {layouts[0].words} would be faster and need {size(layouts[0].peak)}"
    kind = best.mode, best.split
    other = next((one for one in layouts if (one.mode, one.split) != kind and one.peak <= budget), None)
    if other is None:
        return f"{best.words}, {need}"
    return f"{best.words}, {need}; next is {other.words}, {other.seconds / best.seconds:.2f}x the time"
