"""Length bucketing: the same samples in another order, which is the same everywhere, with less padding."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
from data.packs import documents, jsonl, written
from data.test_stream import OneRank
from pool import resident
from small import PARTS, STRATEGIES, few_steps

from dtrain.build import build
from dtrain.data.bucket import Buckets
from dtrain.data.order import samples
from dtrain.data.stream import Stream
from dtrain.errors import WordsError
from dtrain.files import rowfile
from dtrain.planned import BatchShape

BATCH, BATCHES = 4, 5


class Lengths:
    """Samples of known lengths."""

    def __init__(self, lengths: Any, bucket: int = BATCHES) -> None:
        self.lengths, self.bucket = np.array(lengths), bucket

    def __len__(self) -> int:
        return len(self.lengths)

    def sizes(self, index: np.ndarray) -> np.ndarray:
        return self.lengths[index]


def buckets(count: int = 103, *, seed: int = 1, **given: Any) -> Buckets:
    source = Lengths(np.random.default_rng(0).integers(1, 100, count), **given)
    return Buckets(source, partial(samples, n=count, seed=seed), batch=BATCH, seed=seed)


@pytest.mark.parametrize("count", [103, 100, 20, 7, 1])
def test_each_pass_has_each_sample_once(count: int) -> None:
    index, epoch = buckets(count)(np.arange(3 * count))
    for turn in range(3):
        assert sorted(index[epoch == turn].tolist()) == list(range(count))
    assert epoch.tolist() == np.repeat(np.arange(3), count).tolist()


def test_a_window_is_that_of_the_plain_order_and_its_batches_are_of_like_length() -> None:
    made, size = buckets(), BATCH * BATCHES
    plain, _ = samples(np.arange(103), n=103, seed=1)
    index, _ = made(np.arange(103))
    lengths = np.random.default_rng(0).integers(1, 100, 103)
    firsts = []
    for begin in range(0, 100, size):
        here = index[begin : begin + size]
        assert sorted(here) == sorted(plain[begin : begin + size])
        batches = lengths[here].reshape(BATCHES, BATCH)
        ranges = sorted((each.min(), each.max()) for each in batches)
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
        firsts.append(int(np.argmax(batches.max(1))))
    assert len({*firsts}) > 1, "the longest batch is not always at the same place"


def test_the_order_of_any_positions_is_that_of_all() -> None:
    whole, epochs = buckets()(np.arange(400))
    some = np.random.default_rng(3).permutation(400)[:150]
    index, epoch = buckets()(some)
    assert index.tolist() == whole[some].tolist() and epoch.tolist() == epochs[some].tolist()
    assert whole.tolist() != buckets(seed=2)(np.arange(400))[0].tolist()


@pytest.mark.campaign("documents")
def test_there_is_no_more_padding_than_transformers_has(tmp_path: Path) -> None:
    code = """
import json, numpy as np, torch
from transformers.trainer_pt_utils import get_length_grouped_indices
lengths = np.random.default_rng(0).lognormal(4, 0.8, 8000).astype(int).tolist()
orders = [
    get_length_grouped_indices(lengths, 16, mega_batch_mult=50, generator=torch.Generator().manual_seed(seed))
    for seed in range(8)
]
print(json.dumps([lengths, orders]))
"""
    done = commands.python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lengths, orders = json.loads(done.stdout)

    def padding(order: Any) -> float:
        rows = np.array(lengths)[order].reshape(-1, 16)
        return float(1 - rows.sum() / (rows.max(1) * 16).sum())

    made = [Buckets(Lengths(lengths, 50), partial(samples, n=8000, seed=n), batch=16, seed=n) for n in range(8)]
    ours, theirs = ([padding(order) for order in each] for each in ([one(np.arange(8000))[0] for one in made], orders))
    assert np.mean(ours) <= np.mean(theirs) + np.std(theirs) < 0.12, (ours, theirs)


def source(path: str, **given: Any) -> Any:
    return build(jsonl(path, **{"packing": "none", "sequence": None, "bucket": 3, "holdout": 0.1} | given))


def stream(path: str, shape: BatchShape, rank: int = 0, **given: Any) -> Stream:
    mesh: Any = OneRank(shape.data, rank)
    return Stream(source(path, **given), batch=shape, mesh=mesh, seed=5, count=lambda batch: 1)


def rows_of(parts: Any) -> list[list[int]]:
    """The rows of microbatches, without padding, of which at least one row of each has none."""
    rows = []
    for part in parts:
        assert (part["inputs"][:, -1] != 0).any()
        rows += [[token for token in row if token] for row in part["inputs"].tolist()]
    return rows


@pytest.fixture
def path(tmp_path: Path) -> str:
    return written(tmp_path / "a.jsonl", documents(50))


def test_a_step_is_the_same_on_any_ranks_and_after_a_stop(path: str) -> None:
    alone = stream(path, BatchShape(12, 12, 1, 1))
    steps, state = [], {}
    for number in range(9):
        state = alone.state_dict() if number == 5 else state
        steps.append(rows_of(next(alone).microbatches))
    alone.close()
    assert "data.bucket=3: " in alone.notes[-1] and alone.notes[-1].endswith("without it")
    for shape in (BatchShape(12, 6, 2, 1), BatchShape(12, 2, 3, 2)):
        shares = [stream(path, shape, rank) for rank in range(shape.data)]
        for step in steps:
            assert [row for share in shares for row in rows_of(next(share).microbatches)] == step
        again = [stream(path, shape, rank) for rank in range(shape.data)]
        for share in again:
            share.load_state_dict(state)
        for step in steps[5:]:
            assert [row for share in again for row in rows_of(next(share).microbatches)] == step
        for share in (*shares, *again):
            share.close()
    other = stream(path, BatchShape(12, 12, 1, 1), bucket=2)
    with pytest.raises(WordsError, match="other data \\(bucket 3, here 2\\)"):
        other.load_state_dict(state)
    other.close()


@pytest.mark.parametrize(
    "degrees", [{"dp_replicate": 2}, pytest.param({"dp_shard": 2}, marks=pytest.mark.campaign("documents"))]
)
def test_losses_are_the_same_on_each_mesh(degrees: dict[str, int], path: str) -> None:
    def losses(degrees: dict[str, int], strategy: str) -> Any:
        data = jsonl(path, packing="none", sequence=None, bucket=3)
        part = {"strategy": STRATEGIES[strategy]} if degrees else {}
        work = partial(few_steps, {**PARTS, **part, "data": data}, degrees, size=4, steps=4, microbatch=2)
        return resident(2 if degrees else 1, work)[0]["losses"]

    expected = losses({}, "ddp")
    assert losses(degrees, "fsdp" if "dp_shard" in degrees else "ddp") == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("rows", "why"),
    [([[1, 2, 3]] * 8, "all rows of input_ids have the length 3"), ([1, 2, 3], "input_ids hold no lists")],
)
def test_rows_of_one_length_are_refused_before_the_launch(rows: Any, why: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", rows)
    data = jsonl(path, packing="none", sequence=None, bucket=3)
    reader = rowfile.reader_of(data, path, "jsonl")
    assert why in rowfile.problem(reader, [path], data, trained=None)
