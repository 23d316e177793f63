"""What can be known before ranks start, by looking: data that is there, a place to write, packages that exist."""

import importlib.util
import sys
from collections.abc import Iterable

from dtrain import secrets, store
from dtrain.build import build
from dtrain.cluster import look
from dtrain.errors import PreflightError, StoreError
from dtrain.plan import Plan
from dtrain.words import cut

LONGEST = 400
"""Letters of a place in a message."""


def check(plan: Plan) -> None:
    """Raises PreflightError with everything that is missing."""
    problems = missing(plan) or [*_out(plan)]
    if problems:
        raise PreflightError("\n".join(problems))


def missing(plan: Plan) -> list[str]:
    """One sentence for each thing that is not there; nothing is written."""
    return [*_machine(plan), *_data(plan), *_packages(plan), *_init(plan), *_resume(plan)]


def _machine(plan: Plan) -> Iterable[str]:
    """A plan for another machine is looked at, not run."""
    if plan.cluster and "cluster" not in plan.why:
        lacking = build(plan.cluster).missing(look())
        if lacking:
            yield f"cluster: {lacking}. Type dtrain plan to see what it would be there, or leave cluster out to train here."


def _data(plan: Plan) -> Iterable[str]:
    for key in ("path", "holdout_path"):
        path = secrets.opened(plan.data.get(key))
        if path and path != "stdlib" and str(plan.data["_target_"]).startswith("dtrain."):
            try:
                if not store.find(path):
                    yield f"data.{key}={cut(path, LONGEST)}: no file is there."
            except StoreError as error:
                yield f"data.{key}={cut(path, LONGEST)}: {error}"


def _packages(plan: Plan) -> Iterable[str]:
    for package in plan.trust:
        try:
            found = importlib.util.find_spec(package.split(".")[0])
        except (ImportError, ValueError):
            found = None
        if found is None:
            yield f"trust=[{package}]: there is no such package in {sys.prefix} nor in this folder."


def _init(plan: Plan) -> Iterable[str]:
    try:
        if plan.init and not store.children(plan.init):
            yield f"init={cut(plan.init or '', LONGEST)}: nothing is there."
    except StoreError as error:
        yield f"init={cut(plan.init or '', LONGEST)}: {error}"


def _resume(plan: Plan) -> Iterable[str]:
    """A first look; the ranks look closer, and a checkpoint may turn out to be damaged."""
    try:
        there = any(name.startswith("step-") for name in store.children(store.join(plan.out, "checkpoints")))
    except StoreError as error:
        yield f"out={cut(plan.out, LONGEST)}: {error}"
        return
    if plan.resume == "must" and not there:
        yield f"resume=must: there is no checkpoint under {plan.out}. Type resume=auto to start from the beginning."
    if plan.resume == "never" and there:
        yield f"resume=never: {plan.out} holds a run already. Type out=<another place>, or resume=auto to go on with it."


def _out(plan: Plan) -> Iterable[str]:
    try:
        store.probe(plan.out)
    except StoreError as error:
        yield f"out={cut(plan.out, LONGEST)}: {error}"
