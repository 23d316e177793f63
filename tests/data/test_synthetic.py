"""Random samples that can be learnt, from a formula."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.data.synthetic import Synthetic

TASKS = ("next_token", "classification", "regression")


def synthetic(task: str, **changed: Any) -> Synthetic:
    return Synthetic(
        **{
            "task": task,
            "inputs": [3, 4],
            "outputs": 5,
            "vocab": 50,
            "sequence": 20,
            "samples": 400,
            "holdout_part": 0.1,
        }
        | changed
    )


def take(source: Synthetic, index: np.ndarray) -> dict[str, Any]:
    return source.take(index, np.zeros(len(index), dtype=np.int64))


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_its_index_alone(task: str) -> None:
    source = synthetic(task)
    whole, one = take(source, np.arange(10)), take(source, np.array([7]))
    for key in ("inputs", "targets"):
        assert torch.equal(whole[key][7], one[key][0])
        assert not torch.equal(whole[key][7], whole[key][6]) or task == "classification"


@pytest.mark.parametrize("inputs", [[1], [3, 4], [64], [3, 32, 32]])
def test_targets_do_not_depend_on_the_block_they_are_computed_in(inputs: list[int]) -> None:
    """A matrix product rounds a row by the rows beside it: which ones, and how, depends on the CPU."""
    source = synthetic("regression", inputs=inputs)
    whole = take(source, np.arange(70))["targets"]
    for first in (0, 1, 13):
        for length in range(1, 34):
            assert torch.equal(take(source, np.arange(first, first + length))["targets"], whole[first : first + length])


def test_samples_are_the_same_on_every_cpu() -> None:
    digests = [
        hashlib.sha256(take(synthetic(task, inputs=[64]), np.arange(64))["targets"].numpy().tobytes()).hexdigest()[:16]
        for task in TASKS
    ]
    assert digests == ["a38172c585626d39", "fc79a9600919db07", "2a632ee908ca824c"]


def test_shapes_and_ranges_are_as_said() -> None:
    batch = take(synthetic("regression"), np.arange(100))
    assert batch["inputs"].shape == (100, 3, 4)
    assert batch["targets"].shape == (100, 5)
    assert -1 <= batch["inputs"].min() < -0.9 < 0.9 < batch["inputs"].max() < 1
    batch = take(synthetic("next_token"), np.arange(100))
    assert batch["inputs"].shape == batch["targets"].shape == (100, 20)
    assert (batch["inputs"].min(), batch["inputs"].max()) == (0, 49)
    batch = take(synthetic("classification"), np.arange(400))
    assert sorted(set(batch["targets"].tolist())) == [0, 1, 2, 3, 4]


def test_what_comes_next_can_be_copied_from_what_was() -> None:
    batch = take(synthetic("next_token"), np.arange(20))
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert torch.equal(batch["targets"][:, 7:], batch["targets"][:, :-7])


def test_a_linear_model_solves_the_regression() -> None:
    batch = take(synthetic("regression"), np.arange(400))
    x = batch["inputs"].flatten(1)
    residual = x @ torch.linalg.lstsq(x, batch["targets"]).solution - batch["targets"]
    assert residual.abs().max() < 1e-4


@pytest.mark.parametrize("task", TASKS)
def test_held_out_samples_are_others_of_the_same_kind(task: str) -> None:
    source = synthetic(task)
    heldout = source.holdout()
    assert heldout is not None
    assert (len(source), len(heldout)) == (400, 40)
    seen = {tuple(row) for row in take(source, np.arange(400))["inputs"].flatten(1).tolist()}
    assert not seen & {tuple(row) for row in take(heldout, np.arange(40))["inputs"].flatten(1).tolist()}
    assert heldout.holdout() is None
    assert heldout.fingerprint != source.fingerprint


@pytest.mark.parametrize("task", TASKS)
def test_another_seed_is_other_data(task: str) -> None:
    one = take(synthetic(task, seed=0), np.arange(400))["inputs"].flatten(1)
    for seed in (1, 7, 12):
        other = take(synthetic(task, seed=seed), np.arange(400))["inputs"].flatten(1)
        shared = {tuple(row) for row in one.tolist()} & {tuple(row) for row in other.tolist()}
        assert not shared, f"seed={seed} shows samples of seed=0 again"


def test_facts_are_what_a_model_needs() -> None:
    assert synthetic("next_token").facts == {"vocab": 50}
    assert synthetic("regression").facts == {"inputs": [3, 4], "outputs": 5}
