"""budget: a share of the blocks keeps everything, the others run twice; the numbers are the same bit for bit."""

import pytest
from small import one_backward, same_bits

from dtrain.errors import WordsError
from dtrain.remat.budget import build


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 1])
def test_the_numbers_are_the_same_bit_for_bit(share: float) -> None:
    same_bits(one_backward(build(share=share)), one_backward(None))


@pytest.mark.parametrize(("share", "kept"), [(0, 0), (0.25, 1), (0.5, 2), (0.75, 3), (1, 4), (0.1, 0), (0.9, 3)])
def test_the_share_of_the_blocks_keeps_all(share: float, kept: int) -> None:
    """Never more than the share, which is a bound of memory."""
    visits = one_backward(build(share=share))["visits"]
    assert visits.count(1) == kept
    assert visits.count(2) == 4 - kept


def test_they_are_spread_evenly() -> None:
    """A pipeline cuts blocks into stages, and each stage is to keep its share."""
    visits = one_backward(build(share=0.5), layers=8)["visits"]
    assert all(visits[start : start + 2].count(1) == 1 for start in range(0, 8, 2))


def test_more_is_kept_for_a_larger_share() -> None:
    saved = [one_backward(build(share=share))["saved"] for share in (0, 0.5, 1)]
    assert saved[0] < saved[1] < saved[2] == one_backward(None)["saved"]


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(WordsError, match=rf"remat\.share={share}.*between 0 \(as remat=full\) and 1 \(as remat=none\)"):
        build(share=share)
