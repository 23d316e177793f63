"""batch = microbatch x data-parallel ranks x accumulate: any two give the third."""

import pytest
from small import plan

from dtrain.errors import WordsError
from dtrain.plan import BatchShape


def batch(*words: str) -> BatchShape:
    return plan(*words).batch


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (("batch=16",), BatchShape(16, 16, 1, 1)),
        (("batch=12", "devices=2"), BatchShape(12, 6, 2, 1)),
        (("batch=12", "microbatch=2"), BatchShape(12, 2, 1, 6)),
        (("batch=12", "accumulate=2", "devices=3"), BatchShape(12, 2, 3, 2)),
        (("microbatch=2", "accumulate=5", "devices=3"), BatchShape(30, 2, 3, 5)),
        (("batch=30", "microbatch=2", "accumulate=5", "devices=3"), BatchShape(30, 2, 3, 5)),
        (("batch=6", "microbatch=3", "accumulate=2"), BatchShape(6, 3, 1, 2)),
    ],
)
def test_two_give_the_third(words: tuple[str, ...], shape: BatchShape) -> None:
    assert batch(*words) == shape
    assert shape.size == shape.local * shape.data


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("batch=16", "devices=3"), "Nearest: batch=15 or batch=18."),
        (("batch=2", "devices=3"), "Nearest: batch=3."),
        (("batch=16", "microbatch=3"), "Nearest: batch=15 or batch=18."),
        (("batch=10", "accumulate=2", "devices=2"), "Nearest: batch=8 or batch=12."),
        (("batch=16", "microbatch=2", "accumulate=2"), "= 4. Leave one of the three out."),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(WordsError) as caught:
        batch(*words)
    assert said in str(caught.value)


def test_the_nearest_is_accepted() -> None:
    assert batch("batch=18", "devices=3").microbatch == 6
