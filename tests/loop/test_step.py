"""A loss that nothing can be trained by is refused in a sentence."""

from pathlib import Path

import pytest
from launching import plan_of
from pool import RankFailed, ranks

from dtrain.train import train


@pytest.mark.parametrize("ranked", ["devices=1 strategy=single", "devices=2 strategy=ddp", "devices=2 strategy=fsdp"])
def test_outputs_without_a_gradient_are_refused_in_a_sentence(ranked: str, tmp_path: Path) -> None:
    words = "model._target_=wrong_models.Detached trust=[wrong_models] data=synthetic objective=regression steps=2"
    plan = plan_of(tmp_path / "run", *words.split(), *ranked.split())
    with pytest.raises(RankFailed, match=r"WordsError.*the loss does not depend on any trained parameter"):
        ranks(plan.world, train, plan)
