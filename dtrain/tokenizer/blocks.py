"""Token shards, read block by block; each is held against its digest. Blocks of other storage are ranges of its files,
kept in a local folder of bounded size, which the processes of a host share.
"""

import contextlib
import fcntl
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError, StoreError
from dtrain.storage import mapped, store
from dtrain.tokenizer.shards import MANIFEST, Manifest, block_digest

IN_MEMORY = 16
"""Blocks of other storage that a process holds: two of the windows in which they are shuffled."""


class Blocks:
    """The blocks of the shards of a manifest. `cache`: a folder; `most`: bytes of blocks that are kept there."""

    def __init__(self, manifest: Manifest, cache: Path, most: int) -> None:
        self.manifest, self._most = manifest, most
        self._folder = cache / f"tokens-{manifest.digest[:24]}"
        self._kind = np.dtype(manifest.facts["dtype"])
        self.tokens = int(manifest.facts["block"]) // self._kind.itemsize
        """Of a block that is not the last of its shard."""
        self._is_local = store.is_local(manifest.folder)
        self._files = dict[int, NDArray[Any]]()
        self._seen = set[tuple[int, int]]()
        self._memory = OrderedDict[tuple[int, int], NDArray[Any]]()
        self._turn = threading.RLock()

    def read(self, shard: int, numbers: Sequence[int]) -> Mapping[int, NDArray[Any]]:
        """Blocks of a shard by their number. Raises StoreError, and PreflightError for one that the manifest does not
        have like that.
        """
        if self._is_local:
            return {number: self._mapped(shard, number) for number in numbers}
        with self._turn:
            missing = [number for number in numbers if (shard, number) not in self._memory]
            for number, data in self.kept(shard, missing).items():
                self._memory[shard, number] = np.frombuffer(data, self._kind)
            for number in numbers:
                self._memory.move_to_end((shard, number))
            blocks = {number: self._memory[shard, number] for number in numbers}
            while len(self._memory) > max(IN_MEMORY, len(numbers)):
                self._memory.popitem(last=False)
            return blocks

    def kept(self, shard: int, numbers: Sequence[int]) -> Mapping[int, bytes]:
        """Blocks of other storage, through the local folder. Raises as `read`."""
        found = {number: data for number in numbers if (data := self._there(shard, number)) is not None}
        if len(found) == len(numbers):
            return found
        with self._locked():  # another process may be reading the same ones
            found |= {n: data for n in numbers if n not in found and (data := self._there(shard, n)) is not None}
            missing = [number for number in numbers if number not in found]
            size = int(self.manifest.facts["block"])
            url = self.manifest.url(self.manifest.shards[shard])
            for number, data in zip(missing, store.parts(url, [n * size for n in missing], size), strict=True):
                self._check(shard, number, memoryview(data))
                self._keep(self._place(shard, number), data)
                found[number] = data
            if missing:
                self._make_room({self._place(shard, number).name for number in missing})
        return found

    def ahead(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Have blocks in the local folder before they are read."""
        if self._is_local:
            return
        by_shard = dict[int, list[int]]()
        for shard, number in blocks:
            if number < len(self.manifest.shards[shard]["blocks"]):
                by_shard.setdefault(shard, []).append(number)
        for shard, numbers in by_shard.items():
            with contextlib.suppress(PreflightError, OSError):  # told when they are read
                self.kept(shard, numbers)

    def _mapped(self, shard: int, number: int) -> NDArray[Any]:
        if shard not in self._files:
            url = self.manifest.url(self.manifest.shards[shard])
            try:
                self._files[shard] = np.memmap(mapped.note(store.local_path(url)), self._kind, "r")
            except (OSError, ValueError) as error:
                raise StoreError.during("read tokens of", url, getattr(error, "strerror", None) or error) from error
        block = self._files[shard][number * self.tokens : (number + 1) * self.tokens]
        if (shard, number) not in self._seen:
            self._check(shard, number, block.data)
            self._seen.add((shard, number))
        return block

    def _check(self, shard: int, number: int, data: memoryview) -> None:
        facts = self.manifest.shards[shard]
        if block_digest(data) != facts["blocks"][number]:
            raise PreflightError(
                f"{self.manifest.url(facts)} changed or is torn: block {number} of it is not what {MANIFEST} says. "
                "Copy it again, or tokenize again."
            )

    def _place(self, shard: int, number: int) -> Path:
        return self._folder / f"{shard:05d}-{number:05d}.block"

    def _there(self, shard: int, number: int) -> bytes | None:
        """A block in the local folder; None if it is not there, or damaged."""
        path = self._place(shard, number)
        try:
            data = path.read_bytes()
            os.utime(path)  # the oldest are removed first
        except OSError:
            return None
        whole = block_digest(memoryview(data)) == self.manifest.shards[shard]["blocks"][number]
        return data if whole else None

    def _keep(self, path: Path, data: bytes) -> None:
        part = path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        try:
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StoreError.during(
                "keep tokens in", str(self._folder), error.strerror or error, "Type data.cache=<a folder with room>"
            ) from error

    def _make_room(self, new: set[str]) -> None:
        """Remove the blocks that have not been read for longest, but none that are new."""
        files = [(entry.stat().st_mtime_ns, entry.name, entry.stat().st_size) for entry in os.scandir(self._folder)]
        total = sum(size for _, _, size in files)
        for _, name, size in sorted(files):
            if total <= self._most:
                return
            if name.endswith(".block") and name not in new:
                (self._folder / name).unlink(missing_ok=True)
                total -= size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / "lock").open("w", encoding="utf-8")
        except OSError as error:
            raise StoreError.during("keep tokens in", str(self._folder), error.strerror or error) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class ShardTokens:
    """Tokens `start` to `stop` of a shard, as an array of one dim."""

    blocks: Blocks
    shard: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, key: Any) -> Any:
        """A slice is one of these; an array of indices gives the tokens there."""
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            return replace(self, start=self.start + start, stop=self.start + max(start, stop))
        places = np.asarray(key) + self.start
        number, place = np.divmod(places, self.blocks.tokens)
        wanted = np.unique(number)
        parts = self.blocks.read(self.shard, wanted.tolist())
        first = next(iter(parts.values()))
        out = np.empty(places.shape, first.dtype)
        for each in wanted.tolist():
            here = number == each
            out[here] = parts[each][place[here]]
        return out
