"""Where the processes meet that another launcher started without telling them an address: the first one writes it.

    <out>/meeting.json      address and port, the job, the id of this start, and a door: another port of that address

The first process creates the file and answers at the door with the id for as long as it lives. A file that an earlier
start left names a door where nobody answers so, and the others wait for the next one. With a DTRAIN_SECRET the file is
signed; it holds no secret.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dtrain.cluster import network
from dtrain.cluster.allocation import External
from dtrain.config.environment import SECRET
from dtrain.config.structure import TEXT, Kind, fault
from dtrain.errors import PreflightError, StoreError
from dtrain.storage import store

PORT = Kind("a port", lambda value: type(value) is int and 0 < value < 1 << 16)
ID = Kind("an id", lambda value: isinstance(value, str) and len(value) == 32 and value.isalnum() and value.isascii())
SHAPE = {"address": TEXT, "port": PORT, "door": PORT, "job": TEXT, "start": ID, "signature": TEXT}
MOST_BYTES = 4096
LOOK_SECONDS, ANSWER_SECONDS = 0.2, 2.0


def url(out: str) -> str:
    return store.join(out, "meeting.json")


@contextmanager
def meeting(out: str, outer: External, *, on_one_host: bool, wait: float) -> Iterator[tuple[str, int]]:
    """The address and port of the first process, which this context keeps known if it is this one. `wait`: seconds for
    it to come. Raises PreflightError.
    """
    if out.startswith("memory://"):
        raise PreflightError(
            f"out={out}: processes that another launcher started ({outer.variables}) meet by a file under `out`, which "
            "no other process sees there. Type out=<a folder that they share>, or set MASTER_ADDR and MASTER_PORT."
        )
    if outer.rank == 0:
        with _announced(out, outer, "127.0.0.1" if on_one_host else network.outward()) as place:
            yield place
    else:
        yield _find(out, outer, wait)


@contextmanager
def _announced(out: str, outer: External, host: str) -> Iterator[tuple[str, int]]:
    """A context in which the file exists and the door is open."""
    _, port = network.endpoint(network.meeting(host))
    start = secrets.token_hex(16)
    with network.listen(host, 0) as door:
        threading.Thread(target=_answer, args=(door, start.encode()), name="dtrain-meeting", daemon=True).start()
        facts = {"address": host, "port": port, "door": door.getsockname()[1], "job": _job(outer), "start": start}
        data = json.dumps({**facts, "signature": _sign(facts)}).encode()
        store.remove(url(out))  # of a start that was killed: this one holds the lease
        store.publish(url(out), data)
        try:
            yield host, port
        finally:
            with contextlib.suppress(StoreError):
                if store.read(url(out)) == data:
                    store.remove(url(out))
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _answer(door: socket.socket, start: bytes) -> None:
    while True:
        try:
            with door.accept()[0] as visitor:
                visitor.sendall(start)
        except ConnectionError:
            continue
        except OSError:  # closed
            return


def _find(out: str, outer: External, wait: float) -> tuple[str, int]:
    """Wait for the first process of this start."""
    deadline, problem = time.monotonic() + wait, "it does not exist"
    while time.monotonic() < deadline:
        try:
            facts = json.loads(store.small(url(out), MOST_BYTES))
            problem = _fault(facts, outer) or _unanswered(facts)
            if not problem:
                return facts["address"], facts["port"]
        except StoreError as error:
            problem = "it does not exist" if error.kind == "missing" else str(error)
        except (ValueError, RecursionError):
            problem = "it is not JSON"
        time.sleep(LOOK_SECONDS)
    what = "rank" if outer.kind == "ranks" else "node"
    raise PreflightError(
        f"{what} {outer.rank} has waited {wait:g} s for {what} 0, which writes its address to {url(out)}: {problem}. "
        "Type out=<a folder that all of them share, or a URL>, or set MASTER_ADDR and MASTER_PORT."
    )


def _fault(facts: Any, outer: External) -> str:
    """Why the file is none of this job's first process; empty if it is."""
    if problem := fault(facts, SHAPE):
        return problem
    try:
        ipaddress.ip_address(facts["address"])
    except ValueError:
        return f"{facts['address'][:40]!r} is not an address"
    if not hmac.compare_digest(facts["signature"].encode(), _sign(facts).encode()):
        return f"it was signed with another {SECRET}, or with none"
    return "" if facts["job"] == _job(outer) else "another job wrote it"


def _unanswered(facts: Mapping[str, Any]) -> str:
    """Why nobody at the door is the process that wrote the file; empty if it is there."""
    try:
        with socket.create_connection((facts["address"], facts["door"]), timeout=ANSWER_SECONDS) as door:
            answer = b""
            while len(answer) < len(facts["start"]) and (part := door.recv(64)):
                answer += part
    except OSError as error:
        return f"nobody answers at {facts['address']} port {facts['door']} ({error}): an earlier start left it"
    return "" if answer == facts["start"].encode() else f"another process answers at {facts['address']}"


def _job(outer: External) -> str:
    return f"{outer.row.name} {outer.job} {outer.world}"


def _sign(facts: Mapping[str, Any]) -> str:
    secret = os.environ.get(SECRET, "")
    text = json.dumps([facts[name] for name in ("address", "port", "door", "job", "start")])
    return hmac.digest(secret.encode(), b"dtrain meeting " + text.encode(), "sha256").hex() if secret else ""
