"""The global order: a bijection of every size, entered anywhere, written in stone."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from invariance.zoo import Noting
from pool import ranks
from small import plan

from dtrain.data.dataset import Dataset
from dtrain.data.order import VERSION, permute, samples
from dtrain.model.seeds import derive
from dtrain.train import train


def order(n: int, seed: int, epoch: int = 0) -> list[int]:
    return samples(np.arange(epoch * n, (epoch + 1) * n), n=n, seed=seed)[0].tolist()


def test_every_sample_comes_once_per_epoch_whatever_the_size() -> None:
    for n in range(1, 301):
        for key in (0, 1, 2**63):
            assert sorted(permute(np.arange(n), n=n, key=key).tolist()) == list(range(n)), f"n={n} key={key}"


@pytest.mark.parametrize("n", [4095, 4096, 4097, 65537, 100_003])
def test_larger_sizes_are_bijections_too(n: int) -> None:
    assert len(set(order(n, seed=7))) == n


@pytest.mark.parametrize("n", [10**9 + 7, 2**40, 2**62 - 1])
def test_a_part_of_a_huge_order_has_no_repetition_and_stays_in_range(n: int) -> None:
    start = n // 3
    drawn, epoch = samples(np.arange(start, start + 20_000), n=n, seed=1)
    assert len(np.unique(drawn)) == 20_000
    assert drawn.min() >= 0
    assert drawn.max() < n
    assert (epoch == 0).all()


def test_any_position_can_be_entered_alone() -> None:
    whole = samples(np.arange(0, 700), n=97, seed=5)
    for position in (0, 1, 96, 97, 98, 400, 699):
        drawn, epoch = samples(np.array([position]), n=97, seed=5)
        assert (drawn[0], epoch[0]) == (whole[0][position], whole[1][position])
        assert epoch[0] == position // 97


def test_epochs_and_seeds_differ() -> None:
    orders = [order(200, seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for a in range(len(orders)):
        for b in range(a):
            agreeing = sum(x == y for x, y in zip(orders[a], orders[b], strict=True))
            assert agreeing < 12, "two orders of 200 agree in about one place"


def test_no_place_of_the_order_is_favoured() -> None:
    """Over many seeds every sample comes first about equally often, and neighbours do not stay neighbours."""
    n, seeds = 16, 4000
    first = np.bincount([permute(np.array([0]), n=n, key=hash_of(seed))[0] for seed in range(seeds)], minlength=n)
    expected = seeds / n
    assert (np.abs(first - expected) < 6 * expected**0.5).all()
    places = np.array(order(10_000, seed=3))
    assert (np.abs(np.diff(places)) == 1).mean() < 0.005


def hash_of(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")


def test_the_order_is_a_file_format() -> None:
    """A change here makes every checkpoint go on with other samples: raise VERSION with it."""
    assert VERSION == 1
    assert order(10, seed=0) == [1, 9, 6, 8, 4, 7, 2, 3, 5, 0]
    assert order(10, seed=0, epoch=1) == [9, 0, 4, 7, 6, 1, 3, 2, 5, 8]
    assert samples(np.arange(5), n=10**12, seed=42)[0].tolist() == [
        754093004677,
        288875468043,
        479666856433,
        537455326725,
        666080932832,
    ]


def test_the_order_of_a_run_can_be_rebuilt_as_its_docstring_says(tmp_path: Path) -> None:
    log, steps = tmp_path / "log", range(3)
    words = "model=mlp model.width=4 data=dataset data.dataset._target_=invariance.zoo.Noting trust=[invariance] objective=regression hook=[] seed=3 batch=8 steps=3"
    run = plan(*words.split(), f"data.dataset.log={log}", f"out={tmp_path / 'run'}")
    ranks(1, train, run)
    read = list(map(int, log.read_text().split()))

    mine = Noting(str(tmp_path / "again"))
    source = Dataset(mine, holdout=0.1)
    for step in steps:
        index, _ = samples(np.arange(step * 8, (step + 1) * 8), n=len(source), seed=derive(3, "data"))
        expected = source.original(index).tolist()
        assert any(read[start : start + 8] == expected for start in range(len(read))), (step, expected, read)
