"""dtrain as a library: `run`, `plan`, `load` and `predictions`, with words and with the caller's own objects.

import dtrain
result = dtrain.run("steps=100", "strategy=ddp", "devices=2", model=Net, data=dataset, out="runs/a")
model = dtrain.load("runs/a", model=Net)
answers = dtrain.predictions("runs/a", [torch.ones(4)], model=Net)
"""

import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from dtrain.build import GIVEN, build, giving
from dtrain.cluster import detect
from dtrain.compose import compose, run_at, value_of
from dtrain.compose.typed import typed
from dtrain.config import environment
from dtrain.config.word import cut, in_a_call, spelling, text
from dtrain.errors import DtrainError, PreflightError, StoreError, WordsError
from dtrain.launcher import apart
from dtrain.lifecycle import loaders, signals
from dtrain.logger import FunctionLogger
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.storage import store
from dtrain.verb.plan import explained, show
from dtrain.verb.train import one

if TYPE_CHECKING:
    from torch import nn

ALONE = ("nodes=1", "devices=1", "strategy=single", "launcher=inline", "backend=gloo", "cluster=auto")
"""Words for loading a model without training."""
PLACES = {"model": "model", "data": "data.dataset", "objective": "objective"}
"""Argument -> the key whose `_target_` names it."""
P = ParamSpec("P")
Returned = TypeVar("Returned")
_running: dict[int, list[str]] = {}
"""Process id -> the `out` of the run there, once it is known. A child that is forked meanwhile has another id."""


class PrintedPlan(Plan):
    """A Plan that prints like `python -m dtrain plan`, with the objects that were passed to `plan`; without a
    prediction, but with what is wrong, if these cannot be built.
    """

    def __repr__(self) -> str:
        with giving(vars(self).get("_objects", {})):
            try:
                return explained(self)
            except DtrainError as error:
                return f"{show(self)}\nSTOP        {error}"

    __str__ = __repr__


def _briefly(act: Callable[P, Returned]) -> Callable[P, Returned]:
    """`act`, whose errors quote the caller's own line, without the traceback through dtrain. Words that are given as
    arguments are errors too.
    """
    takes = inspect.signature(act).parameters

    @wraps(act)
    def call(*args: P.args, **options: P.kwargs) -> Returned:
        try:
            for name in options.keys() - takes:
                raise WordsError(
                    f"dtrain.{act.__name__} takes no argument {name}. A word is a text of its own: "
                    f'"{name}={cut(spelling(options[name]))}". The arguments are {", ".join(list(takes)[1:])}.'
                )
            return act(*args, **options)
        except (DtrainError, signals.StopRequested) as error:
            raise error.with_traceback(None) from None

    return call


@_briefly
def run(
    *words: str, model: Any = None, data: Any = None, objective: Any = None, hook: Any = None, logger: Any = None,
    out: str | os.PathLike[str] | None = None,
) -> Result:  # fmt: skip
    """Train as `python -m dtrain <words>` does. A single rank runs in this process; several ranks are forked.

    `model`: a `torch.nn.Module`, or a class or function that makes one, called with the `model.` words. `data`: a
    map-style dataset, or a class or function that makes one. `objective`: an objective, or a class or function that
    makes one. `hook`, `logger`: one or a list of objects, classes, which are called with the words of their name
    (`hook.Pulse.every=10`), and functions, called themselves with a StepInfo (`hook.<function>.every=10`) or with step
    and row. All of them may be defined anywhere: in a script, a notebook cell, a function. With several ranks an object
    keeps nothing of the run: its copies in the forked ranks get the steps, the rows and the weights.

    Raises WordsError (the words are wrong), PreflightError (this machine cannot do it, or this process has a run
    already, in another thread), DtrainError (training failed), or a KeyboardInterrupt for a Ctrl-C before the first
    step. A later one lets the run save, and returns its result.
    """
    loaders.end_if_starting()
    passed = _passed(model=model, data=data, objective=objective, hook=hook, logger=logger)
    with _only_run() as place, signals.called(), _given(words, passed, out) as all_words:
        os.environ[environment.BEGAN] = str(time.monotonic())
        config = compose(all_words)
        place.append(f" (out={config.out})")
        return one(config)


@_briefly
def plan(
    *words: str, model: Any = None, data: Any = None, objective: Any = None, hook: Any = None, logger: Any = None,
    out: str | os.PathLike[str] | None = None,
) -> Plan:  # fmt: skip
    """The plan that `run` would follow; print it. Arguments and errors as for `run`."""
    passed = _passed(model=model, data=data, objective=objective, hook=hook, logger=logger)
    with _given(words, passed, out) as all_words:
        decided = PrintedPlan(**vars(resolve(compose(all_words), detect(), apart.shapes_of)))
    vars(decided)["_objects"] = _unnamed(passed)
    return decided


@_briefly
def load(source: str | os.PathLike[str], *words: str, model: Any = None, data: Any = None) -> "nn.Module":
    """The unsharded model of the run at URL `source`, of the best job of a sweep (`<sweep>/best`), of the best
    checkpoint of a run (`<run>/best`), or of a checkpoint: with the newest weights, on the CPU, in evaluation mode.

    `model`, `data`: those that were passed to `run`, which get the arguments that the run had; the data is read only if
    the model takes its sizes from it. `words` are those of the command line: dtrain.load("runs/a", "trust=[mypkg]") for
    classes of a package. Raises StoreError if there is no checkpoint.
    """
    url, root = _checkpoint(source, words)
    with _given(words, _passed(model=model, data=data), root) as all_words:
        decided = resolve(compose([*all_words, *ALONE], run=root, brought=PLACES.values()), detect())
        from dtrain.evaluation.session import weights

        unsharded = weights(decided, url)
        unsharded.eval()
        return unsharded


@_briefly
def predictions(
    source: str | os.PathLike[str], inputs: Iterable[Any], *words: str, model: Any = None, data: Any = None
) -> list[dict[str, Any]]:
    """The answers of the run, or checkpoint, at URL `source` to raw inputs, as rows of `python -m dtrain predict`:
    {"row": 0, "prediction": "rose", "probability": 0.93}.

    `inputs`: a list, also for one input: texts for a run with a tokenizer; paths, images of PIL or arrays of bytes for
    one of images; dicts of columns for one of rows; else tensors or arrays, of the shape of one sample each. The run's
    own tokenizer, size and transform are applied. `model`, `data`: those that were passed to `run`; the data is read
    for sizes and classes.

    Raises WordsError for inputs that the run cannot answer, StoreError if there is no checkpoint.
    """
    url, root = _checkpoint(source, words)
    passed = _passed(model=model, data=data)
    with tempfile.TemporaryDirectory(prefix="dtrain-") as folder, _given(words, passed, root) as all_words:
        alone = [*all_words, *ALONE]
        from dtrain.evaluation.raw import as_data, named

        trained = resolve(compose(alone, run=root, brought=PLACES.values()), detect())
        (rows := Path(folder, "rows")).mkdir()
        part, objects = as_data(inputs, trained, rows)
        asked = [f"predict.data={text(part)}", f"predict.to={folder}/answers.jsonl"]
        with giving({**_unnamed(passed), **objects}), named(rows):
            decided = resolve(compose([*alone, *asked], run=root, brought=PLACES.values()), detect())
            decided = replace(decided, init=url if url != root else None)
            build(decided.launcher).launch(decided.with_loop("dtrain.evaluation.predict.predict"))
        told = [json.loads(line) for line in Path(folder, "answers.jsonl").read_text("utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name not in ("file", "target")} for row in told]


def _checkpoint(source: str | os.PathLike[str], words: tuple[str, ...]) -> tuple[str, str]:
    """(the URL of a run or checkpoint, the URL of its run). Raises StoreError if nothing is there."""
    url = run_at(words, os.fspath(source))
    root = url.split("/checkpoints/")[0]
    if not store.children(root):
        raise StoreError.during("find a checkpoint at", root, "nothing is there")
    return url, root


@contextmanager
def _only_run() -> Iterator[list[str]]:
    """A context of the only run of this process, and the list for its `out`. Raises PreflightError."""
    mine = list[str]()
    first = _running.setdefault(os.getpid(), mine)
    if first is not mine:
        raise PreflightError(
            f"dtrain.run: this process has a run already{''.join(first)}. Call dtrain.run again when that has ended, "
            "or in a process of its own."
        )
    try:
        yield mine
    finally:
        del _running[os.getpid()]


class _Passed(NamedTuple):
    """An object of the caller: the key of its part, its label for `dtrain.build.given`, its dotted name, if any."""

    key: str
    label: str
    value: Any
    target: str


def _passed(**objects: Any) -> list[_Passed]:
    """The objects that are given; of hooks and loggers one or a list, of which functions are called as they are."""
    passed = list[_Passed]()
    for name, value in objects.items():
        if value is None:
            continue
        if name in PLACES:
            passed.append(_Passed(PLACES[name], f"{name}.{_name(value)}", value, _importable(value)))
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            key, is_class = f"{name}.{_name(each)}", inspect.isclass(each)
            keys = [one.key for one in passed]
            key = key if key not in keys else f"{key}{sum(one.startswith(key) for one in keys) + 1}"
            made = each if is_class or not inspect.isroutine(each) else partial(CALLED[name], each)
            passed.append(_Passed(key, key, made, _importable(each) if is_class else ""))
    return passed


def _called_hook(function: Callable[..., Any], *, every: int | str = 1) -> Any:
    from dtrain.hook import FunctionHook

    return FunctionHook(function, every)  # type: ignore[arg-type]  # FunctionHook's own check


def _called_logger(function: Callable[..., Any], *, out: str, steps: int) -> Any:
    return FunctionLogger(function, out, steps)


CALLED: Mapping[str, Callable[..., Any]] = {"hook": _called_hook, "logger": _called_logger}
"""Argument -> what makes a part of a function."""


@contextmanager
def _given(
    words: tuple[str, ...], passed: Sequence[_Passed], out: str | os.PathLike[str] | None
) -> Iterator[list[str]]:
    """The words, plus words that name the objects: by dotted names if every process can import them."""
    all_words, trusted = list(words), list[str]()
    for each in passed:
        if each.key == PLACES["data"] and value_of(words, "data") is None:
            all_words.append("data=dataset")
        all_words.append(f"{each.key}._target_={each.target or GIVEN}")
        if each.target:
            trusted.append(each.target.split(".")[0])
        else:
            all_words.append(f"{each.key}.of={each.label}")
    if trusted:
        all_words.append(f"trust=[{','.join(dict.fromkeys([*_trusted(words), *trusted]))}]")
    if out is not None:
        all_words.append(f"out={text(os.fspath(out))}")
    with giving(_unnamed(passed)), in_a_call():
        yield all_words


def _unnamed(passed: Sequence[_Passed]) -> dict[str, Any]:
    """The objects that only this process can pass to its ranks, by their labels."""
    return {each.label: each.value for each in passed if not each.target}


def _name(value: Any) -> str:
    """The name of a class or function, or that of the class of an object."""
    return str(getattr(value, "__name__", type(value).__name__)).strip("<>")


def _importable(value: Any) -> str:
    """The dotted name by which any process can import a class or function; empty if there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return ""
    home = sys.modules.get(module)
    return f"{module}.{name}" if home is not None and getattr(home, name, None) is value and home.__file__ else ""


def _trusted(words: tuple[str, ...]) -> list[str]:
    """The packages that the words trust."""
    return [package for word in typed(words)[0] if word.key == "trust" for package in word.value]
