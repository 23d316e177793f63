"""dtrain as a library: `run`, `plan` and `load`, with words and with objects of the caller.

import dtrain
result = dtrain.run("steps=100", "strategy=ddp", "devices=2", model=Net, data=dataset, out="runs/a")
model = dtrain.load("runs/a", model=Net)
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dtrain.build import giving
from dtrain.cluster import detect
from dtrain.compose import compose, connect, value_of
from dtrain.compose.typed import typed
from dtrain.config import environment
from dtrain.config.word import text
from dtrain.errors import DtrainError, StoreError
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.storage import store
from dtrain.verb.plan import explained
from dtrain.verb.train import one

if TYPE_CHECKING:
    from torch import nn

ALONE = ("nodes=1", "devices=1", "strategy=single", "launcher=inline", "backend=gloo", "cluster=auto")
"""Words for a model that is only read."""
PLACES = {"model": "model", "data": "data.dataset", "objective": "objective"}
"""Argument -> where its `_target_` stands."""


class PrintedPlan(Plan):
    """A Plan that shows itself as `python -m dtrain plan` does, with the objects that `plan` was given."""

    def __repr__(self) -> str:
        with giving(vars(self).get("_objects", {})):
            return explained(self)

    __str__ = __repr__


def run(
    *words: str, model: Any = None, data: Any = None, objective: Any = None, out: str | os.PathLike[str] | None = None
) -> Result:
    """Train as `python -m dtrain <words>` does. One rank runs in this process; several are forked.

    `model`: a class or function that makes a `torch.nn.Module`, called with the `model.` words, or a module. `data`: a
    map-style dataset, or what makes one. `objective`: as the `_target_` of objective=own. They may live anywhere: in a
    script, a notebook cell, a function.

    Raises WordsError (the words are wrong), PreflightError (this machine cannot do it) or DtrainError (the training
    failed).
    """
    with _given(words, model, data, objective, out) as said:
        os.environ[environment.BEGAN] = str(time.monotonic())
        try:
            return one(compose(said))
        except DtrainError as error:  # which quotes the caller's own line: not once more through all of dtrain
            raise error.with_traceback(None) from None


def plan(
    *words: str, model: Any = None, data: Any = None, objective: Any = None, out: str | os.PathLike[str] | None = None
) -> Plan:
    """The plan that `run` would follow; print it. Arguments and errors as for `run`."""
    with _given(words, model, data, objective, out) as said:
        decided = PrintedPlan(**vars(resolve(compose(said), detect())))
    vars(decided)["_objects"] = _unnamed(model=model, data=data, objective=objective)
    return decided


def load(source: str | os.PathLike[str], *words: str, model: Any = None, data: Any = None) -> "nn.Module":
    """The model of the run at URL `source`, or of one of its checkpoints: with the newest weights, whole, on the CPU,
    in evaluation mode.

    `model`, `data`: as they were given to `run`; the data is read only where the model takes its sizes from it. Raises
    StoreError when there is no checkpoint.
    """
    url = os.fspath(source)
    connect(words, url)
    root = url.split("/checkpoints/")[0]
    if not store.children(root):
        raise StoreError.during("find a checkpoint at", root, "nothing is there")
    with _given(words, model, data, None, root) as said:
        decided = resolve(compose([*said, *ALONE], run=root), detect())
        from dtrain.evaluation.session import weights

        return weights(decided, url).eval()


@contextmanager
def _given(
    words: tuple[str, ...], model: Any, data: Any, objective: Any, out: str | os.PathLike[str] | None
) -> Iterator[list[str]]:
    """The words, with those that name the objects: by their dotted names where every process can import them."""
    things = {"model": model, "data": data, "objective": objective}
    said, trusted = list(words), list[str]()
    for name, thing in things.items():
        if thing is None:
            continue
        if name == "data" and value_of(words, "data") is None:
            said.append("data=dataset")
        target = _importable(thing)
        said.append(f"{PLACES[name]}._target_={target or 'dtrain.build.given'}")
        if target:
            trusted.append(target.split(".")[0])
        else:
            said.append(f"{PLACES[name]}.of={_label(name, thing)}")
    if trusted:
        said.append(f"trust=[{','.join(dict.fromkeys([*_trusted(words), *trusted]))}]")
    if out is not None:
        said.append(f"out={text(os.fspath(out))}")
    with giving(_unnamed(**things)):
        yield said


def _unnamed(**things: Any) -> dict[str, Any]:
    """Those that only this process can hand to its ranks, as `dtrain.build.given` knows them."""
    return {
        _label(name, thing): thing for name, thing in things.items() if thing is not None and not _importable(thing)
    }


def _label(name: str, thing: Any) -> str:
    """model.Net"""
    return f"{name}.{getattr(thing, '__name__', type(thing).__name__).strip('<>')}"


def _importable(thing: Any) -> str:
    """The dotted name by which any process finds a class or function; empty where there is none."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return ""
    home = sys.modules.get(module)
    return f"{module}.{name}" if home is not None and getattr(home, name, None) is thing and home.__file__ else ""


def _trusted(words: tuple[str, ...]) -> list[str]:
    """The packages that the words trust."""
    return [package for word in typed(words)[0] if word.key == "trust" for package in word.value]
