"""The frozen model that an objective compares with, as predictions see it: memory of a rank, a sentence for the plan.

Its forward needs less at a time than the step that follows, so what counts is what it holds all the time, and the
logits of a teacher, which the loss reads.
"""

from dtrain.config.facts import about, fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import StateBytes, count_state
from dtrain.secrets import screen

REST = "its memory is in the peak; its forwards{} are not in the time"
THIRD = ", a third of the work more,"


def is_copy(plan: Plan) -> bool:
    """Whether it is a second model of the same shapes."""
    return about(plan.objective).get("reference") == "start" and fact(plan.adapter, "trains") != "adapter"


def is_teacher(plan: Plan) -> bool:
    """Whether it is a model of its own, at `objective.teacher`."""
    return about(plan.objective).get("reference") == "teacher"


def held(plan: Plan, shapes: Shapes, state: StateBytes) -> int:
    """Bytes of its weights on a rank. `state`: of the trained model there."""
    if is_teacher(plan):
        return count_state(plan, shapes.teacher).parameters
    return state.parameters if is_copy(plan) else 0


def logits(plan: Plan, shapes: Shapes) -> float:
    """Bytes of its outputs for a microbatch on a rank, which are as large as those of the model."""
    return shapes.returns.of(plan) * plan.batch.microbatch if is_teacher(plan) else 0.0


def sentence(plan: Plan) -> str:
    """Says of the reference which model it is and what it costs; empty without one."""
    if about(plan.objective).get("reference") is None:
        return ""
    if is_teacher(plan):
        return f"the teacher {screen.on_one_line(str(plan.objective['teacher']))}: {REST.format('')}"
    if is_copy(plan):
        return f"a frozen copy of the model as the run begins with it: {REST.format(THIRD)}"
    return f"the model without its adapter: no second copy; its forwards{THIRD} are not in the time"
