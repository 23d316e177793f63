"""The fsspec filesystem of a URL: one for each process and place, with the options that were told for it, and without a
patience of its own.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dtrain import secrets
from dtrain.storage import web

CLIENTS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}},
    "gs": {"requests_timeout": 300},  # of a whole request, not of a silence
    "az": {"connection_timeout": 10, "read_timeout": 60},
}
"""Default options of a client, unless `use` sets others: without a limit, a server that does not answer stops the world
for minutes or for ever.
"""
OBJECT_STORES = ("s3", "gs", "az")
"""Schemes whose listing of a prefix has everything below it, a thousand names for each request."""
SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}

FILE = re.compile(r"(file|local):(//(localhost(?=/))?|(?=/))", re.IGNORECASE)
"""How a URL of a local file begins; fsspec knows both schemes."""

_judges: dict[str, web.Judge] = {}
"""Host and port of a URL of the web -> which addresses may be connected to from there."""
_told: dict[tuple[str, str], dict[str, Any]] = {}
_open: dict[tuple[int, str, str], Any] = {}
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


_here: list[Path] = []


@contextmanager
def anchored() -> Iterator[None]:
    """Inside, paths are those of the folder it began in, in this process and those forked from it, though code of the
    user's own may change to another.
    """
    _here.append(Path.cwd())
    try:
        yield
    finally:
        _here.pop()


def is_local(url: str) -> bool:
    return "://" not in url or FILE.match(url) is not None


def local_path(url: str) -> Path:
    """The path that a text or a file URL means, as RFC 8089 has it: file:///x, file://localhost/x and file:/x are /x,
    %20 is a space.

    Raises ValueError for a file of another host.
    """
    scheme = FILE.match(url)
    if not scheme:
        return Path(*_here[-1:], Path(url).expanduser())
    path = unquote(url[scheme.end() :])
    if not path.startswith(("/", "~", ".")):
        raise ValueError(
            f"{path.split('/')[0]} is another host, whose files are not here. Type file:///<path> for a file of this "
            "machine"
        )
    return Path(path).expanduser()


def use(url: str, options: Mapping[str, Any]) -> None:
    """fsspec options, credentials among them, for everything with the scheme and bucket of `url`, in this process and
    those forked from it.

    They stay in memory: nothing here writes them, and no message has their secrets.
    """
    secrets.know_options(options)
    _told[_place(url)] = dict(options)
    _open.pop((os.getpid(), *_place(url)), None)


def wary(url: str) -> None:
    """From now on what is read at this server of the web leads to public addresses alone: a recipe from elsewhere named
    it.
    """
    _judge(urlsplit(url.strip()).netloc, web.to_public)


@contextmanager
def from_a_person(url: str) -> Iterator[None]:
    """Inside, a server of the web is one that a person named for a recipe."""
    server = urlsplit(url).netloc
    known = _judges.get(server)
    if known is None:
        _judge(server, web.from_a_person())
    try:
        yield
    finally:
        if known is None:
            _judge(server, None)


def _judge(server: str, judge: web.Judge | None) -> None:
    if judge:
        _judges[server] = judge
    else:
        _judges.pop(server, None)
    for scheme in ("http", "https"):
        _open.pop((os.getpid(), scheme, server), None)


def hand_over() -> dict[str, Any]:
    """State to hand to a child process: the servers that recipes from elsewhere named."""
    return {"wary": sorted(_judges), "named": web.hand_over()}


def take_over(told: Mapping[str, Any]) -> None:
    """Take over the result of the parent's `hand_over`."""
    for server in told["wary"]:
        _judge(server, web.to_public)
    web.take_over(told["named"])


def is_object_store(url: str) -> bool:
    return _place(url)[0] in OBJECT_STORES


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return SAME.get(parts.scheme, parts.scheme), parts.netloc


def _options(url: str, told: Mapping[str, Any]) -> dict[str, Any]:
    if is_local(url):
        return {}
    scheme, server = _place(url)
    usual = {"get_client": web.client(_judges.get(server))} if scheme in ("http", "https") else CLIENTS.get(scheme, {})
    # the cache of listings lies about other writers: https://github.com/fsspec/s3fs/issues/464
    return {**usual, **told, "use_listings_cache": False}


def client(url: str) -> Any:
    """The fsspec filesystem of a URL: one per process and place, for all threads. A client does not survive a fork, and
    fsspec has one for each thread.
    """
    key = (os.getpid(), *_place(url))
    with _lock:
        if key not in _open:
            _open[key] = connect(url, _told.get(_place(url), {}))
    return _open[key]


def connect(url: str, told: Mapping[str, Any]) -> Any:
    """A new fsspec filesystem for a URL, with these options."""
    import fsspec

    options = _options(url, told)
    scheme = _place(url)[0]
    if scheme == "flaky":  # also where dtrain is not installed
        fsspec.register_implementation("flaky", "dtrain.testing.flaky.FlakyFileSystem", clobber=True)
    if scheme == "gs" and (options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")):
        os.environ.setdefault(
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
        )  # else its first call asks Google, for a minute
    fs = fsspec.core.url_to_fs(str(local_path(url)) if is_local(url) else url, skip_instance_cache=True, **options)[0]
    _calm(scheme, fs)
    return fs


def _calm(scheme: str, fs: Any) -> None:
    """Switch off a client's own patience, which below ours would multiply, to minutes for a mistyped address; and its
    log of what is tried again.
    """
    for name in ("azure", "gcsfs"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    if scheme == "s3":
        fs.retries = 1
    elif scheme == "az":
        fs.service_client._config.retry_policy.total_retries = 0
    elif scheme == "gs":
        fs._request = type(fs)._request.__wrapped__.__get__(fs)
