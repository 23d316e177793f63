"""The words of a sweep -> its jobs, all of them judged before the first one begins."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from dtrain import recipe, secrets
from dtrain.cluster import Cluster, share
from dtrain.compose import compose, vocabulary, with_spaces
from dtrain.compose.check import Vocabulary, shown
from dtrain.compose.typed import typed, unlisted
from dtrain.config import constraints, files
from dtrain.config.schema import GROUPS, Config, of_scope
from dtrain.config.sections import Sweep
from dtrain.config.word import Word, cut, quote, slug, spelling
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.prediction import predict
from dtrain.recipe import policy
from dtrain.recipe.locate import find
from dtrain.resolve import values
from dtrain.resolve.out import digest
from dtrain.storage import attempts, options, store
from dtrain.sweep import folder, space, stop, study
from dtrain.sweep.conditional import Conditions, conditions, corners, exists
from dtrain.sweep.engine import Decided
from dtrain.sweep.folder import Description, Job
from dtrain.sweep.space import MOST, Axis, Choices, Interval
from dtrain.sweep.study import Study

Judge = Callable[[Config, Cluster], Plan]


@dataclass(frozen=True)
class Request:
    """The words of a sweep. `words`: those of all jobs; `settings`: those that begin with `sweep.`."""

    root: str
    words: tuple[Word, ...]
    settings: tuple[Word, ...]
    space: tuple[Axis, ...]
    swept: tuple[Word, ...] = ()
    """The words that the space was read from."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Key -> the file that it was read from, of keys that nobody typed."""
    problems: tuple[str, ...] = ()
    """Of swept words of which no axis could be made: `judged` raises them with those of the jobs."""

    def attributed(self, problems: Iterable[str]) -> Iterable[str]:
        """The problems of a job, whose words are composed as if they were typed, with the files they come from."""
        for problem in problems:
            yield re.sub(
                r"([\w.]+)((?:=\S*)? \(|: )command line\)",
                lambda match: f"{match[1]}{match[2]}{self.places.get(match[1], 'command line')})",
                problem,
            )

    def description(self, study: Study, code: Mapping[str, str]) -> Description:
        """The contents of sweep.yaml, without what no file may say: trust, secrets, options of storage."""
        words = [word for word in self.words if not policy.is_typed_only(word.key)]
        kept = {word.key: spelling(word.value) for word in words if not is_private(word)}
        values = {axis.key: list(axis.values) if isinstance(axis, Choices) else axis.text() for axis in self.space}
        return Description(kept, [values], study, code)

    def job_words(self, chosen: Mapping[str, Any], conditions: Conditions) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The values and the words of the job with the `chosen` values, without those that do not exist in it."""
        values = {key: value for key, value in chosen.items() if exists(key, chosen, conditions)}
        fixed = [str(word) for word in self.words if exists(word.key, chosen, conditions)]
        return values, (*fixed, *space.words(values))


def read(words: Sequence[str], *, proposed: bool = False) -> Request:
    """Raises WordsError with every mistake that can be seen before a job is composed. `proposed`: somebody else says
    which jobs there are.
    """
    given, problems = typed(words)
    raw = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    problems += [problem for word in given for problem in unlisted(word, raw.get(word.key, ""))]
    try:
        given = with_spaces([_settled(word) for word in given])
    except WordsError as error:
        problems += error.problems
    problems += [
        f"{shown(word)}: in a recipe, a mapping of keys to values. Typed, it is words: optim.lr=1e-3,3e-3."
        for word in given
        if f"{word.key}.".startswith(policy.SPACE)
    ]
    swept = [word for word in given if word.sweep]
    if not swept and not problems and not proposed:
        likely = next((f" {shown(word)} is one text." for word in given if re.search(r"[(,]", word.text)), "")
        problems.append(
            f"-m: no word has several values.{likely} Type optim.lr=1e-3,3e-3 for example, or leave -m out."
        )
    problems += unsweepable(swept)
    places = [word for word in given if word.key in ("sweep.out", "out") and not word.sweep]
    problems += [
        f"{shown(word)}: a folder or URL. Type {word.key}=<text>."
        for word in places
        if not isinstance(word.value, str | int | None)
    ]
    root = _root(given, swept)
    if root.startswith("memory://"):
        problems.append(f"sweep.out={cut(root)}: memory belongs to one process. Type sweep.out=<a folder or URL>.")
    if problems:
        raise WordsError(*problems)
    settings = tuple(word for word in given if word.key.startswith("sweep.") and word.key != "sweep.out")
    seed = next((word.value for word in reversed(settings) if word.key == "sweep.seed" and type(word.value) is int), 0)
    fixed = tuple(word for word in given if not word.sweep and word not in places and word not in settings)
    axes, problems = space.axes(() if proposed else swept, names_of, seed)
    problems += _of_recipes(swept, axes)
    known = vocabulary([str(word) for word in fixed])
    from_files = {word.key: word.source for word in given if word.place}
    whole = tuple(_whole(axis, known) for axis in axes.values())
    return Request(
        root=root,
        words=fixed,
        settings=settings,
        space=whole,
        swept=tuple(swept),
        places=from_files,
        problems=tuple(problems),
    )


def _settled(word: Word) -> Word:
    """`recipe=<sweep>/best` as the job that is the best now: a sweep keeps to it. Raises WordsError and StoreError."""
    if word.key != "recipe" or word.sweep or not str(word.value).endswith("/best"):
        return word
    url = find(str(word.value)).url
    return replace(word, value=url, text=quote(url))


def _of_recipes(swept: Sequence[Word], axes: Mapping[str, Axis]) -> Iterable[str]:
    """Why a recipe may not give these values, and which recipes that are swept bring a sweep of their own."""
    values = {
        word.key: [Word(word.key, value, spelling(value), word.source, place=word.place) for value in axis.values]
        for word in swept
        if isinstance(axis := axes.get(word.key), space.Choices)
    }
    yield from policy.swept([word for words in values.values() for word in words if word.place])
    for name in values.get("recipe", ()):
        own = [word for word in recipe.read(str(name.value)) if word.key.startswith("sweep.")]
        if own:
            yield f"recipe={cut(name.text)}: its {own[0].key} is for a sweep of this recipe alone. Type -m {name}."


def _whole(axis: Axis, known: Vocabulary) -> Axis:
    """The axis; an interval of a key that takes no other numbers than integers is one of integers."""
    ranges = [kind for kind in constraints.kinds(known.allowed(axis.key)) if isinstance(kind, constraints.Range)]
    if isinstance(axis, Interval) and ranges and all(kind.whole for kind in ranges):
        return replace(axis, whole=all(float(end).is_integer() for end in axis.ends))
    return axis


def unsweepable(swept: Iterable[Word]) -> Iterable[str]:
    """A sentence for each word that cannot have several values."""
    for word in swept:
        if is_private(word):
            yield f"{shown(word)}: the folder of a job is named after what is swept, and a secret cannot be."
        elif word.key.split(".")[0] in ("out", "trust", "sweep", "hydra"):
            yield f"{shown(word)}: it cannot be swept. Type {word.key}=<one value>."
        elif word.key.startswith("launcher.") and word.text:
            yield f"{shown(word)}: it cannot be swept. Quote a text with a comma twice: {word.key}='\"a,b\"'."


def is_private(word: Word) -> bool:
    return options.is_one(word.key) or secrets.redact_arg(str(word)) != str(word)


def _root(given: Iterable[Word], swept: Iterable[Word]) -> str:
    places = {word.key: str(word.value) for word in given if word.value is not None}
    place = places.get("sweep.out") or places.get("out")
    name = slug(secrets.redact_arg(str(word)).replace("=", "-", 1) for word in swept)
    return (place or f"outputs/sweep-{name}").rstrip("/") or "/"


def names_of(key: str) -> Sequence[str]:
    """The words that a glob over a key may match."""
    if key == "recipe":
        return sorted(path.stem for path in files.folder("recipes").rglob("*.yaml"))
    return files.groups().get(key, ()) if key in GROUPS else ()


@dataclass(frozen=True)
class Judged:
    """The jobs of a grid, each once; none of a search, which draws them later. `config` and `plan`: of the first one,
    with the settings of the sweep; `slots`: jobs at a time; `cluster`: of a slot; `places`: slots with GPUs of their
    own, which more slots share.
    """

    jobs: list[Job]
    config: Config
    plan: Plan
    slots: int
    cluster: Cluster
    places: int
    study: Study
    conditions: Conditions


def judged(request: Request, cluster: Cluster, judge: Judge) -> Judged:
    """Every job of a grid, judged for the slot it runs in; of a search every value of a list and both ends of every
    interval. Raises WordsError with the mistakes of all of them.
    """
    jobs, first, problems = dict[str, Job](), list[Judged](), dict.fromkeys(request.problems)
    try:
        sweep = _settings(request)
    except WordsError as error:
        sweep, problems = Sweep(), problems | dict.fromkeys(error.problems)
    problems |= dict.fromkeys(() if problems else study.mistakes(sweep, request.space))
    known = vocabulary([str(word) for word in request.words])
    keys = [*(word.key for word in request.words), *(axis.key for axis in request.space)]
    problems |= dict.fromkeys(stop.mistakes(sweep, keys))
    depends = conditions(keys, request.space, known)
    is_grid = sweep.search == "grid" and not problems
    wrong = dict[str, list[set[str]]]()
    points = islice(space.grid(request.space), sweep.trials) if is_grid else corners(request.space, depends)
    for chosen in points:
        values, words = request.job_words(chosen, depends)
        try:
            config = compose([*words, f"out={quote(f'{request.root}/job')}"])
            plan = judge(config, first[0].cluster if first else cluster)
            if not first:
                first.append(_first(request, sweep, config, plan=plan, cluster=cluster, judge=judge, depends=depends))
            problems |= dict.fromkeys(stop.differences(sweep, first[0].plan, plan))
        except WordsError as error:
            for problem in request.attributed(error.problems):
                wrong.setdefault(problem, []).append(set(space.words(values)))
            continue
        job = _job(values, words, digest(config, swept=_aside(values)))
        jobs.setdefault(job.digest, job)
    problems |= {_with_values(problem, each) if is_grid else problem: None for problem, each in wrong.items()}
    if problems:
        raise WordsError(*problems)
    return replace(first[0], jobs=[*jobs.values()] if is_grid else [])


def _with_values(problem: str, jobs: Sequence[set[str]]) -> str:
    """The problem, with the swept words that all jobs with it share, if they are several: they are wrong together."""
    shared = set.intersection(*jobs)
    return f"{problem} (jobs with {cut(' '.join(sorted(shared)), 200)})" if len(shared) > 1 else problem


def _first(
    request: Request, sweep: Sweep, config: Config, plan: Plan, cluster: Cluster, judge: Judge, depends: Conditions
) -> Judged:
    """Everything that the first job decides for all. Raises WordsError."""
    config.sweep = sweep
    number = slots(sweep.parallel, plan, cluster)
    part = of_slot(cluster, number)
    places = cluster.gpus // max(1, part.gpus)
    jobs = int(min(sweep.trials or MOST, space.size(request.space)))
    rung, wrong = stop.first_rung(sweep, plan, jobs)
    if wrong:
        raise WordsError(*wrong)
    looks_for = replace(study.decide(sweep, config, plan, number), stop=sweep.stop, rung=rung, factor=sweep.factor)
    return Judged(
        jobs=[],
        config=config,
        plan=judge(config, part),
        slots=number,
        cluster=part,
        places=places,
        study=looks_for,
        conditions=depends,
    )


def drawn(request: Request, chosen: Mapping[str, Any], depends: Conditions) -> Job:
    """The job of a search with these values. One that cannot be composed gets a name all the same: it fails when it is
    to begin.
    """
    values, words = request.job_words(chosen, depends)
    try:
        return _job(values, words, digest(compose(_computing(words)), swept=_aside(values)))
    except WordsError:
        return _job(values, words, hashlib.sha256(" ".join(words).encode()).hexdigest()[:8])


def born(request: Request, chosen: Mapping[str, Any], depends: Conditions, parent: Job, step: int) -> Job:
    """The job with these values that begins with the checkpoint of another one. Its name does not depend on what the
    folder of the sweep is called.
    """
    values, words = request.job_words(chosen, depends)
    meaning = digest(compose(_computing(words)), swept=_aside(values), fork=f"{parent.name} {step}")
    source = attempts.folder(store.join(request.root, parent.name), step)
    return replace(_job(values, (*words, f"fork={quote(source)}"), meaning), parent=(parent.name, step))


def _computing(words: Iterable[str]) -> list[str]:
    """The words without the options of a storage, which are none of a run without a place."""
    return [word for word in words if not options.is_one(word.split("=")[0])]


def _job(values: Mapping[str, Any], words: tuple[str, ...], meaning: str) -> Job:
    return Job(values, words, folder.name_of(values, meaning))


def _settings(request: Request) -> Sweep:
    """The section `sweep` of the config. Raises WordsError."""
    config = compose([*map(str, request.settings)])
    config.sources |= {word.key: word.source for word in request.settings}
    wrong = {key: problem for key, problem in values.judge(config).items() if key.startswith("sweep.")}
    if wrong:
        raise WordsError(*wrong.values())
    return config.sweep


def modules(plan: Plan) -> list[str]:
    """The modules of dtrain that a job with this plan imports."""
    parts = [part for part in vars(plan).values() if isinstance(part, Mapping) and "_target_" in part]
    names = [
        str(part["_target_"]).rpartition(".")[0] for part in (*parts, *plan.loggers.values(), *plan.hooks.values())
    ]
    return sorted({name for name in names if name.startswith("dtrain.") and "testing" not in name})


def _aside(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The swept values that the digest of a config leaves out."""
    aside = of_scope("aside")
    return {key: spelling(value) for key, value in chosen.items() if key.split(".")[0] in aside}


def slots(parallel: Any, plan: Plan, cluster: Cluster) -> int:
    """The number of jobs at a time: as asked, or as many as GPUs or cores and memory hold."""
    if parallel != "auto":
        return int(parallel)
    if cluster.gpus and plan.device != "cpu":
        return max(1, cluster.gpus // plan.world)
    number = max(1, cluster.cpus // plan.world)
    number += plan.world == 1 and number > 1  # while one waits for its disk, another computes
    shapes = formulas.shapes(plan)
    if shapes is not None:
        each = (predict(plan, shapes).memory.peak + FORK) * plan.world
        number = min(number, int(cluster.memory * SHARE // each))
    return max(1, number)


FORK = 64 << 20
"""Bytes that a forked rank takes beside its model."""
SHARE = 0.8
"""Of the memory of the host that jobs may take."""


def of_slot(cluster: Cluster, number: int) -> Cluster:
    """The share of the cluster that one of `number` slots has."""
    return replace(
        cluster,
        cpus=max(1, cluster.cpus // number),
        gpus=min(cluster.gpus, max(1, cluster.gpus // number)),
        memory=cluster.memory if cluster.gpus else cluster.memory // number,
    )


def decided(job: Job, root: str, judged: Judged, judge: Judge, slot: int) -> Decided:
    """The job, decided for its slot. Its config.yaml states the threads: two give other bits than one."""
    config = compose([*job.words, f"out={quote(f'{root}/{job.name}')}"])
    plan = judge(config, judged.cluster)
    config.threads = plan.threads
    gpus = share(os.environ, slot % judged.places, judged.cluster.gpus) if judged.places else {}
    return Decided(plan, recipe.write(config), gpus)
