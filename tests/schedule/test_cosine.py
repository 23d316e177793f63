"""Warm-up, then half a cosine down to the floor."""

from itertools import pairwise

import pytest

from dtrain.schedule.cosine import Cosine


@pytest.mark.parametrize(("step", "factor"), [(0, 0.1), (9, 1.0), (10, 1.0), (60, 0.55), (110, 0.1)])
def test_the_curve_at_its_marks(step: int, factor: float) -> None:
    """Half way between warm-up and end the factor is the mean of 1 and the floor."""
    assert Cosine(steps=110, warmup=10, floor=0.1).factor(step) == pytest.approx(factor)


def test_it_falls_all_the_way_and_never_below_the_floor() -> None:
    schedule = Cosine(steps=50, warmup=5, floor=0.2)
    factors = [schedule.factor(step) for step in range(5, 50)]
    assert all(a > b for a, b in pairwise(factors[1:]))
    assert 0.2 < factors[-1] < 0.21
    assert schedule.factor(80) == pytest.approx(0.2), "steps beyond the end, when a run is made longer"


@pytest.mark.parametrize("warmup", [0, 0.5, 10, 30])
def test_no_warm_up_breaks_a_short_run(warmup: float) -> None:
    factors = [Cosine(steps=10, warmup=warmup, floor=0.0).factor(step) for step in range(10)]
    assert all(0 < factor <= 1 for factor in factors)
