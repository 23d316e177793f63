"""The working folder as an archive for another host: the files that git tracks, and new ones it does not ignore."""

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from dtrain.errors import PreflightError

MOST_BYTES = 256 << 20
"""The most that the files of a folder may have together."""


def bundle(out: str) -> tuple[bytes, str]:
    """A gzipped tar of the working folder without the run's `out`, and a digest of its contents. Raises
    PreflightError.
    """
    aside = Path(out).absolute()
    names = [name for name in _listed() if aside not in Path(name).absolute().parents and _is_there(Path(name))]
    size = sum(Path(name).lstat().st_size for name in names)
    if size > MOST_BYTES:
        largest = max(names, key=lambda name: Path(name).lstat().st_size)
        raise PreflightError(
            f"launcher.sync: the files of this folder have {size >> 20} MB, {largest} the most; at most "
            f"{MOST_BYTES >> 20} MB are brought. Name in .gitignore what is no code."
        )
    archive, digest = io.BytesIO(), hashlib.sha256()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in names:
            member = tar.gettarinfo(name)
            digest.update(repr((name, member.mode, member.linkname)).encode())
            if member.isfile():
                contents = Path(name).read_bytes()
                member.size = len(contents)  # it may have grown
                digest.update(contents)
                tar.addfile(member, io.BytesIO(contents))
            else:
                tar.addfile(member)
    return archive.getvalue(), digest.hexdigest()[:16]


def _is_there(path: Path) -> bool:
    return path.is_file() or path.is_symlink()


def _listed() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise PreflightError(
            "launcher.sync: git says which files are brought, and this folder is in no repository of it. Type git "
            "init, or leave launcher.sync out and name the code there by launcher.folder."
        ) from error
    return sorted({name.decode(errors="surrogateescape") for name in listed.split(b"\0") if name})
