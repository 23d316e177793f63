"""A period of a run: how many steps lie between two evaluations, checkpoints or calls of a hook."""

from fractions import Fraction

EPOCH = "epoch"
"""The word for one pass over the training data."""
COUNTED = ("evaluate.every", "checkpoint.every")
"""Keys whose epoch is counted in steps before the launch."""
Period = int | str
"""A number of steps, 0 for none; as text a fraction such as `10/3`, the steps of an epoch that ends within a step."""


def period_of(samples: int, batch: int) -> Period:
    """The steps of one epoch."""
    steps = Fraction(samples, batch)
    return steps.numerator if steps.denominator == 1 else str(steps)


def is_due(every: Period, step: int, *, last: bool = False) -> bool:
    """Whether an action is due after this step: after the last, and after the step in which a period ends. Of `10/3`
    these are steps 4, 7, 10, 14 and so on.
    """
    if isinstance(every, int):
        return last or bool(every and step % every == 0)
    steps = Fraction(every)
    return last or step // steps != (step - 1) // steps
