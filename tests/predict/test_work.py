"""Operations of a step: the shares of forward, backward and what is computed twice."""

import pytest
from predicted import planned

from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.work import Work, work


def of(decided: Plan) -> Work:
    shapes = formulas.shapes(decided)
    assert shapes
    return work(decided, shapes)


def test_it_is_six_times_weights_times_tokens_and_attention() -> None:
    """2 x 3 for each weight that a token meets (arXiv 2001.08361), embeddings aside; 2 + 5 products of the size of the scores, of the width."""
    tokens, weights, layers, width = 8 * 64, 4 * (4 * 64 * 64 + 3 * 64 * 160) + 128 * 64, 4, 64
    predicted = of(planned(""))
    assert predicted.total == 6 * weights * tokens + 7 * 2 * layers * 8 * 64 * 64 * width
    assert predicted.recomputed == 0


@pytest.mark.parametrize(
    ("words", "share"),
    [("remat=full", 1.0), ("remat=budget", 0.5), ("remat=selective", 0.0), ("remat=budget remat.share=0.75", 0.25)],
)
def test_what_is_computed_twice(words: str, share: float) -> None:
    whole, predicted = of(planned("remat=full")), of(planned(words))
    assert predicted.recomputed == pytest.approx(share * whole.recomputed)
    assert predicted.forward == whole.forward > whole.recomputed
