"""Token files, memory-mapped: .npy, or .bin of little-endian unsigned integers; remote ones are copied once. Or the
shards of `dtrain tokenize`, which are read block by block from any storage, held against their digests.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dtrain.data import Batch, Indices
from dtrain.data.order import samples
from dtrain.data.packing import Packed
from dtrain.data.split import Blocks as Order
from dtrain.data.wholedocs import Documents
from dtrain.data.windows import Corpus, Windows, split
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.files import sampled, tokenfile
from dtrain.storage import caching, store
from dtrain.tokenizer import shards
from dtrain.tokenizer.blocks import Blocks, ShardTokens

CACHE_SIZE = 10 << 30
END, PLACE, PLACES = 1 << 16, 256, 256
"""Tokens of an end of a file and of a place in it, and places, by which files are told apart."""
TOGETHER = 4
"""Blocks in a stretch. Its last window goes on in a further one, which is read for it as well."""


class Tokens(Corpus):
    """A Source of windows of tokens; windows never cross from one file into the next. `sequence` in tokens,
    `cache_size` in bytes of shards of other storage.
    """

    def __init__(
        self,
        *,
        path: str,
        holdout_path: str | None,
        holdout: float,
        vocab: int,
        sequence: int,
        dtype: str,
        cache: str | None,
        cache_size: int = CACHE_SIZE,
    ) -> None:
        if dtype not in tokenfile.KINDS:
            raise WordsError(f"data.dtype={dtype} is not a type of a .bin file. Allowed: {', '.join(tokenfile.KINDS)}.")
        self._path, self._holdout_path, self._part = path, holdout_path, holdout
        self._vocab, self._sequence, self._dtype = vocab, sequence, dtype
        self.cache = caching.folder(cache)
        self._cache_size = cache_size
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: list[tuple[int, int]] = []
        """The blocks that were last asked for ahead of their turn."""

    @cached_property
    def _shards(self) -> Blocks | None:
        """The blocks of `path`, if it is that of shards."""
        return self._opened(self._path)

    @cached_property
    def _windows(self) -> Windows:
        arrays = self._open(self._path, self._shards, trained=True)
        kept_at = self._holdout_path
        train, kept = (arrays, self._open(kept_at, self._opened(kept_at))) if kept_at else split(arrays, self._part)
        digest = self._shards.manifest.digest if self._shards else _digest(arrays)
        return Windows(train, self._sequence, self._vocab, f"{digest}-{self._sequence}-{self._part}", kept)

    @cached_property
    def _order(self) -> tuple[Order, list[list[tuple[int, int]]]]:
        """The order of windows of shards, by stretches of TOGETHER blocks, and the shard and number of each block of a
        stretch.
        """
        assert self._shards is not None
        tokens, block = self._shards.tokens, int(self._shards.manifest.facts["block"])
        size = max(1, TOGETHER * tokens // self._sequence)
        sizes, places = list[int](), list[list[tuple[int, int]]]()
        for shard, windows in enumerate(self._windows.counts.tolist()):
            for first in range(0, windows, size):
                sizes.append(min(size, windows - first))
                begin, end = first * self._sequence, (first + sizes[-1]) * self._sequence
                places.append([(shard, number) for number in range(begin // tokens, end // tokens + 1)])
        weights = (count * self._sequence * block // tokens for count in sizes)
        return Order(tuple(sizes), tuple(weights), 0.0), places

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        """Shards go block by block, and the windows of neighbours are shuffled, so that few blocks are read at a
        time.
        """
        if self._shards is None:
            return samples(positions, n=len(self), seed=seed)
        order, places = self._order
        if not store.is_local(self._path) and len(positions):
            after = order.after(int(positions.max()), seed=seed)
            self._read_ahead([each for stretch in after.tolist() for each in places[stretch]])
        return order.order(positions, seed=seed)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        batch = super().take(index, epoch)
        self._check(f"data.path={self._path}", [batch["inputs"].numpy().ravel(), batch["targets"].numpy().ravel()])
        return batch

    def holdout(self) -> Windows | None:
        kept = super().holdout()
        files = [array for array in kept.arrays if isinstance(array, np.ndarray)] if kept else []
        if files:
            key = f"data.holdout_path={self._holdout_path}" if self._holdout_path else f"data.path={self._path}"
            self._check(key, files)
        return kept

    @cached_property
    def rows(self) -> Documents:
        """The documents of shards. Raises PreflightError for files that do not say where documents end."""
        blocks, kept_at = self._shards, self._holdout_path
        kept = self._opened(kept_at) if kept_at else None
        for key, path, there in (("path", self._path, blocks), ("holdout_path", kept_at, kept)):
            if path and there is None:
                raise PreflightError(f"data.{key}={path}: {shards.NO_ENDS}")
        assert blocks is not None
        return Documents(
            self._documents(blocks), self._documents(kept) if kept else (), self._part, self._vocab,
            f"documents-{blocks.manifest.digest}-{kept.manifest.digest if kept else self._part}",
            stretch=TOGETHER * blocks.tokens, weight=TOGETHER * int(blocks.manifest.facts["block"]),
            check=lambda tokens: self._check(f"data.path={self._path}", tokens),
        )  # fmt: skip

    @property
    def is_local(self) -> bool:
        return store.is_local(self._path)

    def stretch_ahead(self, stretches: Sequence[int]) -> None:
        """Have the blocks of stretches of shards read before their turn."""
        assert self._shards is not None
        every = [
            [(shard, number) for number in range(first, min(first + TOGETHER, len(each["blocks"])))]
            for shard, each in enumerate(self._shards.manifest.shards)
            for first in range(0, max(1, len(each["blocks"])), TOGETHER)
        ]
        self._read_ahead([block for each in stretches if each < len(every) for block in every[each]])

    def _documents(self, blocks: Blocks) -> list[tuple[Any, NDArray[np.int64]]]:
        manifest = blocks.manifest
        arrays = self._open(manifest.folder, blocks)
        return [(array, shards.ends_of(manifest, each)) for array, each in zip(arrays, manifest.shards, strict=True)]

    def _read_ahead(self, blocks: list[tuple[int, int]]) -> None:
        if blocks != self._ahead:
            assert self._shards is not None
            self._thread = self._thread or ThreadPoolExecutor(1, "dtrain-ahead")
            self._ahead = blocks
            self._thread.submit(self._shards.ahead, blocks)

    def _check(self, place: str, tokens: Sequence[NDArray[Any]]) -> None:
        if problem := tokenfile.outside(tokens, self._vocab):
            raise PreflightError(f"{place}: {problem}")

    def _opened(self, path: str) -> Blocks | None:
        if not shards.is_manifest(path):
            return None
        manifest = shards.read(path)
        if problem := manifest.problem():
            raise PreflightError(f"{manifest.folder}: {problem}")
        return Blocks(manifest, self.cache, self._cache_size)

    def _open(self, path: str, blocks: Blocks | None, *, trained: bool = False) -> list[Any]:
        if blocks is not None:
            found = enumerate(blocks.manifest.shards)
            return [ShardTokens(blocks, number, 0, each["tokens"]) for number, each in found]
        urls = store.find(path)
        if not urls:
            raise StoreError.during("find", path, "no file is there")
        arrays = [self._map(url) for url in urls]
        if trained:
            sampled.note({url: Path(array.filename) for url, array in zip(urls, arrays, strict=True)})
        return arrays

    def _map(self, url: str) -> Any:
        file = store.local_path(url)
        if not store.is_local(url):
            digest = hashlib.sha256((url + store.fingerprint(url)).encode()).hexdigest()[:32]
            file = self.cache / f"{digest}-{file.name.split('?')[0]}"
            if not file.exists():
                store.download(url, file.with_suffix(".part"))
                file.with_suffix(".part").replace(file)
        return tokenfile.opened(file, url, self._dtype)


@final
class PackedTokens(Packed):
    """A Source of windows of whole documents of shards."""

    def __init__(self, tokens: Tokens, window: int) -> None:
        super().__init__(tokens.rows, window=window, pad=None, cache=tokens.cache)
        self._tokens, self.sequence = tokens, window

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        if self.blocks and not self._tokens.is_local and len(positions):
            self._tokens.stretch_ahead(self.blocks.after(int(positions.max()), seed=seed).tolist())
        return super().order(positions, seed=seed)


def build(
    *, path: str, holdout_path: str | None, holdout: float, vocab: int, sequence: int, dtype: str, cache: str | None,
    cache_size: int = CACHE_SIZE, packing: str = "none",
) -> Tokens | PackedTokens:  # fmt: skip
    """A Source of tokens: windows of all of them, or of whole documents if they are packed."""
    tokens = Tokens(
        path=path, holdout_path=holdout_path, holdout=holdout, vocab=vocab, sequence=sequence, dtype=dtype,
        cache=cache, cache_size=cache_size,
    )  # fmt: skip
    return PackedTokens(tokens, sequence) if packing == "pack" else tokens


def _digest(arrays: Sequence[NDArray[Any]]) -> str:
    """A digest of the sizes, of both ends and of places between them in every file, to tell corpora apart without
    reading them whole.
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{len(array)} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array[:END]).tobytes())
        digest.update(np.ascontiguousarray(array[-END:]).tobytes())
        for begin in np.linspace(0, max(0, len(array) - PLACE), PLACES).astype(np.int64).tolist():
            digest.update(np.ascontiguousarray(array[begin : begin + PLACE]).tobytes())
    return digest.hexdigest()[:32]
