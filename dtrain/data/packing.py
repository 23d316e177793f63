"""Packs rows of tokens of different lengths into windows of one length:

    data=jsonl data.inputs=input_ids data.targets=input_ids data.shift=true data.packing=pack data.sequence=2048

The positions of each document begin anew, so that its tokens attend to nothing else (dtrain/model/documents.py), and
its targets are those of its own row. A row longer than the window is split into documents of a window each and the
rest; no token is left out. Packs are made once, of rows that are neighbours in their files, and are the samples that
the order of a run permutes: the tokens at a position depend on the rows, the window and the seed alone.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dtrain.data import IGNORE, Batch, Indices, Loading
from dtrain.data.order import samples
from dtrain.data.split import Blocks, Leading, Split
from dtrain.files import rowlengths
from dtrain.storage import caching

GROUP = 4096
"""Rows that are packed together at most."""
KEPT = 50_000
"""Rows from which on their packs are kept in the cache, as packing takes some 10 us a row."""
VERSION = 1


@dataclass(frozen=True)
class Packs:
    """Pack p holds the pieces ends[p - 1] to ends[p]: tokens `begin` to `begin + length` of a row."""

    row: Indices
    begin: Indices
    length: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.ends)

    def pieces(self, pack: int) -> slice:
        return slice(int(self.ends[pack - 1]) if pack else 0, int(self.ends[pack]))


def packed(lengths: Indices, window: int) -> Packs:
    """Packs of rows of these lengths, by best fit, the longest first: of windows with enough room the fullest takes the
    next piece. Rows without tokens are in none.
    """
    row, begin, length = _pieces(lengths, window)
    order = np.argsort(-length, kind="stable")
    pack = np.empty(len(order), np.int64)
    open_, rooms, count = dict[int, list[int]](), 0, 0
    for piece, size in zip(order.tolist(), length[order].tolist(), strict=True):
        fits = rooms >> size  # bit r of `rooms`: some window has room for r tokens
        if fits:
            room = size + (fits & -fits).bit_length() - 1
            chosen = open_[room].pop()
            if not open_[room]:
                rooms ^= 1 << room
        else:
            room, chosen, count = window, count, count + 1
        pack[piece] = chosen
        open_.setdefault(room - size, []).append(chosen)
        rooms |= 1 << (room - size)
    by_pack = np.argsort(pack, kind="stable")
    ends = np.cumsum(np.bincount(pack, minlength=count))
    return Packs(row[by_pack], begin[by_pack], length[by_pack], ends)


def _pieces(lengths: Indices, window: int) -> tuple[Indices, Indices, Indices]:
    """(row, first token, tokens) of each piece of at most a window."""
    number = -(-lengths // window)
    row = np.repeat(np.arange(len(lengths)), number)
    begin = (np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)) * window
    return row, begin, np.minimum(lengths[row] - begin, window)


class Unpacked(Protocol):
    """Rows of tokens of different lengths."""

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def part(self) -> Split:
        """The rows that are trained on; what it calls original indices are those of `tokens`."""
        ...

    @property
    def ends(self) -> Indices:
        """The number of rows up to the end of each block, whose rows are packed by themselves."""
        ...

    def lengths_of(self, split: Any) -> NDArray[Any]:
        """The tokens of each row of a split. Raises WordsError if rows are not of tokens."""
        ...

    def tokens(self, index: Indices) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(tokens, targets) of rows. Raises WordsError for targets that are not one per token."""
        ...

    def as_of(self, fingerprint: str) -> list[str] | None: ...


class Packed:
    """A Source of the packed rows of the part of `rows` that is trained on, or `held` out. `pad`: the token that fills
    windows up; `cache`: the folder in which packs of many rows are kept. Raises WordsError and PreflightError for rows
    that are not of tokens, or that do not fit.
    """

    dense = False
    loading: Loading = "thread"

    def __init__(
        self, rows: Unpacked, *, window: int, pad: float | None, held: bool = False, cache: Path | None = None
    ) -> None:
        self._rows, self._window, self._pad, self._held, self._cache = rows, window, int(pad or 0), held, cache

    @property
    def notes(self) -> list[str]:
        """Sentences about the padding, and rows that are split or empty."""
        return self._made[1]

    @property
    def facts(self) -> Mapping[str, Any]:
        return {**self._rows.facts, "kind": "int64", "documents": True}

    @property
    def fingerprint(self) -> str:
        return f"{self._rows.fingerprint}-packed-{self._window}"

    def __len__(self) -> int:
        return len(self._made[0])

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        blocks = self.blocks
        return samples(positions, n=len(self), seed=seed) if blocks is None else blocks.order(positions, seed=seed)

    @property
    def blocks(self) -> Blocks | None:
        """The packs of rows that are read together; None if rows are read alone."""
        return self._made[2]

    def take(self, index: Indices, epoch: Indices) -> Batch:
        """`inputs` with input_ids and position_ids, and `targets`, all [B, window] int64."""
        shape = len(index), self._window
        tokens, targets = np.full(shape, self._pad, np.int64), np.full(shape, IGNORE, np.int64)
        positions = np.zeros(shape, np.int64)
        packs = self._made[0]
        pieces = [packs.pieces(int(pack)) for pack in index]
        documents = self._rows.tokens(np.concatenate([packs.row[each] for each in pieces]))
        for line, each in enumerate(pieces):
            at = 0
            for begin, length in zip(packs.begin[each], packs.length[each], strict=True):
                row, labels = next(documents)
                place, part = slice(at, at + length), slice(begin, begin + length)
                tokens[line, place], targets[line, place] = row[part], labels[part]
                positions[line, place] = np.arange(length)
                at += int(length)
            positions[line, at:] = np.arange(self._window - at)
        return {
            "inputs": {"input_ids": torch.from_numpy(tokens), "position_ids": torch.from_numpy(positions)},
            "targets": torch.from_numpy(targets),
        }

    def holdout(self) -> "Packed | None":
        """The same object each time, because `as_of` changes it."""
        return self._heldout

    @cached_property
    def _heldout(self) -> "Packed | None":
        rest = None if self._held else self._rows.part.rest()
        if rest is None or not self._rows.lengths_of(rest).any():
            return None
        return Packed(self._rows, window=self._window, pad=self._pad, held=True, cache=self._cache)

    def as_of(self, fingerprint: str) -> list[str] | None:
        inner, _, window = fingerprint.rpartition("-packed-")
        before = self.fingerprint
        told = self._rows.as_of(inner) if window == str(self._window) else None
        if told is not None and self.fingerprint != before:
            for each in (self, self._heldout):
                if each is not None:
                    each.repack()
        return told

    def repack(self) -> None:
        """The rows of this part are others now."""
        self.__dict__.pop("_made", None)

    @cached_property
    def _made(self) -> tuple[Packs, list[str], Blocks | None]:
        """Packs of the rows of this part, those of each block of a file by themselves; `notes`; and the blocks if the
        packs of one are read together.
        """
        part = self._rows.part.rest() if self._held else self._rows.part
        assert part is not None
        rows = part.original(np.arange(len(part)))
        order = np.argsort(rows)
        rows, lengths = rows[order], self._rows.lengths_of(part)[order].astype(np.int64)
        if not self._held:
            rowlengths.check(lengths, self._window)
        borders = np.searchsorted(rows, [0, *self._rows.ends.tolist()])
        packs, counts = _kept(self._cache, rows, lengths, borders, self._window)
        blocks = None
        if isinstance(part, Blocks | Leading) and part.weights and not self._held:
            blocks = Blocks(tuple(counts.tolist()[: len(part.weights)]), part.weights, 0.0)
        return packs, said(lengths, self._window, len(packs)), blocks


def _kept(cache: Path | None, rows: Indices, lengths: Indices, borders: Indices, window: int) -> tuple[Packs, Indices]:
    """The packs of sorted rows, and how many there are of each block, made by the first process of a host if they are
    many. Raises StoreError.
    """
    if cache is None or len(rows) < KEPT:
        return _of_blocks(rows, lengths, borders, window)
    digest = hashlib.sha256(f"{VERSION} {window}".encode())
    for array in (rows, lengths, borders):
        digest.update(np.ascontiguousarray(array, np.int64).data)
    stem = cache / f"packs-{digest.hexdigest()[:32]}"
    with caching.locked(stem):
        names = [Path(f"{stem}.{name}.npy") for name in ("counts", "ends", "pieces")]
        if not all(name.exists() for name in names):
            packs, counts = _of_blocks(rows, lengths, borders, window)
            arrays = counts, packs.ends, np.stack([packs.row, packs.begin, packs.length])
            for name, array in zip(names, arrays, strict=True):
                part = name.with_suffix(".part")
                with part.open("wb") as file:
                    np.save(file, array.astype(np.int64))
                part.replace(name)
        counts, ends, (row, begin, length) = (np.load(name, mmap_mode="r", allow_pickle=False) for name in names)
    return Packs(row, begin, length, ends), counts


def _of_blocks(rows: Indices, lengths: Indices, borders: Indices, window: int) -> tuple[Packs, Indices]:
    parts, counts = list[Packs](), list[int]()
    for begin, end in pairwise(borders.tolist()):
        before = len(parts)
        for start in range(begin, end, GROUP):
            places = slice(start, min(start + GROUP, end))
            group = packed(lengths[places], window)
            parts.append(replace(group, row=rows[places][group.row]))
        counts.append(sum(map(len, parts[before:])))
    return joined(parts), np.array(counts)


def joined(parts: Sequence[Packs]) -> Packs:
    """All packs, one part after the other."""
    row, begin, length = (
        np.concatenate([getattr(each, name) for each in parts]) for name in ("row", "begin", "length")
    )
    firsts = np.cumsum([0, *(len(each.row) for each in parts)])
    ends = [each.ends + first for each, first in zip(parts, firsts, strict=False)]
    return Packs(row, begin, length, np.concatenate(ends))


def said(lengths: Indices, window: int, packs: int) -> list[str]:
    """Sentences about rows of these lengths in so many windows: the padding, and rows that are split or empty."""
    longer, empty, tokens = int((lengths > window).sum()), int((lengths == 0).sum()), int(lengths.sum())
    padding, before = 1 - tokens / (packs * window), 1 - tokens / (len(lengths) * max(window, int(lengths.max())))
    sentences = [
        f"{len(lengths)} rows are packed into {packs} windows of {window} tokens, {padding:.1%} of them padding; one "
        f"row in each would be {before:.1%}"
    ]
    if longer:
        sentences.append(
            f"{longer} of {len(lengths)} rows are longer than data.sequence={window}: they are split, and their parts "
            "do not see each other"
        )
    if empty:
        sentences.append(f"{empty} of {len(lengths)} rows have no token, and are in no window")
    return sentences
