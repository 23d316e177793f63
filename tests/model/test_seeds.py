"""One random stream per purpose; weights by name, equal on every mesh."""

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, mesh_of
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct, seeds
from dtrain.model.gpt import GPT
from dtrain.parallel.order import parallelize


def test_seeds_of_other_purposes_differ() -> None:
    made = {
        seeds.derive(seed, *purpose)
        for seed in range(50)
        for purpose in (("data",), ("model",), ("weight", "a"), ("weight", "b"), ("weighta",))
    }
    assert len(made) == 250
    assert all(0 <= value < 2**63 for value in made)


def test_a_name_cannot_pass_for_another() -> None:
    assert seeds.derive(1, "ab", "c") != seeds.derive(1, "a", "bc") != seeds.derive(1, "abc")
    assert seeds.derive(1, 2) != seeds.derive(12)


def test_seeds_are_a_file_format() -> None:
    """The weights of a run and the order of its data follow from these numbers, so another version must make the same."""
    import hashlib

    expected = int.from_bytes(hashlib.blake2b(b"0\x1fdata", digest_size=8).digest(), "little") >> 1
    assert seeds.derive(0, "data") == expected


def weights(mesh: Mesh, strategy: dict[str, object], seed: int) -> dict[str, list[float]]:
    model = construct(PARTS["model"], facts={"vocab": 13}, seed=seed)
    parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=seed)
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).flatten().tolist()
        for name, p in model.named_parameters()
    }


def on(strategy: str, seed: int, **degrees: int) -> dict[str, list[float]]:
    part = STRATEGIES.get(strategy, PARTS["strategy"])

    def rank() -> dict[str, list[float]]:
        with mesh_of(**degrees) as mesh:
            return weights(mesh, part, seed)

    answers = ranks(max(degrees.values(), default=1), rank)
    assert all(each == answers[0] for each in answers)
    return answers[0]


def test_every_mesh_begins_with_the_same_weights() -> None:
    alone = on("single", 3)
    assert on("ddp", 3, dp_replicate=2) == alone
    assert on("fsdp", 3, dp_shard=2) == alone
    assert on("single", 4) != alone


def test_equal_layers_do_not_begin_equal() -> None:
    found = on("single", 3)
    assert found["blocks.0.attention.q.weight"] != found["blocks.1.attention.q.weight"]


def test_a_longer_model_begins_like_the_shorter_one() -> None:
    """Weights go by name: a layer more does not shift the others."""
    short, long = (
        construct(PARTS["model"] | {"layers": layers}, facts={"vocab": 13}, seed=0).to_empty(device="cpu")
        for layers in (1, 3)
    )
    for model in (short, long):
        seeds.fill(model, 5)
    theirs = dict(long.named_parameters())
    assert all(
        torch.equal(parameter, theirs[name]) for name, parameter in short.named_parameters() if name != "head.weight"
    )


def test_weights_are_the_same_bit_for_bit_however_many_threads_fill_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made, threads = list[dict[str, torch.Tensor]](), set[int]()
    for count, ahead in ((1, seeds.AHEAD), (4, seeds.AHEAD), (4, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        monkeypatch.setattr(seeds, "AHEAD", ahead)
        model = construct(PARTS["model"] | {"layers": 5}, facts={"vocab": 13}, seed=0).to_empty(device="cpu")
        drawn = model.init_weight
        model.init_weight = lambda *arguments, drawn=drawn: (threads.add(threading.get_ident()), drawn(*arguments))  # type: ignore[assignment]
        seeds.fill(model, 5)
        made.append(dict(model.named_parameters()))
    assert all(torch.equal(weight, other[name]) for other in made for name, weight in made[0].items())
    assert threads > {threading.get_ident()}


@pytest.mark.parametrize("brought", [False, True])
def test_8b_weights_that_a_checkpoint_brings_are_not_drawn(brought: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the meta device: 32 GB in fp32, nearly a minute of one thread."""
    part = {
        "_target_": "dtrain.model.gpt.GPT",
        "vocab": 128256,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "width": 4096,
        "hidden": 14336,
    }
    drawn = list[int]()
    monkeypatch.setattr(GPT, "init_weight", lambda model, name, weight, generator: drawn.append(weight.nbytes))

    def build_it() -> int:
        with mesh_of() as mesh:
            mesh.device = torch.device("meta")
            model = construct(part, facts={}, seed=0)
            parallelize(
                model, mesh, build(PARTS["strategy"]), precision=build(PARTS["precision"]), seed=0, brought=brought
            )
            return sum(drawn)

    assert ranks(1, build_it) == [0 if brought else 4 * 8_030_261_248]


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(8).tolist(), lambda: np.random.rand(8).tolist(), lambda: [random.random() for _ in range(8)]],
)
@pytest.mark.parametrize("other", [(1, 2, 0), (0, 3, 0), (0, 2, 1)])
def test_a_model_draws_by_seed_step_and_rank(other: tuple[int, int, int], draw: Callable[[], list[float]]) -> None:
    drawn = []
    for arguments in ((0, 2, 0), other, (0, 2, 0)):
        seeds.reseed(*arguments)
        drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]


def test_what_was_drawn_since_a_step_began_is_seen_and_nothing_changed() -> None:
    seeds.reseed(3, 7, 1)
    assert seeds.drawn(3, 7, 1) == []
    first = torch.rand(2), np.random.rand(), random.random()
    assert seeds.drawn(3, 7, 1) == ["torch", "numpy", "python"]
    second = torch.rand(2)
    seeds.reseed(3, 7, 1)
    assert torch.equal(first[0], torch.rand(2)) and torch.equal(second, torch.rand(2)), "asking draws nothing"
    assert seeds.drawn(3, 7, 1) == ["torch"]
