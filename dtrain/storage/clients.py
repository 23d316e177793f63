"""The fsspec filesystem of a URL: one per process and bucket, with the options given by `use`, and with the client's
own retries switched off.
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
from dtrain.config import home
from dtrain.storage import web

CLIENTS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 1}}},
    "gs": {"requests_timeout": 300},  # for the whole request, not the time without data
    "az": {"connection_timeout": 10, "read_timeout": 60},
}
"""Default options of each client, unless `use` sets others. Without timeouts, an unresponsive server would block a run
for minutes or forever.
"""
OBJECT_STORES = ("s3", "gs", "az")
"""Schemes that list everything below a prefix at once, a thousand names per request."""
SAME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}

FILE = re.compile(r"(file|local):(//(localhost(?=/))?|(?=/))", re.IGNORECASE)
"""Prefixes of a local file URL; fsspec accepts both schemes."""

_judges: dict[str, web.Judge] = {}
"""Host and port of a web server that the user did not name -> which addresses it may redirect to."""
_chosen: dict[tuple[str, str], dict[str, Any]] = {}
_open: dict[tuple[int, str, str], Any] = {}
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


_here: list[Path] = []


@contextmanager
def anchored() -> Iterator[None]:
    """Inside this context, relative paths start from the current folder, in this process and its forks, even if user
    code changes directory.
    """
    _here.append(Path.cwd())
    try:
        yield
    finally:
        _here.pop()


def is_local(url: str) -> bool:
    return "://" not in url or FILE.match(url) is not None


def local_path(url: str) -> Path:
    """The local path that a path or file URL refers to, per RFC 8089: file:///x, file://localhost/x and file:/x are /x,
    and %20 is a space.

    Raises ValueError for a file on another host.
    """
    scheme = FILE.match(url)
    if not scheme:
        return Path(*_here[-1:], home.expanded(url))
    path = unquote(url[scheme.end() :])
    if not path.startswith(("/", "~", ".")):
        raise ValueError(
            f"{path.split('/')[0]} is another host, whose files are not here. Type file:///<path> for a file of this "
            "machine"
        )
    return home.expanded(path)


def use(url: str, options: Mapping[str, Any]) -> None:
    """Set the fsspec options, which may include credentials, for every URL with the scheme and bucket of `url`, in this
    process and its forks.

    They stay in memory: they are never written to disk, and messages mask their secrets.
    """
    secrets.know_options(options)
    _chosen[_place(url)] = dict(options)
    _open.pop((os.getpid(), *_place(url)), None)


def wary(url: str) -> None:
    """From now on, reads from this web server may lead only to public addresses: a recipe from elsewhere or a row named
    it.
    """
    server = urlsplit(url.strip()).netloc
    if _judges.get(server) is not web.to_public:
        _judge(server, web.to_public)


@contextmanager
def from_a_person(url: str) -> Iterator[None]:
    """Inside this context, web servers count as named by the user, not by a recipe."""
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
    """State for a child process: the servers named by recipes from elsewhere."""
    return {"wary": sorted(_judges), "named": web.hand_over()}


def take_over(state: Mapping[str, Any]) -> None:
    """Restore the state of the parent's `hand_over`."""
    for server in state["wary"]:
        _judge(server, web.to_public)
    web.take_over(state["named"])


def is_object_store(url: str) -> bool:
    return _place(url)[0] in OBJECT_STORES


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return SAME.get(parts.scheme, parts.scheme), parts.netloc


def _options(url: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    if is_local(url):
        return {}
    scheme, server = _place(url)
    usual = CLIENTS.get(scheme, {})
    if scheme in ("http", "https"):
        usual = {"get_client": web.client(_judges.get(server) or web.from_server(urlsplit(url).hostname or ""))}
    # its cache of listings misses the files of other writers: https://github.com/fsspec/s3fs/issues/464
    return {**usual, **chosen, "use_listings_cache": False}


def client(url: str) -> Any:
    """The fsspec filesystem of a URL: one per process and bucket, shared by all threads. A client does not survive a
    fork, and fsspec would create one per thread.
    """
    key = (os.getpid(), *_place(url))
    with _lock:
        if key not in _open:
            _open[key] = connect(url, _chosen.get(_place(url), {}))
    return _open[key]


def connect(url: str, chosen: Mapping[str, Any]) -> Any:
    """A new fsspec filesystem for a URL, with the given options."""
    import fsspec

    options = _options(url, chosen)
    scheme = _place(url)[0]
    if scheme == "flaky":  # also where dtrain is not installed
        fsspec.register_implementation("flaky", "dtrain.testing.flaky.FlakyFileSystem", clobber=True)
    if scheme == "gs" and (options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")):
        # otherwise its first call looks for credentials at Google, for a minute
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    fs = fsspec.core.url_to_fs(str(local_path(url)) if is_local(url) else url, skip_instance_cache=True, **options)[0]
    _calm(scheme, fs)
    return fs


def _calm(scheme: str, fs: Any) -> None:
    """Switch off the retries of the client itself, which would multiply with ours and take minutes for a mistyped
    address; silence its log of retries; and have a web server's whole file not taken for a part.
    """
    for name in ("azure", "gcsfs"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    if scheme == "s3":
        fs.retries = 1
    elif scheme == "az":
        fs.service_client._config.retry_policy.total_retries = 0
    elif scheme in ("http", "https"):
        fs._cat_file = web.in_parts(fs)
    elif scheme == "gs":
        fs._request = type(fs)._request.__wrapped__.__get__(fs)
