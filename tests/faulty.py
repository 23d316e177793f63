"""A model with one fault, on one rank, in one forward: those that NVIDIA's resiliency extension injects, as far as a CPU has them.

https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main/src/nvidia_resiliency_ext/shared_utils/inject_fault.py
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import NoReturn

from torch import Tensor, nn


class Faulty(nn.Module):
    """`fault` names a function below; it happens in the `at`-th forward of `rank`."""

    def __init__(self, fault: str, rank: int = 1, at: int = 4) -> None:
        super().__init__()
        self.layer, self.fault, self.rank, self.at, self.calls = nn.Linear(64, 10), fault, rank, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and int(os.environ.get("RANK", 0)) == self.rank:
            getattr(sys.modules[__name__], self.fault)()
        return self.layer(x)


def workload_exc() -> NoReturn:
    raise ValueError("planned")


def async_exc() -> None:
    main = threading.get_ident()
    threading.Thread(
        target=lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(ValueError))
    ).start()
    for _ in range(100):
        time.sleep(0.05)


def signal_exc() -> None:
    def fail(*_: object) -> NoReturn:
        raise ValueError("planned in a handler")

    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(5)


def os_abort() -> NoReturn:
    os.abort()


def lock_gil() -> None:
    lock, library = (
        ctypes.create_string_buffer(64),
        ctypes.PyDLL(None),
    )  # PyDLL, unlike CDLL, does not let go of the interpreter
    for _ in range(2):  # the second time waits for the first, and no signal ends the waiting
        library.pthread_mutex_lock(lock)


def segfault() -> None:
    ctypes.string_at(0)


def sleep() -> None:
    time.sleep(600)


def exit_0() -> NoReturn:
    os._exit(0)


def exit_7() -> NoReturn:
    os._exit(7)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _signal_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def sigint() -> None:
    _signal_itself(signal.SIGINT)


def sigterm() -> None:
    _signal_itself(signal.SIGTERM)


def sigkill() -> None:
    _signal_itself(signal.SIGKILL)


def sigstop() -> None:
    _signal_itself(signal.SIGSTOP)
