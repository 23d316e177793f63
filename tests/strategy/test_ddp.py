"""ddp: the numbers of one process, gradients that cross ranks once per step."""

from typing import Any

import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, UNEVEN, agree, few_steps, mesh_of, tokens
from torch.distributed.tensor.debug import CommDebugMode

from dtrain.build import build
from dtrain.model import construct
from dtrain.model.mlp import MLP
from dtrain.parallel.order import parallelize
from dtrain.strategy.ddp import DDP

DDP_PARTS = PARTS | {"strategy": STRATEGIES["ddp"]}


@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_two_ranks_are_one_process(data: dict[str, Any]) -> None:
    (reference,) = ranks(1, lambda: few_steps(PARTS | {"data": data}, {}, microbatch=8))
    for microbatch in (4, 2):
        for rank in ranks(2, lambda microbatch=microbatch: few_steps(DDP_PARTS | {"data": data}, {"dp_replicate": 2}, microbatch=microbatch)):
            agree(rank, reference)


def test_ranks_keep_equal_weights() -> None:
    one, two = ranks(2, few_steps, DDP_PARTS, {"dp_replicate": 2})
    assert one["weights"] == two["weights"]


def wrapped(mesh: Any, strategy: Any) -> torch.nn.Module:
    model = construct(PARTS["model"], facts={"vocab": 13}, seed=0)
    return parallelize(model, mesh, strategy, precision=build(PARTS["precision"]), seed=0)


def gradients_per_microbatch() -> list[bool]:
    """After each of three microbatches: whether this rank's gradients are those of the other."""
    with mesh_of(dp_replicate=2) as mesh:
        strategy, same = DDP(bucket_mb=25), []
        model = wrapped(mesh, strategy)
        for number in range(3):
            with strategy.sync(model, number == 2):
                model(tokens(2, 8, seed=10 * mesh.rank + number)).square().sum().backward()
            sums = mesh.gather(sum(p.grad.double().sum().item() for p in model.parameters()))
            same.append(sums[0] == sums[1])
        return same


def test_gradients_cross_ranks_in_the_last_microbatch_alone() -> None:
    assert ranks(2, gradients_per_microbatch) == [[False, False, True]] * 2


def nothing_to_train() -> float:
    with mesh_of(dp_replicate=2) as mesh:
        model = MLP(inputs=2, outputs=2, width=2, layers=1).requires_grad_(False)
        strategy = DDP(bucket_mb=25)
        with strategy.sync(strategy.wrap(model, mesh), False):
            return strategy.wrap(model, mesh)(torch.ones(1, 2)).sum().item()


def test_a_model_without_trained_weights_is_no_error() -> None:
    assert len(ranks(2, nothing_to_train)) == 2


def collectives() -> int:
    with mesh_of(dp_replicate=2) as mesh:
        strategy = DDP(bucket_mb=25)
        model = wrapped(mesh, strategy)
        model(tokens(2, 8)).square().sum().backward()
        model.zero_grad()
        with CommDebugMode() as seen:
            model(tokens(2, 8)).square().sum().backward()
        return seen.get_total_counts()


def test_the_forward_asks_the_others_nothing() -> None:
    """Broadcasting buffers before every forward, as torch does by default, would wait for them."""
    assert ranks(2, collectives) == [0, 0]
