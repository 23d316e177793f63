"""`dtrain why <a run> [words]`: why it is slower than planned, or holds more: predicted beside measured.

dtrain why runs/a
dtrain why s3://bucket/run trust=mine          a run with code of your own, which the prediction builds

Predicted is what `dtrain plan` says of the run's words on the machine that it ran on, measured what its files say.
Steps are compared by their median, without the first tenth, in which kernels are chosen and compiled.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from dtrain.cluster import Cluster, Machine, detect
from dtrain.compose import compose, connect
from dtrain.config.structure import FINITE, fault
from dtrain.errors import StoreError, WordsError
from dtrain.planned import SHAPE, Plan
from dtrain.predict import report
from dtrain.predict.band import BANDS, kind_of
from dtrain.predict.prediction import Prediction, predict
from dtrain.report import facts
from dtrain.report.of_run import seconds
from dtrain.report.runs import rows
from dtrain.resolve import resolve
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.verb.shapes import shapes_of

WARM = 0.1
"""Share of the steps, at the start, that do not count."""
PARTS = {
    "matmul": "products", "attention": "attention", "activations": "activations", "dispatch": "starting",
    "contention": "contention", "pipeline bubble": "waits", "optimizer": "optimizer",
}  # fmt: skip
"""Part of a step -> its name in a prediction."""
Row = tuple[str, str, str, str]


def run(words: Sequence[str]) -> int:
    places = [word for word in words if "=" not in word]
    if len(places) != 1:
        raise WordsError(f"why: type dtrain why <the folder or URL of a run>, one, not {len(places)}.")
    url, more = places[0].rstrip("/"), [word for word in words if word not in places]
    connect(more, url)
    if not store.exists(store.join(url, "config.yaml")):
        raise StoreError.during("find a run at", url, "there is no config.yaml", "Type dtrain why <a run>")
    config = compose([f"recipe={store.join(url, 'config.yaml')}", *more])
    plan = resolve(config, _there(url), shapes_of)
    prediction = predict(plan, shapes_of(plan))
    measured = [row for row in rows(store.read(store.join(url, "metrics.jsonl"))) if FINITE.holds(row.get("step"))]
    warm = measured[int(len(measured) * WARM) + 1 :]
    if not warm:
        raise StoreError.during("find measured steps in", url, "metrics.jsonl has fewer than two rows")
    step = statistics.median(_finite(warm, "step_seconds"))
    table = [("", "predicted", "measured", ""), *_figures(plan, prediction, warm, step)]
    screen.say(screen.table(table))
    screen.say(screen.rows([*_wall(url, measured, step), *_advice(plan, prediction, step)]))
    return 0


def _there(url: str) -> Cluster:
    """The machine that the run was on, as its plan.yaml has it; this one if it has none."""
    here = detect()
    try:
        plan = yaml.safe_load(store.read(store.join(url, "plan.yaml")))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError.during("read", store.join(url, "plan.yaml"), "it is not YAML") from error
    if wrong := fault(plan, SHAPE):
        raise StoreError.during("read", store.join(url, "plan.yaml"), f"it is no plan: {wrong}")
    figures = {name: value for name, value in plan["cluster"].items() if not name.startswith("_")}
    there = Machine(**figures).seen(here) if figures else here
    return here if (there.gpus, there.cpus) == (here.gpus, here.cpus) else there


def _figures(plan: Plan, prediction: Prediction, measured: Sequence[Mapping[str, Any]], step: float) -> Iterator[Row]:
    """Rows of a step's time and its parts, of MFU and memory."""
    if time := prediction.time:
        yield "a step", report.duration(time.seconds), report.duration(step), f"{step / time.seconds:.2f}x"
        spent = {name: getattr(time, part) for name, part in PARTS.items()}
        spent |= {f"{axis} calls": value for axis, value in time.collectives.items()}
        for name, value in spent.items():
            if value >= time.seconds / 100:
                yield f"  {name}", report.duration(value), "", ""
        if rates := [*_finite(measured, "mfu")]:
            yield "MFU", f"{time.mfu:.0%}", f"{statistics.median(rates):.0%}", ""
    libraries = sum(prediction.kept.values()) if plan.device == "cpu" else 0  # of a process, not of torch's allocator
    predicted, peak = prediction.memory.peak + libraries, max(_finite(measured, "peak_bytes"), default=0)
    if prediction.memory.known and peak:
        yield "peak of a rank", report.size(predicted), report.size(peak), f"{peak / predicted:.2f}x"


def _finite(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[float]:
    return (row[name] for row in rows if FINITE.holds(row.get(name)))


def _wall(url: str, measured: Sequence[Mapping[str, Any]], step: float) -> Iterator[tuple[str, str]]:
    """Where the time of the run went."""
    events = facts.events(url)
    wall = seconds(events)
    if not wall:
        return
    taken = [*_finite(measured, "step_seconds")]
    slow = [seconds for seconds in taken if seconds > 2 * step]
    steps, stalls = sum(taken), sum(_finite(events, "stall_seconds"))
    restarts = sum(event.get("event") == "restarted" for event in events)
    rest = max(0.0, wall - steps - stalls)
    parts = {
        f"{len(taken):,} steps": steps,
        f"{len(slow):,} of them slow, which took more than the median by": sum(slow) - len(slow) * step,
        "saves that training waited for": stalls,
        "start, evaluation and end": rest,
    }
    text = ", ".join(f"{name} {report.duration(value)}" for name, value in parts.items() if value > wall / 200)
    yield "wall", f"{report.duration(wall)}: {text}" + f"; {restarts} restarts" * bool(restarts)


def _advice(plan: Plan, prediction: Prediction, step: float) -> Iterator[tuple[str, str]]:
    """The verdict of the comparison, and words to type."""
    if not prediction.time:
        yield "time", "not predicted: dtrain plan of these words says why"
        return
    kind = kind_of(plan, prediction.shapes)
    lowest, highest = BANDS.get(kind, (0.0, float("inf")))
    ratio = step / prediction.time.seconds
    if ratio > highest:
        yield "time", f"slower than usual for a {kind} run, which takes up to {highest:g}x of what is predicted"
        words = f" nodes={plan.nodes} devices={plan.devices}" if plan.world > 1 else ""
        yield "type", f"dtrain doctor{words}, on that machine: it measures what the prediction takes for granted"
        if plan.device == "cpu" and plan.world * plan.threads > int(plan.cluster["cpus"]):
            yield "cores", f"{plan.world} ranks x {plan.threads} threads share {plan.cluster['cpus']} cores"
    elif ratio < lowest:
        yield "time", f"faster than usual for a {kind} run: the prediction knows this machine badly"
    else:
        yield "time", f"as usual for a {kind} run"
