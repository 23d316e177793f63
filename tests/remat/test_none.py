"""none: nothing is computed twice."""

from small import one_backward, same_bits

from dtrain.remat.none import build


def test_every_block_runs_once() -> None:
    reference, run = one_backward(None), one_backward(build())
    same_bits(run, reference)
    assert run["visits"] == [1, 1, 1, 1]
    assert run["saved"] == reference["saved"]
    assert run["backward"] == reference["backward"]
