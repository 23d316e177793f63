"""Several sources as one: which source gives the sample of a position follows from the position alone, and each source
goes through its own order and its own epochs.

    data=mixture data.of='{a: {data: text, path: web}, b: {data: text, path: code}}' data.weights='{a: 0.7, b: 0.3}'

Up to any position each source has given its share of the samples, to less than one sample: a period of the pattern is
the chairman assignment of Tijdeman (Discrete Mathematics 32, 1980). The pattern is a file format, as the order is.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data import Batch, Growing, Indices, Loading, Noted, Ordered, Padding, Source, Typed, whole
from dtrain.data.collate import tree
from dtrain.data.dataset import Dataset
from dtrain.data.order import _mix64, samples
from dtrain.errors import WordsError, note_source

PERIOD = 100_000
"""The longest period: weights are rounded to parts of it."""
SLOWER: Sequence[Loading] = ("thread", "block", "step")


class Joined:
    """A Source of the samples of several, one source after the other."""

    def __init__(self, of: Mapping[str, Source]) -> None:
        self.of = of
        self.dense = all(source.dense for source in of.values())
        self.loading: Loading = max((source.loading for source in of.values()), key=SLOWER.index)

    @property
    def ends(self) -> Indices:
        return np.cumsum([len(source) for source in self.of.values()])

    @property
    def facts(self) -> Mapping[str, Any]:
        """Those of the first source, but the most tokens or classes of all. Raises WordsError for inputs of other
        shapes.
        """
        each = {name: source.facts for name, source in self.of.items()}
        (first, facts), *others = each.items()
        for name, other in others:
            for key in ("inputs", "kind"):
                if facts.get(key) != other.get(key):
                    raise WordsError(
                        f"data.of: the inputs of {first} are {facts.get(key)}, those of {name} {other.get(key)}. A "
                        "model takes inputs of one shape and type."
                    )
        most = {
            key: max(every) for key in ("vocab", "outputs") if (every := [f[key] for f in each.values() if key in f])
        }
        return {**facts, **most}

    @property
    def fingerprint(self) -> str:
        return json.dumps({name: source.fingerprint for name, source in self.of.items()})

    @property
    def notes(self) -> list[str]:
        noted = {name: source for name, source in self.of.items() if isinstance(source, Noted)}
        return [f"data.of.{name}: {note}" for name, source in noted.items() for note in source.notes]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def whole(self) -> "Joined":
        return Joined({name: whole(source) for name, source in self.of.items()})

    def with_mask(self, name: str) -> None:
        """Have the sources that pad rows give an attention_mask from now on."""
        for source in self.of.values():
            if isinstance(source, Padding):
                source.with_mask(name)

    def fractions(self) -> frozenset[str]:
        first = next(iter(self.of.values()))
        return first.fractions() if isinstance(first, Typed) else frozenset()

    def with_fractions(self, names: frozenset[str]) -> None:
        for source in self.of.values():
            if isinstance(source, Typed):
                source.with_fractions(names)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        owner, sources = np.searchsorted(self.ends, index, side="right"), [*self.of.values()]
        begins = np.concatenate([[0], self.ends])
        parts, places = list[Batch](), list[NDArray[Any]]()
        for number in np.unique(owner).tolist():
            here = np.flatnonzero(owner == number)
            try:
                parts.append(sources[number].take(index[here] - begins[number], epoch[here]))
            except Exception as error:
                note_source(error, f"data.of.{[*self.of][number]}")
                raise
            places.append(here)
        if len(parts) == 1:
            return parts[0]
        if any("target_mask" in part for part in parts):
            parts = [{"target_mask": torch.ones(part["targets"].shape[:2], dtype=torch.bool), **part} for part in parts]
        back = np.argsort(np.concatenate(places))
        try:
            merged: Batch = tree(lambda *rows: _merged(rows, back), *parts)
        except (KeyError, TypeError, AttributeError):
            keys = [sorted(part["inputs"]) if isinstance(part["inputs"], Mapping) else "one array" for part in parts]
            raise WordsError(f"data.of: the inputs of the sources differ: {keys}. Name the same for all.") from None
        return merged

    def holdout(self) -> Source | None:
        return None

    def encode(self, text: str) -> list[int]:
        """Of sources of text, which have one tokenizer."""
        source: Any = next(iter(self.of.values()))
        return list(source.encode(text))

    def decode(self, tokens: list[int]) -> str:
        source: Any = next(iter(self.of.values()))
        return str(source.decode(tokens))


class Mixture(Joined):
    """A Source that is ordered by its `weights`; all that is held out of the sources is held out. Raises WordsError for
    weights that are not of the sources.
    """

    def __init__(
        self, *, of: Mapping[str, Any], weights: Mapping[str, float], sequence: int | None = None,
        tokenizer: str | None = None,
    ) -> None:  # fmt: skip
        """`sequence` and `tokenizer` are those of the sources, for the plan."""
        if {*of} != {*weights} or not all(weight > 0 for weight in weights.values()):
            raise WordsError(f"data.weights={dict(weights)}: give each of {', '.join(of)} a weight above 0.")
        super().__init__({name: source if hasattr(source, "take") else Dataset(source) for name, source in of.items()})
        self._parts = counts([weights[name] for name in of])

    @property
    def fingerprint(self) -> str:
        return json.dumps({"of": {name: source.fingerprint for name, source in self.of.items()}, "parts": self._parts})

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        owner, before = pattern(tuple(self._parts))
        turn, place = np.divmod(positions, len(owner))
        mine, begins = owner[place], np.concatenate([[0], self.ends])
        index, epochs = np.empty_like(positions), np.empty_like(positions)
        for number, (name, source) in enumerate(self.of.items()):
            here = mine == number
            within = turn[here] * self._parts[number] + before[place[here]]
            sample, epochs[here] = _order(source)(within, seed=_mix64(seed ^ _number(name)))
            index[here] = sample + begins[number]
        return index, epochs

    def holdout(self) -> Joined | None:
        return self._heldout

    def as_of(self, fingerprint: str) -> list[str] | None:
        """Become the mixture with that fingerprint, if its sources have only grown since."""
        try:
            then = json.loads(fingerprint)
            known = {**then["of"]} if then["parts"] == self._parts else {}
        except (ValueError, TypeError, KeyError):
            return None
        told = list[str]()
        for name, source in self.of.items():
            sentences = source.as_of(str(known.get(name))) if isinstance(source, Growing) else None
            if known.get(name) != source.fingerprint:
                return None
            told += [f"data.of.{name}: {sentence}" for sentence in sentences or []]
        return told

    @cached_property
    def _heldout(self) -> Joined | None:
        kept = {name: held for name, source in self.of.items() if (held := source.holdout()) is not None}
        return Joined(kept) if kept else None


def counts(weights: Sequence[float]) -> list[int]:
    """The samples of each source in a period, which gives them their shares exactly, or of the longest period."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [each / sum(exact) for each in exact]
    period = int(np.lcm.reduce([each.denominator for each in shares], dtype=object))
    if period <= PERIOD:
        return [int(share * period) for share in shares]
    parts = [int(share * PERIOD) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda number: parts[number] - shares[number] * PERIOD)
    for number in by_rest[: PERIOD - sum(parts)]:
        parts[number] += 1
    return parts


@lru_cache(4)
def pattern(parts: tuple[int, ...]) -> tuple[Indices, Indices]:
    """Of each position of a period: the source that gives its sample, and how many that source gave before in it."""
    period, last = sum(parts), 2 * max(1, len(parts) - 1)
    owner, before, given = np.empty(period, np.int64), np.empty(period, np.int64), [0] * len(parts)
    for place in range(period):
        # the lead of each source is parts * (place + 1) / period - given, here in units of 1 / (period * last)
        leads = [(part * (place + 1) - period * done) * last for part, done in zip(parts, given, strict=True)]
        _, chosen = min(
            ((period * (last - 1) - lead) / part, number)
            for number, (lead, part) in enumerate(zip(leads, parts, strict=True))
            if part and lead >= period
        )
        owner[place], before[place] = chosen, given[chosen]
        given[chosen] += 1
    return owner, before


def _order(source: Source) -> Callable[..., tuple[Indices, Indices]]:
    if isinstance(source, Ordered):
        return source.order
    return lambda positions, *, seed: samples(positions, n=len(source), seed=seed)


def _number(name: str) -> int:
    """64 bits of a name, so that a source keeps its order when another one is added."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def _merged(parts: Sequence[Tensor], back: Indices) -> Tensor:
    """The rows of several tensors, in their places. Raises WordsError if their shapes or types differ."""
    kinds = {(tuple(part.shape[1:]), part.dtype) for part in parts}
    if len(kinds) > 1:
        one, other, *_ = sorted(f"{list(shape)} of {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)
        raise WordsError(
            f"data.of: samples of one source are {one}, of another {other}, but a batch needs one shape and type. Give "
            "the sources the same sequence, or data.pad and data.length."
        )
    # numpy, because this may run in a thread beside the one that trains
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts])[back])
