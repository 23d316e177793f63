"""The store at which the ranks of a run meet: reached within a bound, and watched from then on. Without it nothing can
be saved, so the run ends and says why.

torch bounds no wait on a store whose process was stopped: a connection is taken, and never answered.
"""

import datetime
import errno
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without saying so

from dtrain.cluster import network
from dtrain.errors import PreflightError, first_line
from dtrain.lifecycle import signals, unwatched
from dtrain.secrets import screen

T = TypeVar("T")

TRY_SECONDS = 10.0
"""Time for one connection before it is tried again: a lost one is waited for in vain."""
NAME_SECONDS = 8.0
"""Time for a host name to be resolved."""
LAUNCHER_SECONDS = 60.0
"""Time for the store of a launcher, which runs before its ranks, and for one that another rank opens."""
LOOK_SECONDS, TELL_SECONDS = 0.05, 10.0
"""Between two looks for ranks that are missing, and two notes about them."""
MOST_NAMED = 8
PING_SECONDS = 10.0
JOIN_SECONDS = 1.0
BUSY_SECONDS = 5.0
"""The longest silence of a living store on a busy machine; less for a rank that was asked to stop, since its save
cannot be agreed on.
"""


def connect(
    host: str, port: int, world: int, *, is_master: bool, shared: bool, seconds: float, wait: float
) -> TCPStore:
    """The store of the run; the master opens it unless it is `shared`. `seconds`: of its requests. `wait`: for it to be
    there. Signals are handled meanwhile. Raises PreflightError.
    """
    began, patience = time.monotonic(), min(wait, LAUNCHER_SECONDS) if shared else wait
    where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
    while True:
        try_for = datetime.timedelta(seconds=seconds if is_master else min(TRY_SECONDS, patience))
        open_store = _open if is_master else partial(TCPStore, is_master=False, wait_for_workers=False)
        opening = partial(open_store, host, port, world, timeout=try_for)
        waited = time.monotonic() - began
        try:
            if not is_master:
                socket.create_connection((host, port), timeout=try_for.total_seconds()).close()
            store = within(try_for.total_seconds() + 1.0, opening)
            store.set_timeout(datetime.timedelta(seconds=seconds))
            return store
        except (OSError, RuntimeError, queue.Empty) as error:  # torch's DistNetworkError is a RuntimeError
            most, sentence = patience, f"there is no store at {where} after {patience:.0f} s: {first_line(error)}."
            if isinstance(error, socket.gaierror):
                most = min(NAME_SECONDS, patience)
                sentence = f"MASTER_ADDR={host}: {error.strerror}. Set it to the name or address of rank 0's host."
            elif isinstance(error, queue.Empty):
                sentence = f"the store process at {where} does not answer: it was stopped, or its host hangs."
            elif is_master:
                most, sentence = 0.0, _cannot_listen(host, port, error)
            if waited >= most:
                raise PreflightError(sentence) from error
        time.sleep(0.2)


def await_ranks(store: Any, rank: int, world: int, *, wait: float) -> None:
    """Be known to the first rank, which waits for all others: nobody else notices if they never come. Raises
    PreflightError.
    """
    store.set(f"here-{rank}", "")
    began = told = time.monotonic()
    missing = [*range(1, world)] if rank == 0 else []
    while missing := [each for each in missing if not store.check([f"here-{each}"])]:
        now = time.monotonic()
        named = [*map(str, missing[:MOST_NAMED]), *["..."] * (len(missing) > MOST_NAMED)]
        who = f"{len(missing)} of {world} ranks ({', '.join(named)})"
        if now - began > wait:
            raise PreflightError(
                f"rank 0 has waited {wait:g} s for {who}: they did not come. RANK=0 and WORLD_SIZE={world} say that "
                "others start them. Start them too; if an earlier command left these variables in this shell, type "
                "unset RANK WORLD_SIZE."
            )
        if now - told > TELL_SECONDS:
            told = now
            screen.complain(f"rank 0 waits for {who}, {wait - (now - began):.0f} s more", begin="note: ")
        time.sleep(LOOK_SECONDS)


def _open(host: str, port: int, world: int, *, timeout: datetime.timedelta) -> TCPStore:
    """The store, at this address of the host alone. At all of them where MASTER_ADDR leads others here on a way this
    host does not see: by an address that it does not have, or by its own name, which its /etc/hosts says is 127.0.1.1.
    Raises OSError, and RuntimeError.
    """
    try:
        end = network.listen(host, port)
        if ipaddress.ip_address(end.getsockname()[0]).is_loopback and not network.is_only_here(host):
            end.close()
            end = socket.create_server(("", port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        end = socket.create_server(("", port))
    return TCPStore(
        host, port, world, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=end.detach()
    )


def _cannot_listen(host: str, port: int, error: Exception) -> str:
    known = {errno.EADDRINUSE: "the port is in use", errno.EACCES: "permission denied"}
    why = known.get(getattr(error, "errno", 0), first_line(error))
    return f"rank 0 cannot open the store at {host}:{port}: {why}. Set MASTER_PORT to a free port."


def within(seconds: float | None, act: Callable[[], T]) -> T:
    """The result of `act`, computed in a thread, because native code blocks signal handlers. Raises queue.Empty when it
    takes longer, and its own errors.
    """
    box: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()

    def work() -> None:
        answer: Future[T] = Future()
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)
        box.put(answer)

    threading.Thread(target=work, name="dtrain-connect", daemon=True).start()
    return box.get(timeout=seconds).result()


class StoreWatch:
    """A context. Ends this process when the store is gone or does not answer. `seconds`: the timeout of collectives. A
    silent store is told within it, before a rank that waits in vain for one that asks the store is blamed on that one;
    after five seconds at the earliest, or where the user has asked to stop.
    """

    def __init__(self, store: Any, where: str, *, seconds: float, rank: int) -> None:
        self._store, self._where, self._rank = store, where, rank
        self._period = min(PING_SECONDS, seconds / 4)
        self._seconds = max(seconds - 1.5 * self._period, BUSY_SECONDS)
        self._asked: float | None = None
        """When the request without an answer was sent; None if there is none."""
        self._gone = ""
        self._over = threading.Event()

    def __enter__(self) -> "StoreWatch":
        self._pinging = threading.Thread(target=self._ping, name="dtrain-ping", daemon=True)
        self._pinging.start()
        threading.Thread(target=self._watch, name="dtrain-store", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._over.set()
        self._pinging.join(JOIN_SECONDS)  # an interpreter that ends while a thread is in torch is aborted

    def _ping(self) -> None:
        try:
            mine = self._ask(self._store.clone)
            while not self._over.wait(self._period):
                self._ask(lambda: mine.check(["ping"]))
        except RuntimeError as error:  # torch's DistError
            self._gone = first_line(error)

    def _ask(self, act: Callable[[], T]) -> T:
        self._asked = time.monotonic()
        answer = act()
        self._asked = None
        return answer

    def _watch(self) -> None:
        silent, looked, pause = 0.0, time.monotonic(), min(1.0, self._period)
        while not self._over.wait(pause):
            now = time.monotonic()
            # what this process itself was stopped for does not count
            silent = 0.0 if self._asked is None else silent + min(now - looked, 2 * pause)
            looked = now
            if self._gone:
                self._end(
                    f"the rendezvous store at {self._where} is gone ({self._gone}): the process that held it has ended"
                )
            elif silent > self._seconds or (signals.stop_request() and silent > BUSY_SECONDS):
                self._end(
                    f"the store process at {self._where} does not answer for {silent:.0f} s: it was stopped, or its "
                    "host hangs"
                )

    def _end(self, sentence: str) -> None:
        request = signals.stop_request()
        code = signals.StopRequested(request).exit_code if request else 1
        if not self._over.is_set():
            unwatched.give_up(unwatched.reports(), self._rank, sentence, kind="lost", exit_code=code)
