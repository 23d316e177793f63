"""Signals: an end while nothing has begun, a wish to stop afterwards, and an end again when
it is repeated.

SIGTERM, SIGUSR1, SIGINT and SIGHUP (a closed terminal) are wishes, the last two unless the shell ignores them (nohup,
`&` in a script); SIGUSR2 asks a rank for a report (`dtrain.lifecycle.watchdog`).
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dtrain.result import EXIT_CODES

WISHES = (
    signal.SIGTERM,
    signal.SIGUSR1,
    *(number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN),
)
REPORT = signal.SIGUSR2
ENDING_SECONDS, LOOK_SECONDS = 3.0, 0.05
"""Seconds that a process with nothing to save may take to tidy up, and between two looks at it."""
SAME_WISH_SECONDS = 1.0
"""SIGTERM and SIGUSR1 within this time are one wish: a scheduler signals every process, and the launcher hands its own
on. Nobody presses Ctrl-C twice by mistake; of a terminal that closes, the shell and the kernel both tell.
"""


class StopRequested(KeyboardInterrupt):
    """Asked to stop while there is nothing to save. No Exception, so that nobody takes it for a failure of what it
    interrupts.
    """

    def __init__(self, number: int) -> None:
        self.exit_code = EXIT_CODES["interrupted" if number == signal.SIGINT else "preempted"]
        super().__init__(
            f"stopped by {signal.Signals(number).name} before there was anything new to save: the same words begin it "
            "again"
        )


_heard: list[tuple[int, float]] = []
_ended: list[StopRequested] = []
_seen_to: list[object] = []
_importing: list[bool] = []
_rank: list[int] = []
"""The process that trains, while it does. What it forks is somebody's helper, and not asked."""
_repeats_end = [True]


def stop_request() -> int:
    """The signal that asked this process to stop, or 0."""
    return _heard[0][0] if _heard else 0


def asked() -> StopRequested | None:
    """The signal that ended this process while there was nothing to save."""
    return _ended[0] if _ended else None


def by_signal(error: BaseException) -> bool:
    """Whether it is the KeyboardInterrupt of a signal that was taken here, and not one that somebody's code raised."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return isinstance(error, KeyboardInterrupt) and (
        trace is None or trace.tb_frame.f_code in (_note.__code__, _end.__code__)
    )


def heard(number: int) -> bool:
    """Note a signal. Whether it repeats the wish, and so means: at once."""
    now = time.monotonic()
    again = (
        bool(_heard)
        and number != signal.SIGHUP
        and (number == _heard[0][0] == signal.SIGINT or now - _heard[0][1] > SAME_WISH_SECONDS)
    )
    _heard.append((number, now))
    return again


def listen(*, handed_on: bool = False) -> None:
    """From now on signals are wishes, here and in what is forked. `handed_on`: by a launcher, which itself ends what
    must end at once.
    """
    if handed_on:
        _repeats_end[0] = False
    _install(dict.fromkeys(WISHES, _note))


@contextmanager
def ending() -> Iterator[None]:
    """Inside, until `listen`, a signal ends what is done with `StopRequested`; afterwards signals mean what they meant
    before.

    It may be raised anywhere, also where a library tidies up and raises something else in its place, or where nobody
    can raise: that is `StopRequested` all the same.
    """
    before, told = {number: signal.getsignal(number) for number in WISHES}, sys.unraisablehook
    _install(dict.fromkeys(WISHES, _end))
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, StopRequested) else told(lost)
    try:
        yield
    except Exception:
        if _ended:
            raise _ended[0] from None
        raise
    finally:
        _seen_to.clear()
        _install(before)
        sys.unraisablehook = told


@contextmanager
def importing() -> Iterator[None]:
    """Inside `ending`, around imports: a signal ends the process on the spot, because what is raised there gets lost,
    or torch aborts at it.
    """
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
                _end(stop_request(), None)
            yield
        finally:
            _rank.clear()
            _heard.clear()


def _note(number: int, _: FrameType | None) -> None:
    if heard(number) and _repeats_end[0]:
        raise KeyboardInterrupt


def _end(number: int, _: FrameType | None) -> None:
    heard(number)
    _ended[:] = [StopRequested(number)]
    if _importing:
        _end_now()
    if not _seen_to:
        _seen_to[:] = [object()]
        _thread.start_new_thread(
            _see_to_it, (_seen_to[0], number)
        )  # a Thread takes locks, which may be held where this has interrupted
    raise _ended[0]


def _end_now() -> None:
    with contextlib.suppress(OSError):  # the terminal may be what went away
        os.write(2, f"dtrain: {_ended[0]}\n".encode())
    os._exit(_ended[0].exit_code)


def _see_to_it(mine: object, number: int) -> None:
    """Beside what ends: what was raised is raised again where it got lost (in a `__del__`, a callback, an `except:`),
    and ended when that is of no use.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        time.sleep(LOOK_SECONDS)
        if _seen_to != [mine]:
            return
        if time.monotonic() > deadline:
            _end_now()
        if signal.getsignal(number) is _end and not _on_its_way():
            os.kill(os.getpid(), number)


def _on_its_way() -> bool:
    """Whether the main thread is tidying up because of it."""
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # a tuple before Python 3.12
    while error is not None and not isinstance(error, StopRequested):
        error = error.__context__
    return error is not None


def _install(handlers: Mapping[signal.Signals, Any]) -> None:
    if (
        threading.current_thread() is threading.main_thread()
    ):  # elsewhere Python refuses; then whoever has the main thread handles them
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _be_a_helper() -> None:
    """A child that a rank forked: Ctrl-C and wishes are for the rank, SIGTERM is how it ends its child."""
    if _rank and _rank[0] != os.getpid():
        _rank.clear()
        _heard.clear()
        signal.set_wakeup_fd(-1)
        _install({**dict.fromkeys((*WISHES, REPORT), signal.SIG_IGN), signal.SIGTERM: signal.SIG_DFL})


os.register_at_fork(after_in_child=_be_a_helper)
