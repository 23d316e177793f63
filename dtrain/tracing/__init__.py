"""The shapes of a plan's model: by arithmetic for built-in models; any other model runs once on tensors without memory,
and only then torch is imported.
"""

from typing import Any

from dtrain.build import trusting
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import flowing
from dtrain.predict.stated import unstated

_traced: dict[str, tuple[Shapes, Any]] = {}
"""Cache of (shapes, model or None). Most changes that advice tries do not affect a trace."""


def shapes_of(plan: Plan) -> Shapes:
    """Trace the model, or use a formula. Raises WordsError if the model cannot be built or split over the mesh."""
    missing = unstated(plan)
    if missing:
        return Shapes((), 0, 0, 0, 0, 0, unknown=missing)
    shapes = formulas.shapes(plan)
    if shapes is not None:
        return shapes
    key = repr((plan.model, plan.adapter, plan.data, plan.objective, plan.precision, flowing(plan)))
    from dtrain.parallel.order import check
    from dtrain.tracing.tracer import trace

    if key not in _traced:
        with trusting(plan.trust):
            _traced[key] = trace(plan)
    shapes, model = _traced[key]
    if model is not None:
        check(model, plan.mesh, pipeline=plan.pipeline, tensors=plan.tensor)
    return shapes
