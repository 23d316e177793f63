"""Signals: the first one ends a run that has nothing to save and asks any other run to stop; the second ends it.

SIGTERM, SIGUSR1, SIGINT and SIGHUP (a closed terminal) request a stop, the last two unless the shell ignores them
(nohup, `&` in a script); SIGUSR2 asks a rank for a report (`dtrain.lifecycle.watchdog`).
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain.errors import EXIT_CODES

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGUSR1,
    *(number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN),
)
REPORT = signal.SIGUSR2
PASSED_ON = "asked"
"""A file among the reports of ranks to which their launcher has passed a signal on."""
ENDING_SECONDS, GIVE_BACK_SECONDS, CHECK_SECONDS = 3.0, 2.0, 0.05
"""Seconds that a process with nothing to save has to clean up, then for its lease, and between two checks."""
SAME_REQUEST_SECONDS = 1.0
"""SIGTERM and SIGUSR1 within this time are one request: a scheduler signals every process, and the launcher forwards
its own. A second Ctrl-C always counts, a second SIGHUP never: the shell and the kernel both send one.
"""


class StopRequested(KeyboardInterrupt):
    """A request to stop while there is nothing to save. Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        self.exit_code = EXIT_CODES["interrupted" if number == signal.SIGINT else "preempted"]
        super().__init__(
            f"stopped by {signal.Signals(number).name} before there was anything new to save; run the same command "
            "to start again"
        )


_received: list[tuple[int, float]] = []
_ended: list[StopRequested] = []
_enforcer: list[object] = []
_importing: list[bool] = []
_rank: list[int] = []
"""The pid of the training process, while it trains: its forked children ignore requests."""
_repeats_end = [True]


@contextmanager
def blocked() -> Iterator[None]:
    """Stop signals stay pending until the end of the context; a process forked in it inherits that."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stop_request() -> int:
    """The signal that asked this process to stop, or 0."""
    return _received[0][0] if _received else 0


def asked() -> StopRequested | None:
    """The request that ended this process while there was nothing to save."""
    return _ended[0] if _ended else None


def by_signal(error: BaseException) -> bool:
    """Whether the error is a KeyboardInterrupt that a signal handler of this module raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = not frames or frames[-1].f_code in (_note.__code__, _end.__code__)
    return isinstance(error, KeyboardInterrupt) and ours


def note(number: int) -> bool:
    """Record a signal. Returns whether it repeats the request, and so must end the process at once."""
    now = time.monotonic()
    repeated = (
        bool(_received)
        and number != signal.SIGHUP
        and (number == _received[0][0] == signal.SIGINT or now - _received[0][1] > SAME_REQUEST_SECONDS)
    )
    _received.append((number, now))
    return repeated


def note_passed_on(reports: Path) -> None:
    """Have the ranks of a launcher tell a request that it passes on from one that a rank alone gets."""
    with contextlib.suppress(OSError):  # they name a rank
        (reports / PASSED_ON).touch()


def listen(*, forwarded: bool = False) -> None:
    """Make signals request a stop, here and in forked children. `forwarded`: they come from a launcher, which itself
    ends this process when they are repeated.
    """
    if forwarded:
        _repeats_end[0] = False
    install(dict.fromkeys(STOP_SIGNALS, _note))


@contextmanager
def ending() -> Iterator[None]:
    """A context in which, until `listen`, a signal raises `StopRequested`; the old handlers are restored at its end.

    It may be raised anywhere. If a library turns it into another error, or swallows it, the context raises
    `StopRequested` nevertheless.
    """
    before, hook = {number: signal.getsignal(number) for number in STOP_SIGNALS}, sys.unraisablehook
    install(dict.fromkeys(STOP_SIGNALS, _end))
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, StopRequested) else hook(lost)
    try:
        yield
    except Exception:
        if _ended:
            raise _ended[0] from None
        raise
    finally:
        _enforcer.clear()
        install(before)
        sys.unraisablehook = hook


@contextmanager
def called() -> Iterator[None]:
    """A context of a run that a caller's process begins: earlier requests are forgotten, and until `training` Ctrl-C
    raises `StopRequested` where it would raise KeyboardInterrupt. Nothing ends the process.
    """
    _received.clear()
    _ended.clear()
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        install({signal.SIGINT: _raise})
    try:
        yield
    finally:
        if raises:
            install({signal.SIGINT: signal.default_int_handler})


@contextmanager
def noted() -> Iterator[list[int]]:
    """A context in which signals only add to a list: one each time that a request is made, or repeated."""
    before, requests = {number: signal.getsignal(number) for number in STOP_SIGNALS}, list[int]()

    def add(number: int, _: FrameType | None) -> None:
        if note(number) or not requests:
            requests.append(number)

    install(dict.fromkeys(STOP_SIGNALS, add))
    try:
        yield requests
    finally:
        install(before)


@contextmanager
def importing() -> Iterator[None]:
    """Around imports, where an exception would be lost, or torch would abort: inside `ending` a signal ends the process
    at once, inside `called` it waits for the end of the context.
    """
    _importing[:] = [True]
    try:
        yield
    finally:
        _importing.clear()
    if _ended:
        raise _ended[0]


@contextmanager
def training() -> Iterator[None]:
    """Like `ending`, in a process that trains. An earlier request takes effect here."""
    with ending():
        _rank[:] = [os.getpid()]
        try:
            if _received:
                _end(stop_request(), None)
            yield
        finally:
            _rank.clear()
            _received.clear()


def _note(number: int, _: FrameType | None) -> None:
    if note(number) and _repeats_end[0]:
        if not _enforcer:
            _enforcer[:] = [object()]
            _thread.start_new_thread(_outlast, (_enforcer[0],))
        raise KeyboardInterrupt


def _raise(number: int, _: FrameType | None) -> None:
    note(number)
    _ended[:] = [StopRequested(number)]
    if not _importing:
        raise _ended[0]


def _end(number: int, _: FrameType | None) -> None:
    note(number)
    _ended[:] = [StopRequested(number)]
    if _importing:
        _end_now()
    if not _enforcer:
        _enforcer[:] = [object()]
        # not a Thread, which takes locks that the interrupted code may hold
        _thread.start_new_thread(_enforce, (_enforcer[0], number))
    raise _ended[0]


def _outlast(mine: object) -> None:
    """Runs beside the main thread: ends the process that a second request has not ended in time, such as one that waits
    for a thread that reads samples, which no exception reaches.
    """
    time.sleep(ENDING_SECONDS)
    if _enforcer == [mine]:
        with contextlib.suppress(OSError):
            os.write(2, b"dtrain: ended by a second request to stop, while a thread would not end\n")
        os._exit(EXIT_CODES["interrupted"])


def _end_now() -> None:
    _give_back()
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"dtrain: {_ended[0]}\n".encode())
    os._exit(_ended[0].exit_code)


def _give_back() -> None:
    """Release the leases of this process, in another thread: the code that the signal interrupted may hold locks."""
    lease, done = sys.modules.get("dtrain.storage.lease"), list[bool]()

    def act(give_back: Callable[[int], None]) -> None:
        with contextlib.suppress(Exception):
            give_back(_ended[0].exit_code)
        done.append(True)

    if lease:
        _thread.start_new_thread(act, (lease.give_back,))
        deadline = time.monotonic() + GIVE_BACK_SECONDS
        while not done and time.monotonic() < deadline:
            time.sleep(CHECK_SECONDS)


def _enforce(mine: object, number: int) -> None:
    """Runs beside the main thread: raises the request again if it was lost (in a `__del__`, a callback, an `except:`),
    and ends the process when its time is up.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        time.sleep(CHECK_SECONDS)
        if _enforcer != [mine]:
            return
        if time.monotonic() > deadline:
            _end_now()
        if signal.getsignal(number) is _end and not _is_unwinding():
            os.kill(os.getpid(), number)


def _is_unwinding() -> bool:
    """Whether the main thread is handling the request."""
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    while error is not None and not isinstance(error, StopRequested):
        error = error.__context__
    return error is not None


def install(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set handlers of this process, None for the default; in other threads than the main one, change nothing."""
    if threading.current_thread() is threading.main_thread():  # Python refuses it in other threads
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _reset_child() -> None:
    """Reset a forked child of a rank: it ignores stop signals, because the rank ends it by SIGTERM."""
    if _rank and _rank[0] != os.getpid():
        _rank.clear()
        _received.clear()
        signal.set_wakeup_fd(-1)
        install({**dict.fromkeys((*STOP_SIGNALS, REPORT), signal.SIG_IGN), signal.SIGTERM: signal.SIG_DFL})


os.register_at_fork(after_in_child=_reset_child)
