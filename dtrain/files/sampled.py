"""Digests of large files that are not read whole at each start: blocks spread evenly over each file, and both ends. A
checkpoint keeps them, so that a run does not go on with other content.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.errors import StoreError, WordsError
from dtrain.storage import store

BLOCK, BLOCKS = 1 << 16, 1 << 10
"""Bytes of a block, and the number of blocks of all files that are noted together: 64 MiB, read whole if no larger."""
FEWEST = 16
"""Blocks of one file, however many files there are."""


@dataclass(frozen=True)
class Sample:
    """A file in a checkpoint. `stamp`: its size and time, or its ETag; `blocks`: how many of it `sha256` covers."""

    name: str
    bytes: int
    stamp: str
    blocks: int
    sha256: str

    @property
    def is_whole(self) -> bool:
        return self.blocks * BLOCK >= self.bytes


_files = dict[str, tuple[Path, Sample]]()


def note(files: Mapping[str, Path]) -> None:
    """Sample files, by the URL that a user knows, each with its local path. Raises StoreError."""
    blocks = max(FEWEST, BLOCKS // max(1, len(files)))
    for url, path in files.items():
        if url not in _files:
            size, digest = _digest(url, path, blocks)
            _files[url] = path, Sample(secrets.masked(url), size, store.fingerprint(url), blocks, digest)


def forget() -> None:
    """Forget all files, when another run begins in this process."""
    _files.clear()


def facts() -> list[dict[str, Any]]:
    """The samples of all files, in the order in which they were noted, for a checkpoint."""
    return [asdict(sample) for _, sample in _files.values()]


def compare(then: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note for each file that was written since `then`, and is the same as far as its sample tells. Files are
    compared in their order, since their folder may have been moved; other numbers of files are not compared. Raises
    WordsError for a file that is another one, StoreError.
    """
    notes = list[str]()
    for (url, (path, now)), fields in zip(_files.items(), then, strict=True) if len(then) == len(_files) else ():
        old = Sample(**fields)
        if old.bytes != now.bytes:
            raise _other(f"{now.name} had {old.bytes} bytes, and has {now.bytes}")
        if old.sha256 != (now.sha256 if old.blocks == now.blocks else _digest(url, path, old.blocks)[1]):
            raise _other(f"{now.name} has as many bytes, and other content")
        if old.stamp != now.stamp and not old.is_whole:
            notes.append(
                f"{now.name} was written or copied since the checkpoint. It is the same in the {old.blocks} blocks of "
                f"{BLOCK >> 10} KiB that are compared; a change between them is not seen"
            )
    return notes


def _other(change: str) -> WordsError:
    return WordsError(
        f"the checkpoint was trained on other data: {change}. Put the file back as it was, or begin a new run: type "
        "out=<another place>, and init=<its run> to start from its weights."
    )


def _digest(url: str, path: Path, blocks: int) -> tuple[int, str]:
    """(bytes of the file, digest of `blocks` blocks of it, or of all of it if there are no more)."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = blocks * BLOCK >= size
            count = -(-size // BLOCK) if whole else blocks
            last = (count - 1) * BLOCK if whole else size - BLOCK
            for start in (last * number // max(1, count - 1) for number in range(count)):
                digest.update(os.pread(file.fileno(), BLOCK, start))
    except OSError as error:
        raise StoreError.during("read", url, error.strerror or error) from error
    return size, digest.hexdigest()
