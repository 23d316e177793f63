"""`dtrain plan -m <words>`: the jobs of a sweep with their predictions, none of which is run.

dtrain plan -m cluster=h100x8 nodes=2,4,8 strategy=fsdp,hsdp batch=256     a row for each of the six jobs
dtrain plan json -m <words>                                                the same for tools
"""

import json
from collections.abc import Sequence

from dtrain.cluster import detect
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict import price, report
from dtrain.predict.prediction import Prediction, predict
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.sweep import foreign, jobs
from dtrain.sweep.crew import split
from dtrain.sweep.space import label, words
from dtrain.verb.decide import decide_for_slot
from dtrain.verb.shapes import shapes_of


def run(given: Sequence[str], *, for_tools: bool) -> int:
    ours, hydras = foreign.split(given)
    if hydras.sweeper:
        raise WordsError(
            f"plan -m: hydra/sweeper={hydras.sweeper} proposes a job after others have ended, so there is no list of "
            "them. Leave it out."
        )
    request, nodes = split(jobs.read(ours))
    judged = jobs.judged(request, nodes.cluster if nodes else detect(), decide_for_slot)
    if judged.study.is_search:
        raise WordsError(
            "plan -m: a search draws its jobs one after the other, so there is no list of them. Type values such as "
            "optim.lr=1e-3,3e-3, or leave -m out."
        )
    planned = [(job, jobs.decided(job, request.root, judged, decide_for_slot, 0).plan) for job in judged.jobs]
    predicted = [(job, plan, predict(plan, shapes_of(plan))) for job, plan in planned]
    if for_tools:
        each = [
            {"words": words(job.values), **price.stated(plan, said), "prediction": said.to_dict()}
            for job, plan, said in predicted
        ]
        screen.say(json.dumps(clean(each), indent=1))
        return 0
    fit = sum(prediction.fits for _, _, prediction in predicted)
    screen.say(f"{len(predicted)} jobs, of which {fit} fit into memory")
    units = sorted({report.speed(plan, said)[0] for _, plan, said in predicted if said.time})
    heads = "a step", units[0] if len(units) == 1 else "speed", "peak", "fits", "words that vary"
    rows = [(*_figures(plan, said, unit=len(units) > 1), label(job.values)) for job, plan, said in predicted]
    table = [heads, *rows]
    prices = [price.predicted(plan, said) for _, plan, said in predicted]
    if any(each is not None for each in prices):
        column = ("price", *("-" if each is None else price.amount(each) for each in prices))
        table = [(*row[:-1], each, row[-1]) for row, each in zip(table, column, strict=True)]
    screen.say(screen.figures(table))
    return 0


def _figures(plan: Plan, prediction: Prediction, *, unit: bool) -> tuple[str, ...]:
    """A dash for what cannot be known; `unit`: speeds have theirs, as those of other jobs have another."""
    if not prediction.shapes.blocks:
        return "-", "-", "-", "-"
    time, (name, speed) = prediction.time, report.speed(plan, prediction)
    rates = (report.duration(time.seconds), f"{report.count(speed)} {name if unit else ''}".rstrip()) if time else "--"
    return *rates, report.size(prediction.memory.peak), "yes" if prediction.fits else "no"
