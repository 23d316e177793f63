"""Whole documents of a corpus as rows that are packed: each by itself, without the one that follows it in the corpus.

data=text data.path=rows.jsonl data.column=text data.packing=pack
data=tokens data.path=<what dtrain tokenize wrote> data.packing=pack
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data import IGNORE, Indices
from dtrain.data.split import Leading

Corpus = Sequence[tuple[Any, NDArray[np.int64]]]
"""Arrays of tokens, and where in each its documents end."""


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus, those of `kept` behind them; held out are these, or else the last ones with a `part`
    of all tokens. `stretch`: tokens that are read together, with `weight` bytes, if they are not read alone; `check` is
    called with arrays of tokens.
    """

    of: Corpus
    kept: Corpus
    holdout: float
    vocab: int
    fingerprint: str
    stretch: int = 0
    weight: int = 0
    check: Callable[[Sequence[NDArray[Any]]], None] = lambda tokens: None

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab": self.vocab}

    @cached_property
    def lengths(self) -> Indices:
        """The tokens of each document."""
        return np.concatenate([np.diff(ends, prepend=0) for _, ends in (*self.of, *self.kept)])

    @cached_property
    def part(self) -> Leading:
        """The documents that are trained on: one at least is held out if any are, and one is not."""
        count = sum(len(ends) for _, ends in self.of)
        stop = count
        if not self.kept and self.holdout > 0 and count > 1:
            ends = np.cumsum(self.lengths)
            rest = int(ends[-1]) - round(int(ends[-1]) * self.holdout)
            stop = min(max(1, int(np.searchsorted(ends, rest, side="right"))), count - 1)
        weights = (self.weight,) * len(self.ends) if self.stretch else ()
        return Leading(len(self.lengths), 0, stop, weights)

    @cached_property
    def ends(self) -> Indices:
        """The number of documents up to the end of each block: a stretch of an array, or all."""
        blocks = list[int]()
        for tokens, ends in (*self.of, *self.kept):
            begins, stretch = np.diff(ends, prepend=0), self.stretch or max(1, len(tokens))
            begins = ends - begins
            blocks += np.bincount(begins // stretch, minlength=-(-len(tokens) // stretch)).tolist()
        return np.cumsum(blocks)

    def lengths_of(self, split: Any) -> Indices:
        lengths: Indices = self.lengths[split.original(np.arange(len(split)))]
        return lengths

    def tokens(self, index: Indices) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(tokens, the token after each) of documents; the last one has no target."""
        arrays = [*self.of, *self.kept]
        firsts = np.cumsum([0, *(len(ends) for _, ends in arrays)])
        owner = np.searchsorted(firsts, index, side="right") - 1
        for number, row in zip(owner.tolist(), (index - firsts[owner]).tolist(), strict=True):
            array, ends = arrays[number]
            begin = int(ends[row - 1]) if row else 0
            tokens = np.asarray(array[np.arange(begin, int(ends[row]))]).astype(np.int64)
            self.check([tokens])
            yield tokens, np.append(tokens[1:], IGNORE)

    def as_of(self, fingerprint: str) -> list[str] | None:
        return [] if fingerprint == self.fingerprint else None
