"""Requests to stop a sweep: `dtrain sweep stop` writes one, and every worker of the folder, on whatever host, lets its
jobs save and ends.

    <sweep.out>/stop/00001.json             who asked, and when
    <sweep.out>/stop/00002-<crew>.json      the command that started these workers asks them alone

A worker notes the newest request when it begins, and looks for a newer one every few seconds. So a start that comes
after a request goes on, and nothing has to be removed.
"""

import json
import os
import re
import socket
import time

from dtrain.errors import StoreError
from dtrain.storage import store

FILE = re.compile(r"(\d{5,12})(?:-([\w-]+))?\.json")


def newest(root: str, crew: str = "") -> int:
    """The number of the newest request to all workers or to those of a crew; 0 if there is none. Raises StoreError."""
    return max((number for number, asked in _requests(root) if asked in ("", crew)), default=0)


def ask(root: str, crew: str = "") -> None:
    """Write a request, unless another one is just being written. Raises StoreError."""
    number = max((number for number, _ in _requests(root)), default=0) + 1
    who = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    try:
        name = f"{number:05}{crew and f'-{crew}'}.json"
        store.publish(store.join(root, "stop", name), json.dumps(who).encode())
    except StoreError as error:
        if error.kind != "exists":
            raise


def _requests(root: str) -> list[tuple[int, str]]:
    """The number of each request, and whom it asks; empty: all."""
    names = (FILE.fullmatch(name) for name in store.children(store.join(root, "stop")))
    return [(int(name[1]), name[2] or "") for name in names if name]
