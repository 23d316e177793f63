"""What a signal means to this process: an end while nothing has begun, a wish to stop afterwards, and an end again when it is repeated.

SIGINT, SIGTERM and SIGUSR1 are wishes; SIGUSR2 asks a rank for a report (`dtrain.watchdog`).
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dtrain.result import EXIT_CODES

WISHES = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REPORT = signal.SIGUSR2
ENDING_SECONDS = 3.0
"""What ends while it has nothing to save may take so long to tidy up."""
SAME_WISH_SECONDS = 1.0
"""SIGTERM and SIGUSR1 within this time are one wish: a scheduler signals every process, and the launcher hands its own on. Nobody presses Ctrl-C twice by mistake."""


class Asked(KeyboardInterrupt):
    """Asked to stop while there is nothing to save. No Exception, so that nobody takes it for a failure of what it interrupts."""

    def __init__(self, number: int) -> None:
        self.exit_code = EXIT_CODES["interrupted" if number == signal.SIGINT else "preempted"]
        super().__init__(f"stopped by {signal.Signals(number).name} before there was anything new to save: the same words begin it again")


_heard: list[tuple[int, float]] = []
_ended: list[Asked] = []
_deadline: list[threading.Timer] = []
_importing: list[bool] = []
_rank: list[int] = []
"""The process that trains, while it does. What it forks is somebody's helper, and not asked."""
_repeats_end = [True]


def wish() -> int:
    """The signal that asked this process to stop, or 0."""
    return _heard[0][0] if _heard else 0


def asked() -> Asked | None:
    """What ended this process while there was nothing to save."""
    return _ended[0] if _ended else None


def heard(number: int) -> bool:
    """Note a signal. Whether it repeats the wish, and so means: at once."""
    now = time.monotonic()
    again = bool(_heard) and (number == _heard[0][0] == signal.SIGINT or now - _heard[0][1] > SAME_WISH_SECONDS)
    _heard.append((number, now))
    return again


def listen(*, handed_on: bool = False) -> None:
    """From now on signals are wishes, here and in what is forked. `handed_on`: by a launcher, which itself ends what must end at once."""
    if handed_on:
        _repeats_end[0] = False
    _install(dict.fromkeys(WISHES, _note))


@contextmanager
def ending() -> Iterator[None]:
    """Inside, until `listen`, a signal ends what is done with `Asked`; afterwards signals mean what they meant before.

    It may be raised anywhere, also where a library tidies up and raises something else in its place: that is `Asked` all the same.
    """
    before = {number: signal.getsignal(number) for number in WISHES}
    _install(dict.fromkeys(WISHES, _end))
    try:
        yield
    except Exception:
        if _ended:
            raise _ended[0] from None
        raise
    finally:
        _install(before)
        if _deadline:
            _deadline.pop().cancel()


@contextmanager
def importing() -> Iterator[None]:
    """Inside `ending`, around imports: a signal ends the process on the spot, because what is raised there gets lost, or torch aborts at it."""
    _importing[:] = [True]
    try:
        yield
    finally:
        _importing.clear()


@contextmanager
def training() -> Iterator[None]:
    """As `ending`, in a process that trains. A wish from before ends it here."""
    with ending():
        _rank[:] = [os.getpid()]
        try:
            if _heard:
                _end(wish(), None)
            yield
        finally:
            _rank.clear()
            _heard.clear()


def _note(number: int, _: FrameType | None) -> None:
    if heard(number) and _repeats_end[0]:
        raise KeyboardInterrupt


def _end(number: int, _: FrameType | None) -> None:
    heard(number)
    _ended[:] = [Asked(number)]
    if _importing:
        os.write(2, f"dtrain: {_ended[0]}\n".encode())
        os._exit(_ended[0].exit_code)
    if not _deadline:  # should somebody swallow what is raised here
        _deadline[:] = [threading.Timer(ENDING_SECONDS, os._exit, [_ended[0].exit_code])]
        _deadline[0].daemon = True
        _deadline[0].start()
    raise _ended[0]


def _install(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses; then whoever has the main thread handles them
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _be_a_helper() -> None:
    """A child that a rank forked: Ctrl-C and wishes are for the rank, SIGTERM is how it ends its child."""
    if _rank and _rank[0] != os.getpid():
        _rank.clear()
        _heard.clear()
        signal.set_wakeup_fd(-1)
        _install({signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN, REPORT: signal.SIG_IGN})


os.register_at_fork(after_in_child=_be_a_helper)
