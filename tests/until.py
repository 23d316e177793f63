"""The one way of tests to wait for something that happens in another process: never without an end."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], seconds: float = 120, *, pause: float = 0.01) -> T:
    """What `true()` returns once that is true. Raises AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(pause)
    return value
