"""The order of blocks: each row once in a pass, of few blocks at a time, a function of the position alone."""

import numpy as np
import pytest

from dtrain.data import split
from dtrain.data.split import Blocks, Scattered

SIZES = (7, 0, 30, 1, 12, 50)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "WINDOW", 60)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.2, 0.9])
def test_a_row_is_trained_on_or_held_out(part: float) -> None:
    train = Blocks(SIZES, SIZES, part)
    held = train.rest()
    both = [each.original(np.arange(len(each))) for each in (train, held) if each]
    assert sorted(np.concatenate(both).tolist()) == [*range(100)]
    assert len(train) == Scattered.of(100, part).stop
    assert held is None or held.rest() is None


def test_of_each_block_the_same_part_is_held_out() -> None:
    held = Blocks((100, 300, 50), (1, 1, 1), 0.2).rest()
    assert held
    assert np.histogram(held.original(np.arange(90)), [0, 100, 400, 450])[0].tolist() == [20, 60, 10]


def test_a_pass_shows_each_row_once_and_the_next_in_another_order() -> None:
    blocks = Blocks(SIZES, SIZES, 0.1)
    index, epochs = blocks.order(np.arange(180), seed=3)
    assert epochs.tolist() == [0] * 90 + [1] * 90
    for begin in (0, 90):
        assert sorted(index[begin : begin + 90].tolist()) == [*range(90)]
    assert index[:90].tolist() != index[90:].tolist()
    assert blocks.order(np.arange(90), seed=4)[0].tolist() != index[:90].tolist()


def test_a_position_does_not_depend_on_those_beside_it() -> None:
    blocks = Blocks(SIZES, SIZES, 0.1)
    whole = blocks.order(np.arange(300), seed=3)[0]
    scattered = np.random.default_rng(0).permutation(300)
    assert blocks.order(scattered, seed=3)[0].tolist() == whole[scattered].tolist()
    assert [blocks.order(np.array([place]), seed=3)[0].item() for place in range(300)] == whole.tolist()


def test_a_window_of_blocks_is_finished_before_the_next() -> None:
    blocks = Blocks((20,) * 10, (30,) * 10, 0.0)
    owner = blocks.original(blocks.order(np.arange(200), seed=1)[0]) // 20
    windows = [{*owner[begin : begin + 40].tolist()} for begin in range(0, 200, 40)]
    assert [len(window) for window in windows] == [2] * 5 and len(set.union(*windows)) == 10
    assert len({*owner[:20].tolist()}) == 2, "rows of both blocks are mixed"


def test_a_block_larger_than_a_window_is_one() -> None:
    blocks = Blocks((20,) * 3, (99,) * 3, 0.0)
    owner = blocks.original(blocks.order(np.arange(60), seed=1)[0]) // 20
    assert all(len({*owner[begin : begin + 20].tolist()}) == 1 for begin in (0, 20, 40))


def test_the_order_is_a_format() -> None:
    """A checkpoint is a position in it."""
    assert Blocks(SIZES, SIZES, 0.1).order(np.arange(8), seed=5)[0].tolist() == [41, 13, 37, 5, 8, 10, 0, 16]
