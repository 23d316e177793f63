"""The home folder of the user, which a container may lack: no HOME, and an id without a name."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dtrain.errors import WordsError


def expanded(path: str | Path) -> Path:
    """A path whose `~` is the home folder. Raises WordsError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0]
        raise WordsError(f"{path}: there is no home folder for {name} here. Type a full path.") from None


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the caches of this user; in the folder for temporary files where there is no home."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser()
    except RuntimeError:
        return _temporary()


def _temporary() -> Path:
    """A folder that no other user may write."""
    folder = Path(tempfile.gettempdir()) / f"dtrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_mine = folder.stat().st_uid == os.getuid() and not folder.is_symlink()
    except OSError:
        return folder
    return folder if is_mine else Path(tempfile.mkdtemp(prefix="dtrain-"))
