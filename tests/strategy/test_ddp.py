"""ddp: the numbers of one process, gradients that cross ranks once per step."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import resident
from small import PARTS, STRATEGIES, UNEVEN, Collectives, agree, few_steps, joined, on_mesh, on_resident_mesh, tokens

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.model.mlp import MLP
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape
from dtrain.strategy import Carried, carried
from dtrain.strategy.ddp import DDP, average

DDP_PARTS = PARTS | {"strategy": STRATEGIES["ddp"]}


@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_two_ranks_are_one_process(data: dict[str, Any]) -> None:
    (reference,) = resident(1, partial(few_steps, PARTS | {"data": data}, {}, microbatch=8))
    for microbatch in (4, 2):
        for rank in resident(
            2,
            partial(few_steps, DDP_PARTS | {"data": data}, {"dp_replicate": 2}, microbatch=microbatch),
        ):
            agree(rank, reference)


def test_ranks_keep_equal_weights() -> None:
    one, two = resident(2, few_steps, DDP_PARTS, {"dp_replicate": 2})
    assert one["weights"] == two["weights"]


def wrapped(mesh: Mesh, strategy: Any) -> torch.nn.Module:
    model = construct(PARTS["model"], facts={"vocab": 13}, seed=0)
    return parallelize(model, mesh, strategy, precision=build(PARTS["precision"]), seed=0)


def gradients_per_microbatch(mesh: Mesh) -> list[bool]:
    """After each of three microbatches: whether this rank's gradients are those of the other."""
    strategy, same = DDP(bucket_mb=25), []
    model = wrapped(mesh, strategy)
    for number in range(3):
        with strategy.sync(model, number == 2):
            model(tokens(2, 8, seed=10 * mesh.rank + number)).square().sum().backward()
        sums = mesh.gather(sum(p.grad.double().sum().item() for p in model.parameters()))
        same.append(sums[0] == sums[1])
    return same


def test_gradients_cross_ranks_in_the_last_microbatch_alone() -> None:
    assert on_resident_mesh(gradients_per_microbatch, dp_replicate=2) == [[False, False, True]] * 2


def first_and_later_step(mesh: Mesh) -> list[bool]:
    """Whether each gradient of a batch is the same in the first step as after others."""
    batches, gradients = [tokens(2, 8, seed=10 * mesh.rank + number) for number in range(3)], []
    for begin in (0, 2):
        strategy = DDP(bucket_mb=0.01)
        model = wrapped(mesh, strategy)
        for batch in batches[begin:]:
            model.zero_grad()
            with strategy.sync(model, True):
                model(batch).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    return [torch.equal(one, other) for one, other in zip(*gradients, strict=True)]


def test_a_run_that_resumes_adds_gradients_in_the_order_of_one_that_was_not_stopped() -> None:
    """With three ranks the order matters: a + b + c."""
    for same in on_mesh(first_and_later_step, dp_replicate=3):
        assert all(same), same


def nothing_to_train(mesh: Mesh) -> float:
    model = MLP(inputs=2, outputs=2, width=2, layers=1).requires_grad_(False)
    strategy = DDP(bucket_mb=25)
    with strategy.sync(strategy.wrap(model, mesh), False):
        return strategy.wrap(model, mesh)(torch.ones(1, 2)).sum().item()


def test_a_model_without_trained_weights_is_no_error() -> None:
    assert len(on_resident_mesh(nothing_to_train, dp_replicate=2)) == 2


def collectives(mesh: Mesh) -> list[list[str]]:
    strategy = DDP(bucket_mb=25)
    model = wrapped(mesh, strategy)
    called = []
    for _ in range(2):  # the first forward agrees about the buckets
        model.zero_grad()
        with Collectives() as seen, strategy.sync(model, True) as absent:
            assert isinstance(absent, Carried)
            absent.message = lambda: torch.ones(carried(model))
            outputs = model(tokens(2, 8))
            called.append(seen.names[:])
            outputs.square().sum().backward()
        called.append(seen.names[len(called[-1]) :])
        assert absent.sums is not None and absent.sums.tolist() == [1.0] * carried(model)
    return called


def test_the_forward_asks_the_others_nothing_and_the_backward_once() -> None:
    """Broadcasting buffers before every forward, as torch does by default, would wait for them."""
    for called in on_resident_mesh(collectives, dp_replicate=2):
        forward, backward = called[2:]
        assert forward == []
        assert backward == ["allreduce_"], "one bucket holds all gradients of a small model, and the message"


class Messages(torch.nn.Module):
    """It has what a careless name of a hidden parameter would take."""

    def __init__(self) -> None:
        super().__init__()
        self.message = torch.nn.Parameter(torch.ones(2))
        self._message = torch.nn.Parameter(torch.ones(2))

    def register_parameter(self, name: str, param: Any) -> None:
        assert name.endswith("message")
        super().register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.message * self._message


def names_after(mesh: Mesh) -> list[str]:
    strategy, model = DDP(bucket_mb=25), Messages()
    called = strategy.wrap(model, mesh)
    with strategy.sync(called, True):
        called(torch.ones(3, 2)).sum().backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def test_the_message_takes_no_name_of_a_model() -> None:
    assert on_resident_mesh(names_after, dp_replicate=2) == [["message", "_message"]] * 2


# beside tp, pp or ep: averaged after the backward


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "pp": 2}], ids=["tp", "pp"])
def test_copies_of_a_split_model_are_one_process(degrees: dict[str, int]) -> None:
    untied = PARTS | {"data": UNEVEN, "model": PARTS["model"] | {"tied": False}}
    (reference,) = resident(1, partial(few_steps, untied, {}, microbatch=8, steps=2))
    runs = resident(
        4,
        partial(
            few_steps,
            untied | {"strategy": STRATEGIES["ddp"]},
            degrees,
            microbatch=2,
            steps=2,
            pipeline=PipelineShape(),
        ),
    )
    agree(joined([runs[0], runs[2]]) if "pp" in degrees else runs[0], reference)
    assert runs[0]["weights"] == runs[1 if "pp" in degrees else 2]["weights"], "copies stay equal"


def averaged(mesh: Mesh, bucket: int) -> tuple[list[list[float] | None], int]:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    parameters[0].grad = torch.full((3,), 1.0 + mesh.rank)
    if mesh.rank == 0:
        parameters[1].grad = torch.full((3,), 6.0)
    with Collectives() as seen:
        average(parameters, mesh.group("batch"), 2, bucket=bucket)
    return [parameter.grad.tolist() for parameter in parameters], len(seen.names)  # type: ignore[union-attr]


def test_a_gradient_that_one_rank_lacks_counts_as_zero() -> None:
    """So ranks call the same collectives, in buckets of about the size that was asked for."""
    for bucket, calls in ((1 << 20, 1), (13, 2), (1, 3)):
        for gradients, called in on_resident_mesh(partial(averaged, bucket=bucket), dp_replicate=2):
            assert gradients == [[1.5] * 3, [3.0] * 3, [0.0] * 3]
            assert called == calls


def test_a_bucket_is_on_its_way_while_the_one_before_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than two are in memory."""
    order, reduce = list[str](), dist.all_reduce

    class Work:
        def __init__(self, inner: dist.Work) -> None:
            self._inner = inner

        def wait(self) -> None:
            order.append("wait")
            self._inner.wait()

    def sent(*arguments: Any, **options: Any) -> Work:
        order.append("send")
        return Work(reduce(*arguments, **options))

    monkeypatch.setattr(dist, "all_reduce", sent)
    for gradients, _, calls in on_mesh(lambda mesh: (*averaged(mesh, 1), order), dp_replicate=2):
        assert gradients == [[1.5] * 3, [3.0] * 3, [0.0] * 3]
        assert calls == ["send", "send", "wait", "send", "wait", "wait"]
