"""`dtrain why <a run> [words]`: why it is slower than planned, or holds more: predicted beside measured.

dtrain why runs/a
dtrain why s3://bucket/run trust=mine          a run with code of your own, which the prediction builds

Predicted is what `dtrain plan` says of the run's words on the machine that it ran on, measured what its files say.
Without `trust`, a run with code of your own has what was measured alone.
Steps are compared by their median, without the first tenth, in which kernels are chosen and compiled.
"""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from dtrain.cluster import Cluster, Machine, detect
from dtrain.compose import compose, connect, value_of
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
from dtrain.result import PARTS as SPENT_PARTS
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.verb.shapes import shapes_of
from dtrain.verb.train import SPENT

WARM = 0.1
"""Share of the steps, at the start, that do not count."""
MUCH = 0.1
"""Share of the time for which steps may wait for samples before it is told."""
PARTS = {
    "matmul": "products", "attention": "attention", "activations": "activations", "dispatch": "starting",
    "contention": "contention", "pipeline bubble": "waits", "optimizer": "optimizer",
}  # fmt: skip
"""Part of a step -> its name in a prediction."""
Row = tuple[str, str, str, str]


@store.starting()
def run(words: Sequence[str]) -> int:
    places = [word for word in words if "=" not in word]
    if len(places) != 1:
        raise WordsError(f"why: type dtrain why <the folder or URL of a run>, one, not {len(places)}.")
    url, more = places[0].rstrip("/"), [word for word in words if word not in places]
    connect(more, url)
    if not store.exists(store.join(url, "config.yaml")):
        raise StoreError.during("find a run at", url, "there is no config.yaml", "Type dtrain why <a run>")
    measured = [row for row in rows(store.read(store.join(url, "metrics.jsonl"))) if FINITE.holds(row.get("step"))]
    warm = measured[int(len(measured) * WARM) + 1 :]
    if not warm:
        raise StoreError.during("find measured steps in", url, "metrics.jsonl has fewer than two rows")
    step, there = statistics.median(_finite(warm, "step_seconds")), _plan(url)
    if strangers := [package for package in there.get("trust") or () if not _trusts(more, package)]:
        table, advice = _measured(warm, step), [("predicted", _untold(url, strangers))]
    else:
        plan = resolve(compose([f"recipe={store.join(url, 'config.yaml')}", *more]), _cluster(there), shapes_of)
        prediction = predict(plan, shapes_of(plan))
        table, advice = _figures(plan, prediction, warm, step), [*_advice(plan, prediction, step)]
    screen.say(screen.table([("", "predicted", "measured", ""), *table]))
    screen.say(screen.rows([*_wall(url, measured, step), *_waits(there, measured), *advice]))
    return 0


def _trusts(words: Sequence[str], package: str) -> bool:
    trust = value_of(words, "trust")
    return trust is not None and re.search(rf"(?<!\w){re.escape(package)}(?!\w)", trust) is not None


def _untold(url: str, packages: Sequence[str]) -> str:
    """Why nothing is predicted, and what to type."""
    trust = screen.typed(f"trust=[{','.join(packages)}]")
    code = f"a prediction runs code of {', '.join(packages)}, which only you can trust"
    return screen.on_one_line(f"nothing: {code}. Type dtrain why {screen.typed(url)} {trust}")


def _plan(url: str) -> Mapping[str, Any]:
    """The plan.yaml of a run."""
    place = store.join(url, "plan.yaml")
    try:
        plan = yaml.safe_load(store.read(place))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError.during("read", place, "it is not YAML") from error
    if wrong := fault(plan, SHAPE):
        raise StoreError.during("read", place, f"it is no plan: {wrong}")
    return dict(plan)


def _cluster(plan: Mapping[str, Any]) -> Cluster:
    """The machine that a run was on, as its plan has it; this one if it has none."""
    here = detect()
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


def _measured(measured: Sequence[Mapping[str, Any]], step: float) -> Iterator[Row]:
    """The rows of `_figures` without a prediction."""
    yield "a step", "", report.duration(step), ""
    if rates := [*_finite(measured, "mfu")]:
        yield "MFU", "", f"{statistics.median(rates):.0%}", ""
    if peak := max(_finite(measured, "peak_bytes"), default=0):
        yield "peak of a rank", "", report.size(peak), ""


def _finite(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[float]:
    return (row[name] for row in rows if FINITE.holds(row.get(name)))


def _wall(url: str, measured: Sequence[Mapping[str, Any]], step: float) -> Iterator[tuple[str, str]]:
    """Where the time of the run went, as its flushes have it."""
    events = facts.events(url)
    wall = seconds(events)
    if not wall:
        return
    taken = [*_finite(measured, "step_seconds")]
    slow = [seconds for seconds in taken if seconds > 2 * step]
    spent = _spent(measured)
    parts = {
        f"{len(taken):,} steps": spent.pop("step"),
        f"{len(slow):,} of them slow, which took more than the median by": sum(slow) - len(slow) * step,
        **{SPENT[part]: seconds for part, seconds in spent.items()},
    }
    parts["start and end"] = wall - sum(_spent(measured).values())
    text = ", ".join(f"{name} {report.duration(value)}" for name, value in parts.items() if value > wall / 200)
    restarts = sum(event.get("event") == "restarted" for event in events)
    yield "wall", f"{report.duration(wall)}: {text}" + f"; {restarts} restarts" * bool(restarts)


def _spent(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Part of the loop -> seconds, of all flushes."""
    return {part: sum(_finite(measured, f"time_{part}")) for part in SPENT_PARTS}


def _waits(plan: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Words to type where steps wait long for samples."""
    spent = _spent(measured)
    share = spent["data_wait"] / (sum(spent.values()) or 1.0)
    if share > MUCH:
        workers = plan.get("data", {}).get("workers")
        words = "Its data takes no data.workers: type dtrain doctor out=<the storage of the data>, which measures it"
        if isinstance(workers, int):
            words = f"Type data.workers={max(2, 2 * workers)}: processes that load, {workers} here"
        yield "samples", f"steps wait for them {share:.0%} of the time. {words}"


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
        yield "type", "dtrain doctor, without words, on that machine: it measures what the prediction takes for granted"
        if plan.world > 1:
            yield "", f"dtrain doctor nodes={plan.nodes} devices={plan.devices}: it measures what ranks send each other"
        if plan.device == "cpu" and plan.world * plan.threads > int(plan.cluster["cpus"]):
            yield "cores", f"{plan.world} ranks x {plan.threads} threads share {plan.cluster['cpus']} cores"
    elif ratio < lowest:
        yield "time", f"faster than usual for a {kind} run: the prediction knows this machine badly"
    else:
        yield "time", f"as usual for a {kind} run"
