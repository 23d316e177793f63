"""The shapes of a plan's model: of this package's own by arithmetic, of any other by running it once without memory. Torch is imported for those alone."""

from dtrain.plan import Plan
from dtrain.predict import known
from dtrain.predict.shapes import Shapes


def shapes_of(plan: Plan) -> Shapes:
    """Raises WordsError as building the model would."""
    found = known.shapes(plan)
    if found is None:
        from dtrain.tracer import trace

        found = trace(plan)
    return found
