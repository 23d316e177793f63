"""Windows over token arrays: every token is learnt from, no window leaves its array, later passes cut elsewhere."""

import numpy as np
import pytest

from dtrain.data.windows import Windows, split
from dtrain.errors import PreflightError

ZERO = np.zeros(1, dtype=np.int64)


def windows(*arrays: np.ndarray, sequence: int = 4, shifting: bool = True) -> Windows:
    return Windows(arrays, sequence, 1000, "x", shifting=shifting)


def take(source: Windows, index: int, epoch: int = 0) -> tuple[list[int], list[int]]:
    batch = source.take(np.array([index]), np.array([epoch]))
    return batch["inputs"][0].tolist(), batch["targets"][0].tolist()


def test_a_window_is_tokens_and_the_next_ones() -> None:
    source = windows(np.arange(13, dtype=np.uint16), shifting=False)
    assert len(source) == 3
    assert take(source, 0) == ([0, 1, 2, 3], [1, 2, 3, 4])
    assert take(source, 2) == ([8, 9, 10, 11], [9, 10, 11, 12])


@pytest.mark.parametrize("lengths", [(30,), (9, 30, 5), (17, 3, 8, 40)])
def test_no_window_of_any_pass_leaves_its_array(lengths: tuple[int, ...]) -> None:
    arrays = [np.arange(length, dtype=np.uint32) + 100 * number for number, length in enumerate(lengths)]
    source = windows(*arrays)
    for epoch in range(20):
        for index in range(len(source)):
            inputs, targets = take(source, index, epoch)
            assert targets == [token + 1 for token in inputs], "a window is one stretch of one array"
            assert len({token // 100 for token in inputs + targets}) == 1


def test_passes_cut_at_other_offsets() -> None:
    source = windows(np.arange(100, dtype=np.uint8))
    assert len({tuple(take(source, 3, epoch)[0]) for epoch in range(20)}) == 4, "sequence=4 has four offsets"
    assert take(source, 0, 0)[0] == [0, 1, 2, 3], "the first pass begins at the beginning"


def test_one_batch_may_hold_samples_of_two_passes() -> None:
    source = windows(np.arange(100, dtype=np.uint8))
    batch = source.take(np.array([5, 5]), np.array([0, 1]))
    assert batch["inputs"].tolist() == [take(source, 5, 0)[0], take(source, 5, 1)[0]]


def test_the_held_out_part_is_the_end_and_does_not_shift() -> None:
    train, kept = split([np.arange(40), np.arange(40, 100)], 0.25)
    source = Windows(train, 4, 1000, "x", kept)
    heldout = source.holdout()
    assert heldout is not None
    assert [array.tolist() for array in train] == [list(range(40)), list(range(40, 75))]
    assert take(heldout, 0, 0) == take(heldout, 0, 9) == ([75, 76, 77, 78], [76, 77, 78, 79])
    assert heldout.holdout() is None


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9])
def test_a_split_loses_no_token(part: float) -> None:
    arrays = [np.arange(7), np.arange(7, 10), np.arange(10, 50)]
    train, kept = split(arrays, part)
    assert np.concatenate([*train, *kept]).tolist() == list(range(50))
    assert sum(map(len, kept)) == round(50 * part)


def test_too_few_tokens_are_refused_with_what_to_type() -> None:
    with pytest.raises(PreflightError, match=r"7 tokens are too few for one sample.*Type a smaller data\.sequence"):
        windows(np.arange(7))


def test_a_held_out_part_that_is_too_short_is_none() -> None:
    assert Windows([np.arange(100)], 4, 1000, "x", [np.arange(3)]).holdout() is None
