"""The walk: one step is the same samples on every mesh, and one integer says where it is."""

from typing import Any

import numpy as np
import pytest
import torch
from small import on_mesh
from torch.utils.data import TensorDataset

from dtrain.data.dataset import Dataset
from dtrain.data.order import samples
from dtrain.data.stream import Stream
from dtrain.data.synthetic import Synthetic
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.planned import BatchShape

IGNORED = -100


class OneRank:
    """What a Stream asks of a mesh, for one process of a world that is not there."""

    def __init__(self, data_ranks: int = 1, data_rank: int = 0) -> None:
        self.data_ranks, self.batch_ranks, self.data_rank, self.device = (
            data_ranks,
            data_ranks,
            data_rank,
            torch.device("cpu"),
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Numbers:
    """Sample i is the number i; `loading` chooses between a thread and the rank itself."""

    dense, fingerprint = True, "numbers"

    def __init__(self, length: int, *, loading: str = "thread") -> None:
        self.length, self.loading = length, loading

    def __len__(self) -> int:
        return self.length

    def take(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return {"inputs": torch.from_numpy(index), "targets": torch.from_numpy(index * 1000 + epoch)}


def stream(source: Any, shape: BatchShape, *, rank: int = 0, seed: int = 5, **end: float) -> Stream:
    mesh: Any = OneRank(shape.data, rank)
    return Stream(source, batch=shape, mesh=mesh, seed=seed, count=lambda batch: len(batch["targets"]), **end)


def walk(made: Stream, steps: int) -> list[list[int]]:
    """The samples of each of the next steps."""
    values = [[int(value) for part in next(made).microbatches for value in part["inputs"]] for _ in range(steps)]
    made.close()
    return values


SHAPES = [
    BatchShape(12, 12, 1, 1),
    BatchShape(12, 4, 1, 3),
    BatchShape(12, 6, 2, 1),
    BatchShape(12, 3, 2, 2),
    BatchShape(12, 1, 4, 3),
]


@pytest.mark.parametrize("loading", ["thread", "block", "step"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_the_same_samples_however_it_is_shared_out(shape: BatchShape, loading: str) -> None:
    expected, _ = samples(np.arange(12 * 9), n=50, seed=5)
    shares = [walk(stream(Numbers(50, loading=loading), shape, rank=rank), 9) for rank in range(shape.data)]
    for step in range(9):  # 108 positions of 50 samples: the walk passes two epochs, in the middle of a step
        together = [sample for share in shares for sample in share[step]]
        assert together == expected[step * 12 : (step + 1) * 12].tolist()


def test_microbatches_are_as_large_as_said() -> None:
    made = stream(Numbers(50), BatchShape(12, 4, 1, 3))
    share = next(made)
    made.close()
    assert [len(part["inputs"]) for part in share.microbatches] == [4, 4, 4]
    assert share.count == 12


def test_the_epoch_goes_with_the_sample() -> None:
    made = stream(Numbers(10), BatchShape(8, 8, 1, 1))
    epochs = [value % 1000 for _ in range(4) for value in next(made).microbatches[0]["targets"].tolist()]
    made.close()
    assert epochs == [position // 10 for position in range(32)]


@pytest.mark.parametrize("loading", ["thread", "block", "step"])
@pytest.mark.parametrize("steps", [1, 7, 64, 65, 130])
def test_the_walk_goes_on_where_it_was_left_on_any_world(steps: int, loading: str) -> None:
    """A checkpoint of one rank, taken at any step, also in the middle of a block that was read ahead."""
    before = stream(Numbers(50, loading=loading), BatchShape(12, 12, 1, 1))
    expected = walk(stream(Numbers(50), BatchShape(12, 12, 1, 1)), steps + 3)[steps:]
    walk(before, steps)
    state = before.state_dict()
    assert state["seen"] == 12 * steps
    shares = []
    for rank in range(2):
        after = stream(Numbers(50, loading=loading), BatchShape(12, 3, 2, 2), rank=rank)
        next(after)
        after.load_state_dict(state)
        shares.append(walk(after, 3))
    assert [a + b for a, b in zip(*shares, strict=True)] == expected


@pytest.mark.parametrize("loading", ["thread", "block", "step"])
@pytest.mark.parametrize("steps", [0, 3, 70])
def test_batches_to_pass_over_are_left_out_when_they_come(steps: int, loading: str) -> None:
    """Also after another start, and however far it had read ahead; those that have gone by are forgotten."""
    expected = walk(stream(Numbers(50), SHAPES[0]), steps + 6)[steps:]
    made = stream(Numbers(50, loading=loading), SHAPES[0])
    for _ in range(steps):
        next(made)
    made.skip([12 * (steps + 1), 12 * (steps + 2), 12 * (steps + 4)], seen=12 * steps)
    assert [int(value) for value in next(made).microbatches[0]["inputs"]] == expected[0]
    assert (made.first, made.seen, made.samples(made.first)) == (12 * steps, 12 * (steps + 1), expected[0])
    after = stream(Numbers(50, loading=loading), SHAPES[0])
    after.load_state_dict(made.state_dict())
    assert walk(after, 2) == walk(made, 2) == [expected[3], expected[5]]
    assert after.seen == 12 * (steps + 6) and after.state_dict()["passed_over"] == []
    again = stream(Numbers(50), SHAPES[0])
    again.load_state_dict(after.state_dict())
    made.load_state_dict(made.state_dict())  # a rewind, in the process that passed over them
    again.close()
    assert [one.state_dict()["passed"] for one in (made, after, again)] == [3, 3, 3], (
        "seen: 3 steps more, and 3 batches"
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: stream(Numbers(51), SHAPES[0]), r"other data \(samples"),
        (lambda: stream(Numbers(50), SHAPES[0], seed=6), r"of a run with another seed\. Type seed=<that of its run>"),
        (lambda: stream(Numbers(50), BatchShape(10, 10, 1, 1)), r"other data \(batch"),
        (lambda: stream(Synthetic("regression", [3], 2, 0, 0, 50), SHAPES[0]), r"other data \(fingerprint"),
    ],
)
def test_other_data_is_refused_with_what_to_type(other: Any, why: str) -> None:
    made = other()
    state = stream(Numbers(50, loading="step"), SHAPES[0]).state_dict()
    with pytest.raises(WordsError, match=rf"{why}.*out=<another place>"):
        made.load_state_dict(state)
    made.close()


def test_a_batch_larger_than_the_data_is_several_passes() -> None:
    (step,) = walk(stream(Numbers(5), BatchShape(12, 12, 1, 1)), 1)
    assert sorted(step[:5]) == sorted(step[5:10]) == [0, 1, 2, 3, 4]


def test_no_sample_at_all_is_refused() -> None:
    with pytest.raises(WordsError, match=r"Type a smaller data\.holdout"):
        stream(Numbers(0), SHAPES[0])


def uneven() -> Dataset:
    """Rows of eight targets, of which row i counts i % 8."""
    targets = torch.where(torch.arange(8)[None] < torch.arange(64)[:, None] % 8, 1, IGNORED)
    return Dataset(TensorDataset(torch.arange(64)[:, None], targets), holdout=0)


def counted(batch: Any) -> int:
    return int((batch["targets"] != IGNORED).sum())


def counts(mesh: Mesh) -> list[int]:
    made = Stream(uneven(), batch=BatchShape(16, 4, 2, 2), mesh=mesh, seed=1, count=counted)
    sizes = [next(made).count for _ in range(6)]
    made.close()
    return sizes


def test_targets_that_count_are_counted_over_the_whole_world() -> None:
    whole = Stream(uneven(), batch=BatchShape(16, 16, 1, 1), mesh=OneRank(), seed=1, count=counted)  # type: ignore[arg-type]
    expected = [next(whole).count for _ in range(6)]
    whole.close()
    assert len(set(expected)) > 1, "the counts must differ for the test to mean something"
    assert on_mesh(counts, dp_replicate=2) == [expected, expected]


def test_a_source_that_counts_all_targets_is_counted_without_asking_the_others() -> None:
    made = Stream(
        Numbers(50),
        batch=BatchShape(12, 3, 2, 2),
        mesh=OneRank(2, 1),
        seed=1,
        count=lambda batch: len(batch["targets"]),
    )  # type: ignore[arg-type]
    assert next(made).count == 12
    made.close()


class Counted(Numbers):
    """Notes how many samples each call of `take` asks for."""

    def __init__(self, length: int, *, loading: str) -> None:
        super().__init__(length, loading=loading)
        self.taken: list[int] = []

    def take(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        self.taken.append(len(index))
        return super().take(index, epoch)


@pytest.mark.parametrize("loading", ["thread", "block"])
def test_the_first_step_waits_for_its_own_samples_alone(loading: str) -> None:
    source = Counted(1000, loading=loading)
    made = stream(source, BatchShape(12, 12, 1, 1))
    looked = len(source.taken)
    next(made)
    assert source.taken[looked] == 12
    walk(made, 40)
    assert max(source.taken) >= 12 * 16  # later ones come in larger blocks


@pytest.mark.parametrize("skipped", [(), (24, 36)])
def test_nothing_is_read_beyond_the_end_of_a_run(skipped: tuple[int, ...]) -> None:
    source = Counted(1000, loading="thread")
    made = stream(source, BatchShape(12, 12, 1, 1), end=12 * 20)
    made.skip(skipped, seen=0)
    looked = len(source.taken)
    whole, _ = samples(np.arange(12 * 22), n=1000, seed=5)
    steps = [whole[first : first + 12].tolist() for first in range(0, 12 * 22, 12) if first not in skipped][:20]
    assert walk(made, 20) == steps
    assert sum(source.taken[looked:]) == 12 * 20


class Torn(Numbers):
    """Sample `bad` cannot be read, and only some targets count."""

    dense, bad = False, -1

    def take(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        if self.bad in index:
            raise ValueError(f"sample {self.bad} is torn")
        return super().take(index, epoch)


@pytest.mark.parametrize("loading", ["thread", "block", "step"])
@pytest.mark.parametrize("bad_step", [0, 4, 6, 12])
def test_a_sample_that_cannot_be_read_fails_its_own_step(bad_step: int, loading: str) -> None:
    shape = BatchShape(size=4, data=1, microbatch=2, accumulate=2)
    whole, torn = stream(Numbers(64), shape), Torn(64, loading=loading)
    expected = walk(whole, bad_step + 1)
    made = stream(torn, shape)
    blocks, sizes = made._firsts, list[int]()
    made._firsts = lambda seen: sizes.append(len(firsts := blocks(seen))) or firsts  # type: ignore[func-returns-value, method-assign]
    summed = list[int]()
    made._mesh.sum = lambda counts: summed.append(len(counts)) or counts  # type: ignore[func-returns-value, method-assign]
    torn.bad = expected[bad_step][-1]
    for step in range(bad_step):
        share = next(made)
        assert [int(value) for part in share.microbatches for value in part["inputs"]] == expected[step]
        assert (share.count, made.first) == (4, 4 * step)
    assert made.seen == 4 * bad_step
    with pytest.raises(ValueError, match="is torn"):
        next(made)
    made.close()
    assert summed == sizes[: len(summed)], "the ranks count the same steps together, whoever fails"
