"""The shapes of a plan's model, for verbs that show a plan: a note comes before code of others runs."""

from collections.abc import Sequence
from functools import cache

from dtrain import tracing
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.shapes import Shapes
from dtrain.secrets import screen


def shapes_of(plan: Plan) -> Shapes:
    """As `tracing.shapes_of`, which runs code of others only after a note about it."""
    if plan.trust and formulas.shapes(plan) is None:
        _announce(plan.trust)
    return tracing.shapes_of(plan)


@cache
def _announce(trust: Sequence[str]) -> None:
    runs = f"planning runs code of {', '.join(trust)}, which `trust` allows"
    screen.complain(f"{runs}: it builds the model and reads one sample of the data.", begin="note: ")
