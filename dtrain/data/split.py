"""Which samples of a dataset are trained on and which are held out, and the order of the former."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dtrain.data.order import Indices, _mix64, permute, samples

WINDOW = 1 << 25
"""Bytes of the blocks whose rows are shuffled together."""


class Split(Protocol):
    """A part of a dataset."""

    def __len__(self) -> int: ...

    def original(self, index: Indices) -> Indices:
        """Indices in the dataset of samples of this part."""
        ...

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        """(sample of this part, epoch) of each position of a run."""
        ...

    def rest(self) -> "Split | None":
        """The part that is held out; None if nothing is."""
        ...


@dataclass(frozen=True)
class Scattered:
    """Samples `start` to `stop` of a fixed permutation, because datasets tend to be sorted by class."""

    whole: int
    start: int
    stop: int

    @classmethod
    def of(cls, whole: int, part: float) -> "Scattered":
        """At least one sample is held out, if `part` is not 0, and one is not."""
        return cls(whole, 0, whole - (min(max(1, round(whole * part)), whole - 1) if part > 0 else 0))

    def __len__(self) -> int:
        return self.stop - self.start

    def original(self, index: Indices) -> Indices:
        return permute(index + self.start, n=self.whole, key=1)

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        return samples(positions, n=len(self), seed=seed)

    def rest(self) -> "Scattered | None":
        return replace(self, start=self.stop, stop=self.whole) if self.stop < self.whole else None


@dataclass(frozen=True)
class Leading:
    """Samples `start` to `stop` of a dataset as they come; those behind them are held out. `weights`: bytes of the
    blocks that are read together, if samples are not read alone.
    """

    whole: int
    start: int
    stop: int
    weights: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start

    def original(self, index: Indices) -> Indices:
        return index + self.start

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        return samples(positions, n=len(self), seed=seed)

    def rest(self) -> "Leading | None":
        return replace(self, start=self.stop, stop=self.whole) if self.stop < self.whole else None


@dataclass(frozen=True)
class Blocks:
    """Rows of blocks that are read whole, such as the row groups of Parquet. In a pass the blocks come in a seeded
    order, and the rows of neighbours, of WINDOW bytes together, are shuffled, so that few blocks are read at a time;
    the row of a position depends on sizes and seed alone. Of each block the same part is held out.
    """

    sizes: tuple[int, ...]
    weights: tuple[int, ...]
    """Bytes of each block."""
    part: float
    held: bool = False
    first: NDArray[np.int64] = field(init=False, compare=False)
    mine: NDArray[np.int64] = field(init=False, compare=False)
    """The first row of each block, and its rows in this part."""

    def __post_init__(self) -> None:
        ends = np.cumsum(np.array([0, *self.sizes], np.int64))
        held = min(max(1, round(int(ends[-1]) * self.part)), int(ends[-1]) - 1) if self.part > 0 else 0
        kept = np.diff(ends * held // max(1, int(ends[-1])))
        object.__setattr__(self, "first", ends[:-1])
        object.__setattr__(self, "mine", kept if self.held else np.diff(ends) - kept)

    def __len__(self) -> int:
        return int(self.mine.sum())

    def original(self, index: Indices) -> Indices:
        ends = np.cumsum(self.mine)
        owner = np.searchsorted(ends, index, side="right")
        place = index - (ends - self.mine)[owner]
        rows = np.empty_like(index)
        for block in np.unique(owner).tolist():
            here, size = owner == block, self.sizes[block]
            among = place[here] + (size - self.mine[block] if self.held else 0)
            rows[here] = self.first[block] + permute(among, n=size, key=_mix64(block))
        return rows

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        epochs, index = positions // len(self), np.empty_like(positions)
        for epoch in set(epochs.ravel().tolist()):
            here = epochs == epoch
            index[here] = self._walk(positions[here] % len(self), _mix64(_mix64(seed) ^ epoch))
        return index, epochs

    def after(self, position: int, *, seed: int) -> Indices:
        """The blocks whose rows are shuffled together after those of a position, in this pass or the next."""
        epoch, offset = divmod(position, len(self))
        blocks, ends, windows = _route(self, _mix64(_mix64(seed) ^ epoch))
        number = int(np.searchsorted(windows, offset, side="right")) + 1
        if number == len(windows):
            number = 0
            blocks, ends, windows = _route(self, _mix64(_mix64(seed) ^ (epoch + 1)))
        begin = int(windows[number - 1]) if number else 0
        there: Indices = blocks[(ends > begin) & (ends <= windows[number])]
        return there

    def rest(self) -> "Blocks | None":
        other = replace(self, held=True)
        return other if not self.held and len(other) else None

    def _walk(self, offsets: Indices, key: int) -> Indices:
        """Samples at these offsets of the pass with this key."""
        blocks, ends, windows = _route(self, key)
        number = np.searchsorted(windows, offsets, side="right")
        begins = np.concatenate([[0], windows])[number]
        places = np.empty_like(offsets)
        for window in np.unique(number).tolist():
            here = number == window
            begin = int(begins[here][0])
            among = permute(offsets[here] - begin, n=int(windows[window]) - begin, key=_mix64(key + window + 1))
            places[here] = begin + among
        turn = np.searchsorted(ends, places, side="right")
        block = blocks[turn]
        first = np.cumsum(self.mine) - self.mine
        return first[block] + places - (ends[turn] - self.mine[block])


@lru_cache(4)
def _route(split: Blocks, key: int) -> tuple[Indices, Indices, Indices]:
    """The blocks in the order of a pass, the offset at which each ends, and at which each window ends."""
    blocks = permute(np.arange(len(split.sizes)), n=len(split.sizes), key=key)
    ends = np.cumsum(split.mine[blocks])
    windows, bytes_ = list[int](), 0
    for turn, block in enumerate(blocks.tolist()):
        if bytes_ and bytes_ + split.weights[block] > WINDOW:
            windows.append(int(ends[turn - 1]))
            bytes_ = 0
        bytes_ += split.weights[block]
    return blocks, ends, np.unique([*windows, int(ends[-1])])
