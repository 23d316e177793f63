"""Token files, memory-mapped: .npy, or .bin of little-endian unsigned integers; remote ones are copied once."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data import Batch, Indices
from dtrain.data.text import cache_folder
from dtrain.data.windows import Corpus, Windows, split
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.storage import store, tokenfile


class Tokens(Corpus):
    """A Source of windows of tokens; windows never cross from one file into the next. `sequence` in tokens."""

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
    ) -> None:
        if dtype not in tokenfile.KINDS:
            raise WordsError(f"data.dtype={dtype} is not a type of a .bin file. Allowed: {', '.join(tokenfile.KINDS)}.")
        self._path, self._holdout_path, self._part = path, holdout_path, holdout
        self._vocab, self._sequence, self._dtype = vocab, sequence, dtype
        self._cache = Path(cache).expanduser() if cache else cache_folder()

    @cached_property
    def _windows(self) -> Windows:
        arrays = self._open(self._path)
        train, kept = (arrays, self._open(self._holdout_path)) if self._holdout_path else split(arrays, self._part)
        return Windows(train, self._sequence, self._vocab, f"{_digest(arrays)}-{self._sequence}-{self._part}", kept)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        batch = super().take(index, epoch)
        self._check(f"data.path={self._path}", [batch["inputs"].numpy().ravel(), batch["targets"].numpy().ravel()])
        return batch

    def holdout(self) -> Windows | None:
        kept = super().holdout()
        if kept:
            key = f"data.holdout_path={self._holdout_path}" if self._holdout_path else f"data.path={self._path}"
            self._check(key, kept.arrays)
        return kept

    def _check(self, place: str, tokens: Sequence[NDArray[Any]]) -> None:
        if problem := tokenfile.outside(tokens, self._vocab):
            raise PreflightError(f"{place}: {problem}")

    def _open(self, path: str) -> list[NDArray[Any]]:
        urls = store.find(path)
        if not urls:
            raise StoreError.during("find", path, "no file is there")
        return [self._map(url) for url in urls]

    def _map(self, url: str) -> NDArray[Any]:
        file = store.local_path(url)
        if not store.is_local(url):
            digest = hashlib.sha256((url + store.fingerprint(url)).encode()).hexdigest()[:32]
            file = self._cache / f"{digest}-{file.name.split('?')[0]}"
            if not file.exists():
                store.download(url, file.with_suffix(".part"))
                file.with_suffix(".part").replace(file)
        return tokenfile.mapped(file, url, self._dtype)


def _digest(arrays: Sequence[NDArray[Any]]) -> str:
    """A digest of the sizes and both ends of every file, to tell corpora apart without reading them whole."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{len(array)} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array[:65536]).tobytes())
        digest.update(np.ascontiguousarray(array[-65536:]).tobytes())
    return digest.hexdigest()[:32]
