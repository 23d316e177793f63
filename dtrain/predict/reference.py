"""The frozen model that an objective compares with, as predictions see it: memory of a rank, a sentence for the plan.

Its forward needs less at a time than the step that follows, so what counts is what it holds all the time.
"""

from dtrain.config.facts import about, fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import StateBytes

REST = "its memory is in the peak; its forwards, a third of the work more, are not in the time"


def is_copy(plan: Plan) -> bool:
    """Whether it is a second model of the same shapes."""
    return about(plan.objective).get("reference") == "start" and fact(plan.adapter, "trains") != "adapter"


def held(plan: Plan, shapes: Shapes, state: StateBytes) -> int:
    """Bytes of its weights on a rank. `state`: of the trained model there."""
    return state.parameters if is_copy(plan) else 0


def sentence(plan: Plan) -> str:
    """Says of the reference which model it is and what it costs; empty without one."""
    if about(plan.objective).get("reference") is None:
        return ""
    if is_copy(plan):
        return f"a frozen copy of the model as the run begins with it: {REST}"
    return "the model without its adapter: no second copy; its forwards, a third of the work more, are not in the time"
