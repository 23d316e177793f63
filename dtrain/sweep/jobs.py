"""The words of a sweep -> its jobs, all of them judged before the first one begins."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtrain import recipe, secrets
from dtrain.cluster import Cluster, share
from dtrain.compose import compose
from dtrain.compose.check import shown
from dtrain.compose.typed import typed
from dtrain.config import files
from dtrain.config.schema import GROUPS, Config, of_scope
from dtrain.config.word import Word, cut, quote, slug, spelling
from dtrain.errors import StoreError, WordsError
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.prediction import predict
from dtrain.recipe import policy
from dtrain.recipe.locate import find
from dtrain.resolve import values
from dtrain.resolve.out import digest
from dtrain.storage import options
from dtrain.sweep import folder, space
from dtrain.sweep.engine import Decided
from dtrain.sweep.folder import Description, Job
from dtrain.sweep.space import Axis

Judge = Callable[[Config, Cluster], Plan]


@dataclass(frozen=True)
class Request:
    """The words of a sweep. `words`: those of all jobs; `settings`: those that begin with `sweep.`."""

    root: str
    words: tuple[Word, ...]
    settings: tuple[Word, ...]
    space: tuple[Axis, ...]

    def description(self) -> Description:
        """The contents of sweep.yaml, without what no file may say: trust, secrets, options of storage."""
        words = [word for word in self.words if word.key.split(".")[0] not in of_scope("typed")]
        kept = {word.key: spelling(word.value) for word in words if not _is_private(word)}
        return Description(
            kept, [{axis.key: list(axis.values) for axis in self.space if isinstance(axis, space.Choices)}]
        )


def read(words: Sequence[str]) -> Request:
    """Raises WordsError with every mistake that can be seen before a job is composed."""
    given, problems = typed(words)
    swept = [word for word in given if word.sweep]
    if not swept and not problems:
        problems.append("-m: no word has several values. Type optim.lr=1e-3,3e-3 for example, or leave -m out.")
    problems += [
        f"{shown(word)}: the folder of a job is named after what is swept, and a secret cannot be."
        for word in swept
        if _is_private(word)
    ]
    problems += [
        f"{shown(word)}: it cannot be swept. Type {word.key}=<one value>."
        for word in swept
        if word.key.split(".")[0] in ("out", "trust", "sweep", "hydra") and not _is_private(word)
    ]
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
    seed = next((word.value for word in settings if word.key == "sweep.seed" and type(word.value) is int), 0)
    fixed = tuple(word for word in given if not word.sweep and word not in places and word not in settings)
    return Request(root, fixed, settings, tuple(space.axes(swept, _names, seed)))


def again(root: str, more: Sequence[str]) -> list[Request]:
    """The sweep at URL `root`, a request for each of its spaces. `more`: settings, and the words that no file gives:
    secrets, options of storage, trust. Raises WordsError, and StoreError if there is no sweep.

    Its words have the rights of a recipe at that place, as whoever wrote it need not be whoever reads it.
    """
    there, place = folder.read(root), find(f"{root}/sweep.yaml")
    if there is None:
        raise StoreError.during("find a sweep at", root, "it has no sweep.yaml")
    added, problems = typed(more)
    problems += [
        f"{shown(word)}: the words of a sweep are those of its sweep.yaml. Leave it out."
        for word in added
        if word.key.split(".")[0] not in of_scope("typed") and not _is_private(word)
    ]
    written, wrong = typed([f"{key}={text}" for key, text in there.words.items()])
    words = [replace(word, source=str(place), place=place) for word in written]
    swept = [
        Word(key, value, spelling(value), str(place), place=place)
        for axes in there.spaces
        for key, values in axes.items()
        for value in values
    ]
    problems += [*wrong, *(problem for word in (*words, *swept) for problem in policy.refused(word, place))]
    if problems:
        raise WordsError(*dict.fromkeys(problems))
    settings = tuple(word for word in added if word.key.startswith("sweep."))
    fixed = (*words, *(word for word in added if word not in settings))
    return [
        Request(root, fixed, settings, tuple(space.Choices(key, tuple(values)) for key, values in axes.items()))
        for axes in there.spaces
    ]


def _is_private(word: Word) -> bool:
    return options.is_one(word.key) or secrets.redact_arg(str(word)) != str(word)


def _root(given: Iterable[Word], swept: Iterable[Word]) -> str:
    places = {word.key: str(word.value) for word in given if word.value is not None}
    place = places.get("sweep.out") or places.get("out")
    name = slug(secrets.redact_arg(str(word)).replace("=", "-", 1) for word in swept)
    return (place or f"outputs/sweep-{name}").rstrip("/") or "/"


def _names(key: str) -> Sequence[str]:
    """The words that a glob over a key may match."""
    if key == "recipe":
        return sorted(path.stem for path in files.folder("recipes").rglob("*.yaml"))
    return files.groups().get(key, ()) if key in GROUPS else ()


@dataclass(frozen=True)
class Judged:
    """The jobs of a sweep, each once. `config` and `plan`: of the first one, with the settings of the sweep; `slots`:
    jobs at a time; `cluster`: of a slot; `places`: slots with GPUs of their own, which more slots share.
    """

    jobs: list[Job]
    config: Config
    plan: Plan
    slots: int
    cluster: Cluster
    places: int


def judged(request: Request, cluster: Cluster, judge: Judge) -> Judged:
    """Every job of a grid, judged for the slot it runs in. Raises WordsError with the mistakes of all of them."""
    count = space.size(request.space)
    if count > space.MOST:
        raise WordsError(
            f"-m: {count:,.0f} jobs. At most {space.MOST:,} can be asked for at once. Type fewer values."
            if count < float("inf")
            else "-m: an interval has no end of values. Type the values: optim.lr=1e-3,3e-3."
        )
    jobs, first, problems = dict[str, Job](), list[Judged](), dict[str, None]()
    for chosen in space.grid(request.space):
        words = (*map(str, request.words), *space.words(chosen))
        try:
            config = compose([*words, f"out={quote(f'{request.root}/job')}"])
            plan = judge(config, first[0].cluster if first else cluster)
            if not first:
                config.sweep = _settings(request, words)
                number = slots(config.sweep.parallel, plan, cluster)
                part = of_slot(cluster, number)
                places = cluster.gpus // max(1, part.gpus)
                first.append(Judged([], config, judge(config, part), number, part, places))
        except WordsError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        meant = digest(config, swept=_aside(chosen))
        name = slug(f"{key}-{spelling(value)}" for key, value in chosen.items())
        jobs.setdefault(meant, Job(chosen, words, f"{name}-{meant}"))
    if problems:
        raise WordsError(*problems)
    return replace(first[0], jobs=[*jobs.values()])


def _settings(request: Request, words: Sequence[str]) -> Any:
    """The section `sweep` of the config. Raises WordsError."""
    config = compose([*words, *map(str, request.settings)])
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
        cluster, cpus=max(1, cluster.cpus // number), gpus=min(cluster.gpus, max(1, cluster.gpus // number)),
        memory=cluster.memory if cluster.gpus else cluster.memory // number,
    )  # fmt: skip


def decided(job: Job, root: str, judged: Judged, judge: Judge, slot: int) -> Decided:
    """The job, decided for its slot. Its config.yaml states the threads: two give other bits than one."""
    config = compose([*job.words, f"out={quote(f'{root}/{job.name}')}"])
    plan = judge(config, judged.cluster)
    config.threads = plan.threads
    gpus = share(os.environ, slot % judged.places, judged.cluster.gpus) if judged.places else {}
    return Decided(plan, recipe.write(config), gpus)
