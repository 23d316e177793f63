"""The shapes of a plan's model: by arithmetic for built-in models; any other model runs once on tensors without memory,
and only then torch is imported.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any

from dtrain.build import absent, trusting
from dtrain.config import files
from dtrain.config.facts import about, fact
from dtrain.errors import StoreError, WordsError
from dtrain.planned import Plan
from dtrain.predict import formulas, reference
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import holding_of
from dtrain.predict.stated import unstated
from dtrain.secrets import screen
from dtrain.storage import hub, store

LOOK_SECONDS = 4.0
"""Patience with the storage of a teacher, for which a person waits."""
_traced: dict[str, tuple[Shapes, Any]] = {}
"""Cache of (shapes, model or None). Most changes that advice tries do not affect a trace."""


def shapes_of(plan: Plan) -> Shapes:
    """Trace the model, or use a formula; also of the teacher that its objective names. Raises WordsError if a model
    cannot be built or split over the mesh, and StoreError if nothing says what the teacher is.
    """
    shapes = _of_model(plan)
    if not reference.is_teacher(plan) or not shapes.blocks:
        return shapes
    from dtrain.weights.owner import owner_of

    name = str(plan.objective["teacher"])
    try:
        with store.patience(LOOK_SECONDS):
            part = owner_of(name).part
    except StoreError as error:
        raise StoreError(f"objective.teacher={name}: {error}") from error
    alone = replace(plan, model=part, adapter=files.node("adapter", "none"))
    return replace(shapes, teacher=_of_model(alone).blocks)


def _of_model(plan: Plan) -> Shapes:
    missing = unstated(plan)
    if missing:
        return Shapes((), tokens=0, unknown=missing)
    shapes = formulas.shapes(plan)
    if shapes is not None:
        return shapes
    _look_for(plan)
    key = repr((plan.model, plan.adapter, plan.data, plan.objective, plan.precision, holding_of(plan).shards))
    from dtrain.parallel.order import check
    from dtrain.strategy import fsdp
    from dtrain.tracing.tracer import trace

    with _printing_to_stderr():
        if key not in _traced:
            with trusting(plan.trust):
                _traced[key] = trace(plan)
        shapes, model = _traced[key]
        if model is not None:
            if fact(plan.strategy, "holds") == "shards" and plan.mesh.pp == 1:
                fsdp.check(model)
            check(model, plan.mesh, pipeline=plan.pipeline, tensors=plan.tensor)
    return shapes


def _look_for(plan: Plan) -> None:
    """Raises WordsError or PreflightError for a package, or a place of weights, that the model needs and that is not
    here: seconds before torch is loaded, and the model would say so.
    """
    if problem := absent([plan.model, plan.adapter, plan.data, plan.objective]):
        raise WordsError(problem)
    key = str(about(plan.model).get("weights_at") or "")
    name = str(plan.model.get(key) or "")
    place = hub.place(name)
    if place.startswith(hub.SCHEME):
        hub.look_for(place)
    if name and store.is_local(place) and not store.local_path(place).exists():
        from dtrain.weights.place import near

        raise WordsError(
            f"model.{key}={name}: nothing is there. Type a folder or URL of a model, or <organisation>/<name> of the "
            f"Hugging Face hub. {near(place)}".rstrip()
        )


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Output of a model goes to standard error, also below Python: standard output is for the plan."""
    screen.say(end="")  # flushes
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
