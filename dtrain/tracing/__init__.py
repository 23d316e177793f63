"""The shapes of a plan's model: of this package's own by arithmetic, of any other by running it once without memory.
Torch is imported for those alone.
"""

from typing import Any

from dtrain.build import trusting
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import flowing
from dtrain.predict.stated import unstated

_traced: dict[str, tuple[Shapes, Any]] = {}
"""(shapes, the model or None) by all that a trace depends on: the changes that advice tries mostly leave it as it
is.
"""


def shapes_of(plan: Plan) -> Shapes:
    """Raises WordsError as building the model would, and splitting it over the mesh."""
    missing = unstated(plan)
    if missing:
        return Shapes((), 0, 0, 0, 0, 0, unknown=missing)
    shapes = formulas.shapes(plan)
    if shapes is not None:
        return shapes
    key = repr((plan.model, plan.data, plan.objective, plan.precision, flowing(plan)))
    from dtrain.parallel.order import check
    from dtrain.tracing.tracer import trace

    if key not in _traced:
        with trusting(plan.trust):
            _traced[key] = trace(plan)
    shapes, model = _traced[key]
    if model is not None:
        check(model, plan.mesh, pipeline=plan.pipeline, tensors=plan.tensor)
    return shapes
