"""Whether the hub of Hugging Face answers, asked once when trusted code first imports its client: which, offline, waits
a minute and more in tries of its own.

HF_HUB_OFFLINE=1 dtrain plan model._target_=transformers.AutoModel.from_pretrained ...  # takes what the cache has
"""

import os
import re
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dtrain.secrets import screen

CLIENT, HUB = "huggingface_hub", "https://huggingface.co"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables with which a user chooses; its client reads them when it is imported."""
NAME, REPOSITORY = "pretrained_model_name_or_path", re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SECONDS = 4.0
"""For an answer of any kind, the name server's included."""


class _Asking(MetaPathFinder):
    """Finds the client of the hub, which asks before it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path, target) if fullname == CLIENT else None
        if found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def ask_first(module: ModuleType) -> None:
            _ask()
            execute(module)

        vars(found.loader)["exec_module"] = ask_first
        return found


def watch() -> None:
    """From now on the hub is asked before its client is imported, unless the user has chosen; where it is silent, this
    process and its children are offline.
    """
    if CLIENT not in sys.modules and not any(isinstance(each, _Asking) for each in sys.meta_path):
        sys.meta_path.insert(0, _Asking())


def named(part: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, name) of the models and tokenizers of the hub that a part of the plan loads, as far as its words tell."""
    if isinstance(part, Mapping):
        name = part.get(NAME)
        loads = str(part.get("_target_")).endswith(".from_pretrained") and "cache_dir" not in part
        if loads and isinstance(name, str) and REPOSITORY.fullmatch(name) and not Path(name).exists():
            yield f"{key}.{NAME}", name
        for below, value in part.items():
            yield from named(value, f"{key}.{below}")
    elif isinstance(part, list | tuple):
        for below, value in enumerate(part):
            yield from named(value, f"{key}.{below}")


def absent(name: str) -> str:
    """Why nothing of a model of the hub can be loaded here; nothing where it may be."""
    watch()
    try:
        from huggingface_hub import constants
    except ImportError:
        return ""
    if not constants.HF_HUB_OFFLINE or Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").exists():
        return ""
    return f"offline, and {constants.HF_HUB_CACHE} has nothing of it"


def _ask() -> None:
    url = os.environ.get("HF_ENDPOINT", HUB)
    if any(name in os.environ for name in OFFLINE) or not (why := silence(url)):
        return
    os.environ[OFFLINE[0]] = "1"
    if os.environ.get("RANK", "0") == "0":
        said = (
            f"{url} does not answer ({why}): what is not in the cache of this machine cannot be loaded. "
            f"{OFFLINE[0]}=0 leaves the waiting to its client."
        )
        screen.complain(said, begin="note: ")


def silence(url: str) -> str:
    """Why a server gives no answer of any kind within SECONDS; nothing where it does, and where that cannot be told. Of
    a proxy before it is only known whether it listens.
    """
    server = urlsplit(url)
    proxies, host = getproxies(), server.hostname or ""
    proxy = proxies.get(server.scheme) or proxies.get("all")
    proxied = bool(proxy) and not proxy_bypass(host)
    try:
        asked = urlsplit(proxy or "") if proxied else server
        usual = {"http": 80, "https": 443}[asked.scheme]
        port = asked.port or usual
    except (KeyError, ValueError):  # another protocol, or no URL: its client says so
        return ""
    said, over = list[str](), Event()

    def ask(address: tuple[str, int]) -> None:
        try:
            with socket.create_connection(address, timeout=SECONDS) as connection:
                said.append("" if proxied else _talk(connection, host, tls=asked.scheme == "https"))
        except OSError as error:
            said.append("timed out" if isinstance(error, TimeoutError) else error.strerror or str(error))
        if "" in said:
            over.set()

    def ask_all() -> None:
        try:
            addresses = {
                (str(found[4][0]), port) for found in socket.getaddrinfo(asked.hostname, port, type=socket.SOCK_STREAM)
            }
        except (OSError, UnicodeError) as error:
            addresses = set()
            said.append(getattr(error, "strerror", None) or str(error))
        asking = [Thread(target=ask, args=(address,), daemon=True) for address in addresses]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        over.set()

    Thread(
        target=ask_all, daemon=True
    ).start()  # resolvers have a patience of their own, and an address that is silent is not always the only one
    over.wait(SECONDS)
    return "" if "" in said else (*said, "timed out")[0]


def _talk(connection: socket.socket, host: str, *, tls: bool) -> str:
    """Why a server that takes a connection says nothing. Raises OSError."""
    try:
        spoken = ssl._create_unverified_context().wrap_socket(connection, server_hostname=host) if tls else connection
        spoken.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return "" if spoken.recv(1) else "it closes the connection"
    except ssl.SSLEOFError:
        return "it closes the connection"
    except ssl.SSLError:  # which is an answer, and for its client to judge
        return ""
