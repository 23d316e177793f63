"""Formats a prediction as rows of a name and a text, at most about as wide as a screen."""

from collections.abc import Iterable, Iterator

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict import blockless, padding, picture, price, reference
from dtrain.predict.advice import Change
from dtrain.predict.band import BANDS, kind_of
from dtrain.predict.collectives import Call
from dtrain.predict.prediction import Prediction
from dtrain.predict.shapes import in_tiles
from dtrain.predict.view import groups
from dtrain.secrets import screen

Row = tuple[str, str]
TIGHT = 0.03
"""Share of the budget below which the headroom is called tight."""
SMALL = 1 << 16
"""Axes with fewer bytes per step share one row."""


def rows(plan: Plan, prediction: Prediction, *, width: int = 110) -> Iterator[Row]:
    """Rows of memory, work, collectives and time, and pictures of pipeline and mesh."""
    if prediction.shapes.blocks:
        yield from _memory(plan, prediction)
        yield from _named("reference", filter(None, [reference.sentence(plan)]))
        yield from _named("padding", filter(None, [padding.sentence(plan, prediction.shapes)]))
        yield from _named("blocks", blockless.notes(plan, blocks=prediction.shapes.listed > 0))
        yield "work", _work(plan, prediction)
        yield from _named("collectives", _collectives(plan, prediction))
        yield from _time(plan, prediction)
        yield from _named("pipeline", _pipeline(plan, prediction, width))
    else:
        yield "memory", f"not known, nor are work and time: {prediction.shapes.unknown}"
    yield from _named("placement", picture.mesh(plan, width - 12))


def short(plan: Plan, prediction: Prediction) -> Iterator[Row]:
    """Rows printed before a run: predicted memory, and the time of a step and of all."""
    budget = f" (of {_available(prediction)}), {_left(prediction)}" if prediction.budget < float("inf") else ""
    unknown = "" if prediction.memory.known else f"; without activations: {prediction.shapes.unknown}"
    yield "memory", f"peak {size(prediction.memory.peak)} per rank{budget}{unknown}"
    if time := prediction.time:
        unit, rate = speed(plan, prediction)
        run = f"{plan.steps:,} steps in {duration(time.seconds * plan.steps)}"
        run += price.clause(plan, time.seconds * plan.steps)
        yield "time", f"about {duration(time.seconds)} a step, {count(rate)} {unit}, MFU {time.mfu:.0%}; {run}"


def warning(prediction: Prediction) -> str:
    """One line for a run that is predicted not to fit. It is only a warning, because activations are estimated."""
    memory = prediction.memory
    return (
        f"predicted peak {size(memory.peak)} per rank, in the {memory.when}, more than the "
        f"{_available(prediction)} available. Type dtrain plan and the same words to see what would fit."
    )


def advice(changes: Iterable[Change], plan: Plan) -> Iterator[Row]:
    """Rows of words to type."""
    listed = list(changes)
    if not listed:
        enough = "more memory, more nodes, or a smaller model: none of the changes that were tried is enough"
        yield "try", f"{enough}; dtrain plan best, without strategy and mesh, tries every layout"
    figures = [_figures(change, plan) for change in listed]
    wide = max(map(len, figures), default=0)
    for change, text in zip(listed, figures, strict=True):
        yield "try", f"{text:<{wide}}  {' '.join(change.words)}"


def _figures(change: Change, plan: Plan) -> str:
    """Time and memory of a plan with a change, and what else it does beside `plan`."""
    time, peak = change.prediction.time, size(change.prediction.memory.peak)
    seconds = f"{duration(time.seconds)} a step" if time else ""
    cost = price.predicted(change.plan, change.prediction)
    priced = "" if cost is None else f"a price of {price.amount(cost)}"
    ranks = f"on {change.plan.world} ranks" if change.plan.world != plan.world else ""
    numbers = "changes the numbers" if change.plan.precision != plan.precision else ""
    tight = "tight" if is_tight(change.prediction) else ""
    return ", ".join(filter(None, [seconds, priced, ranks, peak, tight, numbers]))


def is_tight(prediction: Prediction) -> bool:
    """Whether it fits with less room than predictions of memory are often wrong by."""
    return prediction.fits and prediction.memory.peak > (1 - TIGHT) * prediction.budget


def _memory(plan: Plan, prediction: Prediction) -> Iterator[Row]:
    memory = prediction.memory
    where = f", {memory.stage}" if memory.stage else ""
    budget = f" (of {_available(prediction)}), {_left(prediction)}" if prediction.budget < float("inf") else ""
    verdict = "" if prediction.fits else "  DOES NOT FIT"
    others = "Python and torch" if plan.device == "cpu" else "the driver and its libraries"
    owners = {"libraries": others, "communicators": "groups that communicate"}
    libraries = ", ".join(f"{size(part)} for {owners[name]}" for name, part in prediction.kept.items() if part)
    libraries = f"; plus {libraries}" if libraries else ""
    unknown = "" if memory.known else f"; without activations: {prediction.shapes.unknown}"
    peak = f"peak {size(memory.peak)} per rank{budget}"
    yield "memory", f"{peak}, in the {memory.when}{where}{libraries}{unknown}{verdict}"
    parts = sorted(memory.moment.items(), key=lambda part: -part[1])
    yield "", "  ".join(f"{name} {size(part)}" for name, part in parts if part >= memory.peak / 200)
    at_rest = ("parameters", "gradients", "optimizer", "activations", "host")
    yield "at rest", "  ".join(f"{name} {size(getattr(memory, name))}" for name in at_rest)


def _available(prediction: Prediction) -> str:
    """Memory that a rank may use."""
    return size(prediction.budget) if prediction.budget else "0 B that Python and torch leave"


def _left(prediction: Prediction) -> str:
    left = prediction.budget - prediction.memory.peak
    tight = ", tight" * is_tight(prediction)
    return f"headroom {size(left)}{tight}" if left >= 0 else f"{size(-left)} too much"


def _work(plan: Plan, prediction: Prediction) -> str:
    work, amount, spared = prediction.work, "operations not known", prediction.shapes.undecayed
    decays = fact(plan.optim, "decays") == "matrices" and plan.optim.get("weight_decay")
    if work.total:
        again = f" + {operations(work.recomputed)} recomputed" if work.recomputed else ""
        amount = f"{operations(work.forward)} forward + {operations(work.backward)} backward{again} a step"
    undecayed = f" ({count(spared)} of them not decayed)" if decays and spared else ""
    parameters = f"{count(prediction.shapes.parameters)} parameters{undecayed}"
    return f"{parameters}, {amount}, checkpoint {size(prediction.checkpoint)}"


def _collectives(plan: Plan, prediction: Prediction) -> Iterator[str]:
    """One row per axis; axes with few bytes share a row."""
    little: list[Call] = []
    calls = [call for call in prediction.calls if call.when in ("step", "data") and call.kind != "recv"]
    for axis, group in groups(plan).items():
        mine = [call for call in calls if call.axis == axis]
        if sum(call.bytes for call in mine) < SMALL:
            little += mine
            continue
        text = ", ".join(f"{call.what}: {call.kind} {size(call.bytes)} in {call.calls:,}" for call in mine)
        yield f"{axis}={group.size}  {text}"
    if little:
        names = ", ".join(dict.fromkeys(call.what for call in little))
        bytes_, times = size(sum(call.bytes for call in little)), sum(call.calls for call in little)
        yield f"{bytes_} in {times:,} small calls: {names}"
    if prediction.calls:
        yield "calls and bytes a step on one rank" + f" of pp rank {prediction.rank}" * (plan.mesh.pp > 1)
    if prediction.shapes.unknown and plan.world > 1:
        yield (
            "a guess: every block is assumed to run once, without the communication inside forwards: "
            f"{prediction.shapes.unknown}"
        )


def _time(plan: Plan, prediction: Prediction) -> Iterator[Row]:
    time = prediction.time
    if time is None:
        return
    unit, rate = speed(plan, prediction)
    whole, _, each = unit.rpartition("/")
    rates = [f"{count(rate * plan.world)} {whole}"] + [f"{count(rate)} {unit}"] * (plan.world > 1)
    rates += [f"{operations(time.rank_flops)}/s/{each}", f"MFU {time.mfu:.0%}"]
    run = f"{plan.steps} steps in {duration(time.seconds * plan.steps)}{price.clause(plan, time.seconds * plan.steps)}"
    yield "time", f"about {duration(time.seconds)} a step, {', '.join(rates)}; {run}"
    if unmeasured := fact(plan.cluster, "unmeasured"):
        yield "", f"by figures of a usual machine, not of this one: {screen.on_one_line(unmeasured)}"
    kind = kind_of(plan, prediction.shapes)
    if kind in BANDS:
        lowest, highest = (duration(time.seconds * part) for part in BANDS[kind])
        yield "", f"{lowest} to {highest} a step would be usual for a {kind} run"
    else:
        yield "", f"how far off this may be is not known: no {kind} run is published with its words"
    tiles = next((one for block in prediction.shapes.blocks for one in block.attention if in_tiles(plan, one)), None)
    if tiles:
        widths = f"{tiles.head}" if tiles.head == tiles.value else f"{tiles.head} with values of {tiles.value}"
        where = "the CPU" if plan.device == "cpu" else "a GPU"
        yield (
            "",
            f"on {where} torch fuses no attention to heads of {widths}: the ring multiplies tiles of scores in fp32",
        )
    parts = {"matmul": time.products, "attention": time.attention, "activations": time.activations}
    parts |= {"dispatch": time.starting} | {f"{axis} calls": spent for axis, spent in time.collectives.items()}
    parts |= {"contention": time.contention, "pipeline bubble": time.waits, "optimizer": time.optimizer}
    least = time.seconds / 100
    text = " + ".join(f"{name} {duration(spent)}" for name, spent in parts.items() if spent >= least)
    if time.hidden >= least:
        text += f"; {duration(time.hidden)} of communication overlaps with compute"
    yield "", text


def speed(plan: Plan, prediction: Prediction) -> tuple[str, float]:
    """tokens/s/GPU and their number: samples of a model without tokens, and of a rank where there is no GPU; 0 if the
    time is not known.
    """
    time, tokens = prediction.time, prediction.shapes.tokens > 1
    unit = f"{'tokens' if tokens else 'samples'}/s/{'rank' if plan.device == 'cpu' else 'GPU'}"
    rate = getattr(time, "tokens_per_second" if tokens else "samples_per_second", 0.0)
    return unit, rate / plan.world


def _pipeline(plan: Plan, prediction: Prediction, width: int) -> list[str]:
    if plan.mesh.pp == 1:
        return []
    stages = ", ".join(map(str, prediction.in_flight))
    return [
        f"a rank is idle {prediction.bubble:.0%} of the time; microbatches in flight per stage: {stages}",
        *picture.pipeline(plan, width - 12),
    ]


def _named(name: str, lines: Iterable[str]) -> Iterator[Row]:
    for index, line in enumerate(lines):
        yield name if index == 0 else "", line


def size(number: float) -> str:
    """1.5 GiB"""
    for unit, scale in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}" if number < 1000 * scale else f"{number / scale:.0f} {unit}"
    return f"{number:.0f} B"


def count(number: float) -> str:
    """70.6B"""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def operations(number: float) -> str:
    """1.5 PFLOP"""
    for unit, scale in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} FLOP"


def duration(seconds: float) -> str:
    """1.5 h"""
    for unit, scale, least in (("days", 86400, 2), ("h", 3600, 2), ("min", 60, 2), ("s", 1.0, 1), ("ms", 1e-3, 1)):
        if seconds >= least * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
