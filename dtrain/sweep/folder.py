"""The folder of a sweep: what it is, and how far each of its jobs is, read off the jobs' own files.

    <sweep.out>/sweep.yaml             the words of all jobs, the spaces and the study, written before the first job
    <sweep.out>/trials/<number>.json   a search: the values that it drew (dtrain/sweep/trials.py)
    <sweep.out>/<values>-<digest>/     a job: a complete run, and log.txt, what it printed

The digest says what the job means: `1e-3` and `0.001` are one job, whatever its values are called.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from dtrain.config.schema import of_scope
from dtrain.config.structure import COUNT, NUMBER, TEXT, Each, fault
from dtrain.config.word import cut, slug, spelling
from dtrain.errors import StoreError, WordsError
from dtrain.result import SHAPE as RESULT
from dtrain.result import compared
from dtrain.storage import store
from dtrain.sweep import study
from dtrain.sweep.study import Study

FORMAT = 1
"""Of sweep.yaml; a larger number was written by a newer dtrain."""
LARGEST = 16 << 20
"""The most bytes of sweep.yaml."""
FAILURE = {"kind?": TEXT, "error?": TEXT, "time?": NUMBER, "tries?": COUNT}
"""The part of failure.json that a sweep uses."""
STREAMS = 32
"""Results that are read at a time, elsewhere."""


@dataclass(frozen=True)
class Job:
    """`values`: key -> value of what is swept; `words`: those and the words of all jobs; `name`: of its folder.
    `until`: the step at which it is to stop, None if it runs to its end; `parent`: the name of the job whose checkpoint
    it begins with, and the step of that.
    """

    values: Mapping[str, Any]
    words: tuple[str, ...]
    name: str
    until: int | None = None
    parent: tuple[str, int] | None = None

    @property
    def digest(self) -> str:
        return self.name.rpartition("-")[2]

    def with_microbatch(self, size: int) -> "Job":
        """The same job, and the same results, with another number of samples per forward."""
        words = [word for word in self.words if word.split("=")[0] not in ("microbatch", "accumulate")]
        return replace(self, words=(*words, f"microbatch={size}"))


def name_of(values: Mapping[str, Any], digest: str) -> str:
    """The name of the folder of the job with these values."""
    return f"{slug(f'{key}-{spelling(value)}' for key, value in values.items())}-{digest}"


@dataclass(frozen=True)
class Description:
    """sweep.yaml. `words`: key -> text of the words of all jobs; each of `spaces`: key -> values, or an interval as it
    is typed; `study`: what it looks for, and how; `code`: trusted package -> digest of its source as the sweep began.
    """

    words: Mapping[str, str]
    spaces: Sequence[Mapping[str, Sequence[Any] | str]] = field(default_factory=list)
    study: Study = field(default_factory=Study)
    code: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> bytes:
        data = {
            "format": FORMAT,
            "words": dict(self.words),
            "spaces": [dict(space) for space in self.spaces],
            "study": self.study.document(),
            "code": dict(self.code),
        }
        return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120).encode()


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: object) -> bool:
        return True


def read(root: str) -> Description | None:
    """The sweep at URL `root`; None if there is none, or its file is empty: a process was killed as it wrote it. Raises
    StoreError for a damaged file or a newer format.
    """
    url = store.join(root, "sweep.yaml")
    try:
        text = store.beginning(url, LARGEST)
        if not text:
            return None
        data = yaml.load(text, _Loader)
    except StoreError as error:
        if error.kind == "missing":
            return None
        raise
    except (yaml.YAMLError, ValueError, RecursionError):
        data = None
    if isinstance(data, dict) and type(data.get("format")) is int and data["format"] > FORMAT:
        raise StoreError.during("read", url, f"format {data['format']} is of a newer dtrain", "Upgrade dtrain")
    shape = {"format": COUNT, "words": Each(TEXT, named=True), "study?": study.SHAPE, "code?": Each(TEXT, named=True)}
    wrong = fault(data, shape) or _wrong_spaces(data) or study.wrong(data.get("study"))
    if wrong:
        raise StoreError.during("read", url, f"it is no sweep: {wrong}", "Remove it, or type sweep.out=<another place>")
    looks_for = Study.from_document(data["study"]) if "study" in data else Study()
    return Description(data["words"], data["spaces"], looks_for, data.get("code", {}))


def _wrong_spaces(data: Mapping[str, Any]) -> str:
    spaces = data.get("spaces")
    if not isinstance(spaces, list) or not spaces or not all(isinstance(space, dict) for space in spaces):
        return "spaces is no list of mappings"
    pairs = [pair for space in spaces for pair in space.items()]
    wrong = [key for key, values in pairs if not isinstance(key, str) or not isinstance(values, list | str)]
    empty = [key for key, values in pairs if not values]
    return "".join([f"{cut(str(key))} in spaces has no list of values and no interval" for key in (*wrong, *empty)][:1])


def join(root: str, asked: Description) -> Description:
    """Add a space to the sweep at `root`, or begin one there. Raises WordsError if the jobs there have other words."""
    there = read(root)
    if there is None:
        try:
            store.publish(store.join(root, "sweep.yaml"), asked.document())
            return asked
        except StoreError as error:
            if error.kind != "exists":
                raise
        there = read(root)  # another worker was faster
        if there is None:
            store.write(store.join(root, "sweep.yaml"), asked.document())
            return asked
    found = {**_differences(there, asked), **_other_search(there, asked)}
    problems = [f"{key} is {here} here and {before} there" for key, (before, here) in found.items()]
    if problems:
        raise WordsError(
            f"sweep.out={root} holds another sweep: {'; '.join(problems)}. Type sweep.out=<another place>, or the same "
            "words."
        )
    known = [_canonical(space) for space in there.spaces]
    new = [space for space in asked.spaces if _canonical(space) not in known]
    both = Description(
        {**there.words, **asked.words}, [*there.spaces, *new], _wider(there.study, asked.study), there.code
    )
    if both != there:
        store.write(store.join(root, "sweep.yaml"), both.document())
    return both


def placed(root: str, jobs: Iterable[Job]) -> list[Job]:
    """The jobs, each with the name of the folder that it has already: as its values were called before another key was
    swept too. Raises StoreError.
    """
    there = {name.rpartition("-")[2]: name for name in store.folders(root) if "-" in name}
    return [replace(job, name=there.get(job.digest, job.name)) for job in jobs]


def _canonical(space: Mapping[str, Sequence[Any] | str]) -> str:
    return json.dumps([[key, _spelled(values)] for key, values in space.items()])


def _spelled(values: Sequence[Any] | str) -> Sequence[str]:
    return [values] if isinstance(values, str) else [spelling(value) for value in values]


def typed(values: Sequence[Any] | str) -> str:
    """The values of a key, or its interval, as one types them."""
    return ",".join(_spelled(values))


def _wider(there: Study, here: Study) -> Study:
    """The study of both: a search keeps on with the larger number of trials."""
    if not here.is_search:
        return here
    trials = max(there.trials or 0, here.trials or 0) or None
    return replace(here, trials=trials, ahead=max(there.ahead, here.ahead))


def _other_search(there: Description, here: Description) -> dict[str, tuple[str, str]]:
    """Key -> (the word there, the word here), of what makes two searches different ones: also the space."""
    if not (there.study.is_search or here.study.is_search):
        return {}
    before, now = (
        {**each.study.words(), **{key: typed(values) for space in each.spaces for key, values in space.items()}}
        for each in (there, here)
    )
    pairs = {key: (before.get(key, "not swept"), now.get(key, "not swept")) for key in {**before, **now}}
    return {key: (first, second) for key, (first, second) in pairs.items() if first != second}


def _differences(there: Description, here: Description) -> dict[str, tuple[str, str]]:
    """Key -> (the word there, the word here), of words that change what jobs compute and that neither sweeps."""
    aside, swept = of_scope("aside"), dict[str, set[str]]()
    for space in (*there.spaces, *here.spaces):
        for key, values in space.items():
            swept.setdefault(key, set()).update(_spelled(values))
    found = {}
    for key in {**there.words, **here.words}:
        before, now = there.words.get(key), here.words.get(key)
        if before == now or key.split(".")[0] in aside:
            continue
        if key in swept and all(each is None or each in swept[key] for each in (before, now)):
            continue  # the space became wider, or narrower
        found[key] = (before or "not given", now or "not given")
    return found


@dataclass(frozen=True)
class State:
    """How far a job is: `status` finished, failed, stopped or new; `figures`: of its result, the best ones where these
    are asked, and `last`: of its last step; `is_evaluated`: it stopped where it was told to; `reason`: why it stopped.
    """

    status: str
    step: int = 0
    loss: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    is_evaluated: bool = False
    reason: str = ""
    last: Mapping[str, float] = field(default_factory=dict)


def states(root: str, jobs: Iterable[Job]) -> dict[str, State]:
    """The name of each job -> its state, with one listing of the folder. Raises StoreError."""
    files, jobs = store.tree(root, depth=2), list(jobs)
    having = [job.name for job in jobs if f"{job.name}/result.json" in files]
    results = dict(zip(having, _each(root, having), strict=True))
    return {
        job.name: _state(
            results.get(job.name), failed=f"{job.name}/failure.json" in files, begun=f"{job.name}/plan.yaml" in files
        )
        for job in jobs
    }


def state(root: str, name: str) -> State:
    """The state of one job. Raises StoreError."""
    return states(root, [Job({}, (), name)])[name] if store.is_local(root) else _state(_result(root, name))


def failures(root: str) -> dict[str, Mapping[str, Any]]:
    """The name of each job that has failed -> its failure.json. Raises StoreError."""
    names = [path.split("/")[0] for path in store.tree(root, depth=2) if path.endswith("/failure.json")]
    return {name: failure(root, name) for name in sorted(names)}


def failure(root: str, name: str) -> Mapping[str, Any]:
    """failure.json of a job; empty if there is none, or it is damaged."""
    try:
        facts = json.loads(store.beginning(store.join(root, name, "failure.json"), LARGEST))
    except (StoreError, ValueError, RecursionError):
        return {}
    return {} if fault(facts, FAILURE) else facts


def _each(root: str, names: Sequence[str]) -> Iterable[Mapping[str, Any] | None]:
    if store.is_local(root):
        return [_result(root, name) for name in names]
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda name: _result(root, name), names))


def _result(root: str, name: str) -> Mapping[str, Any] | None:
    """result.json of a job; None if it is missing or damaged."""
    try:
        data = json.loads(store.read(store.join(root, name, "result.json")))
    except StoreError as error:
        if error.kind == "missing":
            return None
        raise
    except (ValueError, RecursionError):
        return None
    return None if fault(data, RESULT) else data


def _state(result: Mapping[str, Any] | None, *, failed: bool = False, begun: bool = False) -> State:
    if result is None:
        return State("failed" if failed else ("new", "stopped")[begun])
    figures, last = (_numbers(each) for each in (compared(result), result.get("metrics", {})))
    done = {"finished": "finished", "spiked": "failed"}.get(result["status"], "failed" if failed else "stopped")
    stopped_where_told = result["status"] == "stopped"
    return State(
        status=done,
        step=result["step"],
        loss=result["loss"],
        figures=figures,
        is_evaluated=stopped_where_told,
        reason=result.get("reason", ""),
        last=last,
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: math.nan if value is None else value for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if type(value) in (int, float)}
