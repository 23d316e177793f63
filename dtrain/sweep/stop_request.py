"""Requests to stop a sweep: `dtrain sweep stop` writes one, and every worker of the folder, on whatever host, lets its
jobs save and ends.

    <sweep.out>/stop/00001.json     who asked, and when

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

FILE = re.compile(r"(\d{5,12})\.json")


def newest(root: str) -> int:
    """The number of the newest request; 0 if there is none. Raises StoreError."""
    names = (FILE.fullmatch(name) for name in store.children(store.join(root, "stop")))
    return max((int(name[1]) for name in names if name), default=0)


def ask(root: str) -> None:
    """Write a request, unless another one is just being written. Raises StoreError."""
    who = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    try:
        store.publish(store.join(root, "stop", f"{newest(root) + 1:05}.json"), json.dumps(who).encode())
    except StoreError as error:
        if error.kind != "exists":
            raise
