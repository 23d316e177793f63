"""Arrays that loading processes share with their rank: the same in any order of questions, whatever their sizes."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from data.test_stream import OneRank

from dtrain.data import shared
from dtrain.data.stream import Stream
from dtrain.data.workers import Workers
from dtrain.planned import BatchShape

COUNT = 40_000
"""Numbers of a sample: a batch of two does not go through the pipe."""


def rows(index: Any, epoch: Any) -> Any:
    """Of each sample its number, `COUNT` times, of every fifth in memory of its own; and a mapping of small arrays."""
    if index[0] == 99:
        raise ValueError("planned")
    make = shared.empty if index[0] % 5 else np.empty
    out = make((len(index), COUNT + int(index[0])), np.float32)
    out[...] = index[:, None]
    return torch.from_numpy(out), {"epoch": torch.from_numpy(epoch)}


def join(parts: Any) -> Any:
    return [
        (part[0].min(1).tolist(), part[0].max(1).tolist(), part[0].shape[1], part[1]["epoch"].tolist())
        for part in parts
    ]


def there(first: int) -> Any:
    return [([n, n + 1], [n, n + 1], COUNT + n, [7, 7]) for n in (first, first + 2)]


@pytest.fixture(scope="module")
def workers() -> Any:
    made = Workers(rows, 2)
    yield made
    made.close()


def ask(workers: Workers, first: int) -> Any:
    return workers.ask(np.arange(first, first + 4), np.full(4, 7), join)


def test_answers_are_right_in_whatever_order_they_are_waited_for(workers: Workers) -> None:
    answers = [(first, ask(workers, first)) for first in range(9)]  # more than there are buffers
    for number in (4, 8, 0, 4):
        first, answer = answers[number]
        assert answer() == there(first)
    threads_saw = list[Any]()
    several = [(first, ask(workers, first)) for first in (30, 3)]
    threads = [threading.Thread(target=lambda a=a, f=f: threads_saw.append(a() == there(f))) for f, a in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threads_saw == [True, True]


def test_an_error_is_of_its_own_question_alone(workers: Workers) -> None:
    good, bad, after = ask(workers, 1), ask(workers, 99), ask(workers, 2)
    assert after() == there(2) and good() == there(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="planned"):
            bad()


class Slow:
    """A source whose samples are asked for; the block that `take` is called for is read here."""

    loading, dense, facts, fingerprint = "thread", True, dict[str, Any](), "slow"

    def __init__(self) -> None:
        self.asked = list[int]()

    def __len__(self) -> int:
        return 1000

    def take(self, index: Any, epoch: Any) -> Any:
        return {"inputs": torch.zeros(len(index), 1 << 20), "targets": torch.from_numpy(index)}

    def ask(self, index: Any, epoch: Any) -> Any:
        self.asked.append(len(index))
        return lambda: self.take(index, epoch)

    def holdout(self) -> None:
        return None


def test_processes_have_two_blocks_at_a_time() -> None:
    source = Slow()
    stream = Stream(source, batch=BatchShape(2, 2, 1, 1), mesh=OneRank(), seed=0, count=len)  # type: ignore[arg-type]
    for step in range(1, 4):
        next(stream)
        assert len(source.asked) == step + 2
    stream.close()
