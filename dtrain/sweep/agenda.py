"""The work of a command in a sweep: the proposer of a grid, of a search or of named jobs, the number of all jobs, and
of those that are finished.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from dtrain.config.word import cut
from dtrain.errors import WordsError
from dtrain.secrets import screen
from dtrain.sweep import folder, jobs, stop, trials
from dtrain.sweep.drawing import sampler_of
from dtrain.sweep.folder import Job, State
from dtrain.sweep.proposer import Listed, Proposer
from dtrain.sweep.search import Search
from dtrain.sweep.study import Study


def of(
    requests: Sequence[jobs.Request], judged: jobs.Judged, every: Sequence[Job], study: Study, *, shuffled: bool
) -> tuple[Proposer, int, int]:
    """The proposer of a grid or a search, the number of its jobs, and of those that are finished."""
    request = requests[0]
    source, total, done = (
        _search(request.root, request, judged, study)
        if study.is_search
        else _grid(request.root, every, study, shuffled=shuffled)
    )
    if study.stop == "none":
        return source, total, done
    screen.say(stop.sentence(study, judged.plan.steps))
    space = [axis for each in requests for axis in each.space]
    stopping = stop.proposer(
        request.root,
        study,
        steps=judged.plan.steps,
        source=source,
        total=total,
        space=space,
        birth=lambda values, parent, step: jobs.born(request, values, judged.conditions, parent, step),
    )
    return stopping, total, done


def _grid(root: str, every: Sequence[Job], study: Study, *, shuffled: bool) -> tuple[Proposer, int, int]:
    """The jobs that are not finished, the number of all, and of those that are. Those that may stop early are compared
    with the finished ones too, in their order.
    """
    states = folder.states(root, every)
    left = [job for job in every if states[job.name].status != "finished"]
    if study.stop != "none":
        return Listed(stop.in_order(every, study)), len(every), len(every) - len(left)
    if shuffled:
        random.shuffle(left)
    return Listed(left), len(every), len(every) - len(left)


def named(
    requests: Sequence[jobs.Request],
    judged: Sequence[jobs.Judged],
    every: Sequence[Job],
    study: Study,
    names: frozenset[str],
) -> tuple[Proposer, int, int]:
    """The jobs of these names, of a grid or of the trials of a search. Raises WordsError for another name."""
    known = {job.name: job for job in every}
    for request, each in zip(requests, judged, strict=True):
        for trial in trials.every(request.root, request.space) if study.is_search else ():
            known[trial.job] = replace(jobs.drawn(request, trial.values, each.conditions), name=trial.job)
    if unknown := names - known.keys():
        raise WordsError(*(f"retry: {cut(name)} is no job of this sweep. Name others." for name in sorted(unknown)))
    return Listed([known[name] for name in known if name in names]), len(names), 0


def _search(root: str, request: jobs.Request, judged: jobs.Judged, study: Study) -> tuple[Proposer, int, int]:
    """The search as far as its files say, the number of its trials, and of those that are finished."""
    known = trials.every(root, request.space)
    states = folder.states(root, [Job({}, (), trial.job) for trial in known])
    search = Search(
        root=root,
        study=study,
        sampler=sampler_of(study, request.space, judged.conditions),
        read=lambda number: trials.read(root, number, request.space),
        make=lambda values: jobs.drawn(request, values, judged.conditions),
        known=[(trial, states[trial.job] if study.stop == "none" else State("new")) for trial in known],
    )
    return search, study.trials or 0, sum(state.status == "finished" for state in states.values())
