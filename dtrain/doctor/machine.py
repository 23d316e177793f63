"""Check that measures the cores of this host, for the predictions of `dtrain plan`: <cache>/machine.json.

Rates of operators and collectives come from ranks of dtrain.doctor.speed. What the host adds comes from steps of tiny
runs: each figure is the one with which the prediction of such a run is what its step took.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.build import build
from dtrain.cluster import Cluster, detect, measured
from dtrain.cluster.measured import LEAST, Figures
from dtrain.compose import compose
from dtrain.doctor import Case, Finding
from dtrain.doctor.ranks import measuring
from dtrain.errors import DtrainError, first_line
from dtrain.launcher import zygote
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.prediction import predict
from dtrain.predict.report import duration, operations
from dtrain.predict.time import Time
from dtrain.resolve import resolve
from dtrain.storage import store

CORES, STEPS = "dtrain.doctor.speed.cores", "dtrain.doctor.speed.steps"
TINY = ("model=gpt", "model.width=32", "model.layers=4", "data=synthetic", "data.sequence=16", "batch=4", "steps=1000")
SHALLOW = ("model=mlp", "model.width=16", "model.layers=1", "data=synthetic", "objective=classification", "batch=4")
RUNS: Mapping[str, Sequence[str]] = {
    "operator": (*TINY, "devices=1", "strategy=single"),
    "step": (*SHALLOW, "steps=1000", "devices=1", "strategy=single"),
    "copies": (*TINY, "devices=2", "strategy=ddp"),
    "shards": (*TINY, "devices=2", "strategy=fsdp"),
    "tp": (*TINY, "devices=2", "mesh.tp=2", "strategy=ddp"),
    "pp": (*TINY, "devices=2", "mesh.pp=2", "strategy=ddp", "microbatch=1"),
    "byte": (*TINY, "model.width=512", "model.layers=2", "devices=2", "strategy=fsdp"),
}
"""Figure of the host -> the words of a run that it rules."""
ROUNDS = 3
"""`operator` and `step`, `shards` and `byte` are found in turns, each with what is known of the other."""
BUSY = 0.1
"""Part of the time that other work may have of the cores: figures taken beside more of it predict badly."""
UNIT = 1e-6
"""Seconds by which a figure is varied, to see what it adds."""
PIECES = 4
"""Steps of Newton's method: transfers of a pipeline hide in one piece of a prediction and not in the next."""


def machine(case: Case) -> Iterable[Finding]:
    """Measure this host's cores and keep the figures; nothing where the plan is for GPUs or another machine, and none
    are kept where other work has the cores.
    """
    here = detect()
    if (
        case.plan.device != "cpu"
        or here.gpus
        or here.external
        or "cluster" not in case.plan.why
        or "error" in case.torch()
    ):
        return
    try:
        with tempfile.TemporaryDirectory() as folder, zygote.kept():
            zygote.begin()
            words = (f"out={folder}/run", "logger=[]")
            rates = _rates(here, words)
            if rates["busy"] > BUSY:
                text = f"its speed was not measured: other work had {rates['busy']:.0%} of a core"
                yield Finding("machine", "note", text, "run it again when nothing else does")
                return
            figures = _figures(here, words, rates)
        file = measured.place()
        file.parent.mkdir(parents=True, exist_ok=True)
        store.write(str(file), measured.document(here.cpus, figures))
    except (DtrainError, OSError) as error:
        yield Finding("machine", "note", f"its speed was not measured: {first_line(error)}")
        return
    yield told(figures, here.cpus, str(file))


def told(figures: Figures, cpus: int, file: str) -> Finding:
    """The figures of `cpus` cores, in words."""
    alone, whole, together = (figures["product_fp32"][way][-1][1][-1][1] for way in measured.WAYS)
    text = f"a core reaches {operations(alone)}/s, {cpus} together {operations(max(whole, cpus * together))}/s"
    text += f"; a step costs the host {duration(figures['step'])} and {duration(figures['operator'])} an operator"
    text += f"; dtrain plan uses it, from {file}"
    return Finding("machine", "ok", text, facts=figures)


def _rates(here: Cluster, words: Sequence[str]) -> Mapping[str, Any]:
    """Rates of operators and seconds of collectives, of as many ranks as there are cores."""
    ranks = (*TINY, *words, f"devices={here.cpus}", f"batch={4 * here.cpus}", "threads=1")
    return _launched(_plan(here, (*ranks, f"strategy={'ddp' if here.cpus > 1 else 'single'}")), CORES)


def _figures(here: Cluster, words: Sequence[str], rates: Mapping[str, Any]) -> dict[str, Any]:
    """All figures; those of the host by runs."""
    figures = {**rates["figures"], **rates["calls"], **dict.fromkeys(measured.HOSTS, LEAST)}
    taken = {
        name: _launched(_plan(here, (*run, *words)), STEPS)["seconds"]
        for name, run in RUNS.items()
        if here.cpus > 1 or "devices=1" in run
    }
    for name in [*("operator", "step") * ROUNDS, *taken, *(("shards", "byte") * ROUNDS if "byte" in taken else ())]:
        figures[name] = _solved(name, taken[name], replace(here, figures=figures))
    return {name: value for name, value in figures.items() if name not in measured.HOSTS or name in taken}


def _solved(name: str, seconds: float, here: Cluster) -> float:
    """The figure with which a step of its run is predicted to take so long. Newton's method: a prediction is made of
    straight pieces.
    """

    def time(value: float) -> Time:
        return _predicted(_plan(replace(here, figures={**(here.figures or {}), name: value}), RUNS[name]))

    value = LEAST
    for _ in range(PIECES):
        before = time(value).seconds
        value = max(LEAST, value + UNIT * (seconds - before) / (time(value + UNIT).seconds - before))
    return value


def _predicted(plan: Plan) -> Time:
    """The time of a step."""
    shapes = formulas.shapes(plan)
    time = predict(plan, shapes).time if shapes else None
    assert time, "the model is one of dtrain's, and the cluster is this one"
    return time


def _plan(here: Cluster, words: Sequence[str]) -> Plan:
    return resolve(compose(words), here)


def _launched(plan: Plan, loop: str) -> Mapping[str, Any]:
    """The metrics of a loop that measures."""
    metrics: Mapping[str, Any] = build(plan.launcher).launch(measuring(plan, loop)).metrics
    return metrics
