"""Bytes at URLs: any fsspec scheme, one error for all of them, one way to publish a file whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dtrain.errors import StoreError

T = TypeVar("T")


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    return Path(url.removeprefix("file://")).expanduser()


def join(url: str, *parts: str) -> str:
    return "/".join([url.rstrip("/"), *parts])


def read(url: str) -> bytes:
    """The whole file. Raises StoreError."""
    return _guard("read", url, lambda fs, path: bytes(fs.cat_file(path)))


def exists(url: str) -> bool:
    return _guard("look at", url, lambda fs, path: bool(fs.exists(path)))


def find(url: str) -> list[str]:
    """Files that match a URL or glob, sorted by name; a folder means every file below it."""

    def look(fs: Any, path: str) -> list[str]:
        web = url.startswith(("http://", "https://"))
        if any(mark in path for mark in ("*[" if web else "*?[")):  # there a ? begins the query
            found = [name for name in fs.glob(path) if fs.isfile(name)]
        elif web:  # a page has no folders: isdir would download and parse it, and exists hides why not
            try:
                fs.info(path)
            except FileNotFoundError as error:
                raise error.__cause__ or error from None
            found = [path]
        else:
            found = fs.find(path) if fs.isdir(path) else [path] if fs.exists(path) else []
        return sorted(fs.unstrip_protocol(name).removeprefix("file://") for name in found)

    return _guard("list", url, look)


def size(url: str) -> int:
    """Bytes of a file; -1 when it is not there."""
    return _guard("look at", url, lambda fs, path: int(fs.info(path)["size"]) if fs.exists(path) else -1)


def fingerprint(url: str) -> str:
    """Changes when the file at `url` does, as far as its storage tells: size and time, or an ETag."""
    if is_local(url):
        return _guard_local("look at", url, lambda path: f"{path.stat().st_size}-{path.stat().st_mtime_ns}")
    return _guard("look at", url, lambda fs, path: str(fs.ukey(path)))


def children(url: str) -> list[str]:
    """Names directly below a folder; none when there is no such folder."""

    def look(fs: Any, path: str) -> list[str]:
        try:
            return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(path, detail=False, refresh=True)})
        except FileNotFoundError:
            return []
        except TypeError:  # a filesystem whose ls has no refresh
            return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(path, detail=False)})

    return _guard("list", url, look)


def write(url: str, data: bytes) -> None:
    """Put a whole file, replacing what was there; on a local disk a reader sees the old bytes or the new ones."""
    if is_local(url):
        _guard_local("write", url, lambda path: _write_then(path, data, os.replace))
    else:
        _guard("write", url, lambda fs, path: fs.pipe_file(path, data))


def publish(url: str, data: bytes) -> None:
    """Create a file in one piece, durably, and only if it is not there yet. Raises StoreError (cause FileExistsError) when it is."""
    if is_local(url):
        _guard_local("create", url, lambda path: _write_then(path, data, os.link))
    else:
        _guard("create", url, lambda fs, path: fs.pipe_file(path, data, mode="create"))


def upload(source: Path, url: str) -> None:
    """Copy a local file to a URL."""
    if is_local(url) and local_path(url) == source:
        return

    def put(fs: Any, path: str) -> None:
        if is_local(url):
            local_path(url).parent.mkdir(parents=True, exist_ok=True)
        fs.put_file(str(source), path)

    _guard("write", url, put)


def download(url: str, target: Path) -> None:
    """Copy a URL to a local file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _guard("read", url, lambda fs, path: fs.get_file(path, str(target)))


def remove(url: str) -> None:
    """Remove a file or a folder with all below it; what is not there is fine."""

    def drop(fs: Any, path: str) -> None:
        if fs.exists(path):
            fs.rm(path, recursive=True)

    _guard("remove", url, drop)


def probe(url: str) -> None:
    """Write, read back and remove a few bytes below `url`. Raises StoreError when that fails."""
    name = join(url, f".probe-{os.getpid()}")
    write(name, b"dtrain")
    if read(name) != b"dtrain":
        raise StoreError.during("read back what was written to", name, "other bytes came back")
    remove(name)


def scratch(prefix: str) -> Path:
    """A new private folder on the local disk."""
    return Path(tempfile.mkdtemp(prefix=f"dtrain-{prefix}-"))


def fsync(path: Path) -> None:
    """Make a local file or folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_then(path: Path, data: bytes, place: Callable[[Path, Path], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())
        place(Path(name), path)
    finally:
        Path(name).unlink(missing_ok=True)
    fsync(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _guard_local(operation: str, url: str, act: Callable[[Path], T]) -> T:
    try:
        return act(local_path(url))
    except OSError as error:
        raise StoreError.during(operation, url, error.strerror or error) from error


def _guard(operation: str, url: str, act: Callable[[Any, str], T]) -> T:
    # one instance per process: an fsspec client does not survive a fork, and its listing cache lies about other writers
    # https://github.com/fsspec/s3fs/issues/464
    try:
        import fsspec

        options = {} if is_local(url) else {"use_listings_cache": False}
        fs, path = fsspec.core.url_to_fs(url if not is_local(url) else str(local_path(url)), **options)
        return act(fs, path)
    except ImportError as error:
        extra = {"http": "http", "https": "http", "s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}.get(url.split("://")[0])
        hint = f" Type: pip install 'dtrain[{extra}]'" if extra else ""
        raise StoreError.during(operation, url, f"{str(error).rstrip('.')}.{hint}") from error
    except FileNotFoundError as error:
        raise StoreError.during(operation, url, "it does not exist") from error
    except Exception as error:  # every filesystem raises errors of its own; the user gets one line
        cause = next((line for line in str(error).splitlines() if line.strip()), "") or type(error).__name__
        raise StoreError.during(operation, url, cause) from error
