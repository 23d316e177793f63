"""The range in which the time of a step is expected, for each kind of run: what published runs took of the time that is
predicted for them, the tenth that was furthest off on either side left out, and rounded outwards to a twentieth
(tests/predict/test_published.py; CPU: tests/bench/RESULTS.md).
"""

from collections.abc import Mapping

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Shapes

LONG = 16384
"""Tokens from which a sequence is long: attention takes most of the time."""
BANDS: Mapping[str, tuple[float, float]] = {
    "dense": (0.9, 1.2),
    "tp": (0.85, 1.2),
    "pipeline": (0.8, 1.1),
    "long": (1.0, 1.15),
    "cp": (0.85, 1.2),
    "fp8": (0.8, 1.3),
    "CPU": (0.6, 2.1),
    "measured CPU": (0.8, 1.3),
}
"""Kind of run -> (lowest, highest) time, as parts of the predicted one."""


def kind_of(plan: Plan, shapes: Shapes) -> str:
    """The kind of run, by what it is least certain of."""
    if any(block.experts for block in shapes.blocks):
        return "MoE"
    if plan.device == "cpu":
        return "measured CPU" if fact(plan.cluster, "figures") else "CPU"
    if fact(plan.precision, "flops"):
        return "fp8"
    if plan.mesh.cp > 1:
        return "cp"
    if plan.mesh.pp > 1:
        return "pipeline"
    if shapes.tokens >= LONG:
        return "long"
    return "tp" if plan.mesh.tp > 1 else "dense"
