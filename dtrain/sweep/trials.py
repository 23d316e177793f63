"""The trials of a search as files, <sweep.out>/trials/<number>.json: created before a job begins, by one worker alone,
and never changed. So a search that was killed goes on with the trials it had drawn, and no two workers draw the same.

    {"job": "optim.lr-0.00231-1f3a9c02", "values": {"optim.lr": 0.00231}, "by": "4f0c..."}
"""

import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dtrain.config.structure import MAPPING, TEXT, fault
from dtrain.config.word import cut
from dtrain.errors import StoreError
from dtrain.storage import store
from dtrain.sweep.folder import name_of
from dtrain.sweep.space import Axis
from dtrain.sweep.study import holds

SHAPE = {"job": TEXT, "values": MAPPING}
FILE = re.compile(r"trials/(\d{5})\.json")
LARGEST = 1 << 16
"""The most bytes of a trial."""
STREAMS = 32
"""Trials that are read at a time, elsewhere."""
ME = uuid.uuid4().hex
"""This process, so that two workers never write the same bytes."""


@dataclass
class Trial:
    """`values`: of the keys that exist in its job; `job`: the name of its folder; `losses`: what the search makes
    small, None as long as the job has not ended.
    """

    number: int
    values: Mapping[str, Any]
    job: str
    losses: tuple[float, ...] | None = None


def beats(one: Trial, other: Trial) -> bool:
    """Whether one is nowhere worse and somewhere better."""
    mine, its = one.losses or (), other.losses or ()
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def unbeaten(trials: Iterable[Trial]) -> list[Trial]:
    """Those that ended with numbers and that no other one beats: the best, or of two losses a front. Equal ones all."""
    front = list[Trial]()
    for trial in sorted((each for each in trials if each.losses), key=lambda each: each.losses or ()):
        if math.inf not in (trial.losses or ()) and not (front and beats(front[-1], trial)):
            front.append(trial)
    return front


def record(root: str, trial: Trial) -> bool:
    """Create the file of a trial; False if another worker has drawn this number. Raises StoreError."""
    url, data = _url(root, trial.number), json.dumps({"job": trial.job, "values": dict(trial.values), "by": ME})
    try:
        store.publish(url, data.encode())
    except StoreError as error:
        if error.kind != "exists":
            raise
        if store.read(url):
            return False
        store.remove(url)
        return record(root, trial)
    return True


def read(root: str, number: int, axes: Sequence[Axis]) -> Trial | None:
    """The trial with this number, None if nobody has drawn it; a kill may leave an empty file. Raises StoreError, also
    for values that are none of the axes.
    """
    url = _url(root, number)
    try:
        text = store.beginning(url, LARGEST)
        if not text:
            return None
        data = json.loads(text)
    except StoreError as error:
        if error.kind == "missing":
            return None
        raise
    except (ValueError, RecursionError):
        data = None
    if wrong := fault(data, SHAPE) or _wrong(data, axes):
        raise StoreError.during("read", url, f"it is no trial of this search: {wrong}", "Remove it")
    return Trial(number, data["values"], data["job"])


def every(root: str, axes: Sequence[Axis]) -> list[Trial]:
    """All trials by their numbers. Raises StoreError."""
    names = (FILE.fullmatch(path) for path in store.tree(root, depth=2))
    numbers = sorted(int(name[1]) for name in names if name)
    if store.is_local(root):
        found = [read(root, number, axes) for number in numbers]
    else:
        with ThreadPoolExecutor(STREAMS) as pool:
            found = list(pool.map(lambda number: read(root, number, axes), numbers))
    return [trial for trial in found if trial]


def _url(root: str, number: int) -> str:
    return store.join(root, "trials", f"{number:05}.json")


def _wrong(data: Mapping[str, Any], axes: Sequence[Axis]) -> str:
    if not re.fullmatch(r"[\w+-][\w.+-]*", data["job"], re.ASCII):
        return f"{cut(data['job'])!r} is no folder of a job"
    known, values = {axis.key: axis for axis in axes}, data["values"]
    if wrong := [key for key, value in values.items() if key not in known or not holds(known[key], value)]:
        return f"{cut(wrong[0])} has no such value in the space"
    # optim.momentum may be left out where optim is swept, and is another one
    if missing := [key for key in known if key not in values and key.split(".")[0] not in known.keys() - {key}]:
        return f"it has no value of {cut(missing[0])}"
    is_named = data["job"] == name_of(values, data["job"].rpartition("-")[2])
    return "" if is_named else f"{cut(data['job'])} is not the folder of its values"
