"""A file that is cut while it is mapped ends its readers by SIGBUS: the sentence that names it."""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain.storage import mapped

UNKNOWN = (
    "a file that is mapped into memory was cut, its disk did not answer, or memory that processes share (/dev/shm) is "
    "full"
)
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


@contextmanager
def reported(tell: Callable[[str, bool], object]) -> Iterator[None]:
    """A context in which a SIGBUS calls `tell` in the thread that reads, with a sentence and whether that names a file
    that was cut. Should `tell` return, the process ends by the signal.

    A handler of Python's own would never run: the instruction that failed is repeated first.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)

    def handle(number: int) -> None:
        libc.signal(number, before)
        cut = mapped.cut()
        tell(f"SIGBUS: {cut or UNKNOWN}", bool(cut))

    handler = HANDLER(handle)
    before = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(signal.SIGBUS, before)
