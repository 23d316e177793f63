"""Local files that this process has mapped into memory: what they were then, and whether they still are.

What is written into such a file is read at once, and reading what was cut off ends the process by SIGBUS. A file that
was removed stays as it was for whoever has mapped it.
"""

from pathlib import Path
from typing import NamedTuple

from dtrain.errors import ChangedError


class _State(NamedTuple):
    size: int
    written: int
    """Time in ns."""
    inode: int


_files = dict[Path, _State]()
_growing = set[Path]()


def note(path: Path, *, grows: bool = False) -> Path:
    """`path`, which is about to be mapped; what it was at the first call counts. `grows`: it may become longer."""
    if path not in _files and (now := _state(path)):
        _files[path] = now
        if grows:
            _growing.add(path)
    return path


def forget() -> None:
    """Forget all files, when another run begins in this process."""
    _files.clear()
    _growing.clear()


def check() -> None:
    """Raises ChangedError, with its name, for a file that is another one now."""
    for path, then in [*_files.items()]:
        now = _state(path)
        if now and now != then and not (path in _growing and now.size > then.size and now.inode == then.inode):
            raise ChangedError(
                f"{path} {_change(then, now)} while the run reads it, so the steps since the last checkpoint may have "
                "seen other samples and are not saved. Put the file back as it was and start again; write other data "
                "to a new file, and type out=<another place> to train on it."
            )


def cut() -> str:
    """A sentence for each file that is shorter now; empty if there is none."""
    every = ((path, then, _state(path)) for path, then in [*_files.items()])
    return "; ".join(f"{path} {_change(then, now)}" for path, then, now in every if now and now.size < then.size)


def _state(path: Path) -> _State | None:
    """None if it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _State(found.st_size, found.st_mtime_ns, found.st_ino)


def _change(then: _State, now: _State) -> str:
    if now.inode != then.inode:
        return "was replaced by another file"
    if now.size == then.size:
        return "was written to"
    return f"was {'cut' if now.size < then.size else 'extended'} from {then.size} to {now.size} bytes"
