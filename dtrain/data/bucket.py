"""Length bucketing: samples of like length share a batch, so that less of it is padding.

    data=chat data.path=chats.jsonl data.tokenizer=<...> data.padding=longest data.bucket=50
    data=jsonl data.path=rows.jsonl data.inputs=input_ids data.targets=labels data.pad=0 data.bucket=50

The order of a pass is cut into windows of `data.bucket` batches. In each the samples are sorted by length and dealt out
to its batches, which come in a seeded order, so that long ones have no place of their own. The sample of a position
depends on the position, the lengths, the batch and the seed alone: it is the same on every mesh, and after a stop.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from dtrain.data.order import Indices, _mix64, permute

Order = Callable[[Indices], tuple[Indices, Indices]]
"""Positions of a run -> (sample, epoch)."""
KNOWN = 2
"""Windows that are kept: a batch may lie in two."""


@runtime_checkable
class Bucketed(Protocol):
    """A source of samples of different lengths."""

    @property
    def bucket(self) -> int | None:
        """The batches among which samples are sorted; None: they are not."""
        ...

    def sizes(self, index: Indices) -> Indices:
        """The lengths of samples without padding."""
        ...

    def __len__(self) -> int: ...


class Buckets:
    """The order of samples that are sorted. `order`: that of `source`, which is then rearranged; `batch`: the samples
    of a step on all ranks.
    """

    def __init__(self, source: Bucketed, order: Order, *, batch: int, seed: int) -> None:
        assert source.bucket is not None
        self._source, self._order, self._batch, self._seed = source, order, batch, seed
        self.batches, self._size = source.bucket, batch * source.bucket
        self._window = lru_cache(KNOWN)(self._sorted)

    def __call__(self, positions: Indices) -> tuple[Indices, Indices]:
        """(sample, epoch) of each position."""
        index, epochs = np.empty_like(positions), np.empty_like(positions)
        for begin, here in self._windows(positions):
            samples, passes = self._window(begin)
            index[here], epochs[here] = samples[positions[here] - begin], passes[positions[here] - begin]
        return index, epochs

    def padding(self, microbatch: int) -> tuple[float, float]:
        """(the part of the first window that is padding, that without buckets), if so many samples share a length."""
        plain, _ = self._order(np.arange(len(self._window(0)[0])))
        sizes = [self._source.sizes(index) for index in (self._window(0)[0], plain)]
        return _padding(sizes[0], microbatch), _padding(sizes[1], microbatch)

    def _windows(self, positions: Indices) -> Iterator[tuple[int, Indices]]:
        """(the first position of a window, which positions are in it); none goes on in the next pass."""
        length = len(self._source)
        begins = positions - positions % length % self._size
        for begin in np.unique(begins).tolist():
            yield begin, np.flatnonzero(begins == begin)

    def _sorted(self, begin: int) -> tuple[Indices, Indices]:
        """(sample, epoch) of each position of the window that begins at this one."""
        length = len(self._source)
        places = np.arange(begin, min(begin + self._size, (begin // length + 1) * length))
        index, epochs = self._order(places)
        longest = np.argsort(-self._source.sizes(index), kind="stable")
        batch = places // self._batch - begin // self._batch
        turn = permute(np.arange(batch[-1] + 1), n=int(batch[-1]) + 1, key=_mix64(_mix64(self._seed) ^ begin))
        dealt = np.empty_like(longest)
        dealt[np.argsort(turn[batch], kind="stable")] = longest
        return index[dealt], epochs[dealt]


def _padding(sizes: Indices, microbatch: int) -> float:
    parts = np.split(sizes, np.arange(microbatch, len(sizes), microbatch))
    padded = sum(int(part.max()) * len(part) for part in parts)
    return 1 - int(sizes.sum()) / max(1, padded)
