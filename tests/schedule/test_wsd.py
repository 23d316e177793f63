"""Warm-up, stable, decay."""

import pytest

from dtrain.schedule.wsd import WSD


@pytest.mark.parametrize(
    ("step", "factor"), [(0, 0.1), (9, 1.0), (50, 1.0), (80, 1.0), (90, 0.6), (99, 0.24), (100, 0.2)]
)
def test_the_curve_at_its_marks(step: int, factor: float) -> None:
    assert WSD(steps=100, warmup=10, decay=20, floor=0.2).factor(step) == pytest.approx(factor)


def test_lengths_below_one_are_parts_of_the_run() -> None:
    parts, steps = WSD(steps=200, warmup=0.1, decay=0.25, floor=0.0), WSD(steps=200, warmup=20, decay=50, floor=0.0)
    assert [parts.factor(step) for step in range(200)] == [steps.factor(step) for step in range(200)]


def test_without_decay_it_stays() -> None:
    assert WSD(steps=10, warmup=0, decay=0, floor=0.0).factor(9) == 1.0


def test_a_run_shorter_than_its_parts_still_learns() -> None:
    assert all(WSD(steps=6, warmup=4, decay=5, floor=0.0).factor(step) > 0 for step in range(6))


def test_parts_longer_than_the_run_are_as_long_as_it() -> None:
    long, whole = WSD(steps=20, warmup=50, decay=90, floor=0.0), WSD(steps=20, warmup=20, decay=20, floor=0.0)
    assert [long.factor(step) for step in range(20)] == [whole.factor(step) for step in range(20)]
    assert max(long.factor(step) for step in range(20)) == 0.5
    assert WSD(steps=20, warmup=0, decay=5, floor=0.1).factor(30) == 0.1, "steps beyond the end stay at the floor"
