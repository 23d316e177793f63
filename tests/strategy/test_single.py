"""One rank: accumulation changes nothing but memory."""

from functools import partial

import pytest
import torch
from pool import ranks, resident
from small import PARTS, UNEVEN, agree, few_steps, first_batch


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_accumulation_is_one_large_batch(microbatch: int, data: dict[str, object]) -> None:
    parts = PARTS | {"data": data}
    (reference,) = resident(1, partial(few_steps, parts, {}, microbatch=8))
    (run,) = resident(1, partial(few_steps, parts, {}, microbatch=microbatch))
    agree(run, reference)


def test_the_loss_is_the_mean_over_targets_that_torch_computes() -> None:
    """The first step of a run against three lines of torch."""
    parts = PARTS | {"data": UNEVEN}

    def compared() -> tuple[float, float]:
        model, batch = first_batch(parts)
        loss = torch.nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        return loss.item(), norm.item()

    (loss, norm), (run,) = ranks(1, compared)[0], resident(1, partial(few_steps, parts, {}, microbatch=2, steps=1))
    assert run["losses"][0] == pytest.approx(loss, rel=1e-5)
    assert run["norms"][0] == pytest.approx(norm, rel=1e-5)
