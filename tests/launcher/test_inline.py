"""One rank, in this very process."""

import pytest
from launching import plan_of

from dtrain.errors import RankError
from dtrain.launcher.inline import Inline


def test_a_result_comes_back(tmp_path) -> None:
    result = Inline().launch(plan_of(tmp_path, "steps=3"))
    assert (result.status, result.step, result.exit_code) == ("finished", 3, 0)
    assert result.loss is not None


def test_a_rank_that_raises_shows_its_traceback(tmp_path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*ValueError: planned"):
        Inline().launch(plan_of(tmp_path, "model._target_=launching.Raises", "model.rank=0"))
