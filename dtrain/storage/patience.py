"""Retries: an operation on storage that may succeed later is retried for a limited time; an error of any filesystem
becomes one line.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeVar

from dtrain import secrets
from dtrain.config import environment
from dtrain.config.word import cut
from dtrain.errors import PreflightError, StoreError
from dtrain.secrets import screen
from dtrain.storage.clients import client, is_local, local_path
from dtrain.storage.errors import explain

T = TypeVar("T")


def _seconds(text: str) -> float:
    """The value of DTRAIN_PATIENCE. Raises PreflightError."""
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise PreflightError(
        f"{environment.PATIENCE}={cut(text)} (environment): a number of seconds >= 0. Type {environment.PATIENCE}=60 "
        "before the command, or unset it."
    )


PATIENCE = UNREACHED = _seconds(os.environ.get(environment.PATIENCE, "60"))
"""Seconds for which an operation is retried; and where no connection can be made."""
ANSWER_SECONDS = 5.0
"""The latter at the start of a run, where a person waits who may have typed a wrong address."""
TELL_SECONDS = 10.0
"""After which a user is told that an operation is retried."""
FIRST_WAIT, LONGEST_WAIT = 0.2, 8.0
"""Seconds. Each wait is random between zero and a bound that doubles, so that ranks that failed together do not all
retry at the same moment.
"""


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Set how long the whole process retries inside this context: short where a person waits for the answer."""
    with _limits(seconds, seconds):
        yield


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """A context before a run begins: as patient as the run, but where nothing answers unless the user set that too."""
    with _limits(PATIENCE, PATIENCE if environment.PATIENCE in os.environ else min(PATIENCE, ANSWER_SECONDS)):
        yield


@contextlib.contextmanager
def _limits(answered: float, unreached: float) -> Iterator[None]:
    global PATIENCE, UNREACHED
    before, (PATIENCE, UNREACHED) = (PATIENCE, UNREACHED), (answered, unreached)
    try:
        yield
    finally:
        PATIENCE, UNREACHED = before


def hand_over() -> str | None:
    """The value that the user set, for other processes of the run; None if there is none."""
    return os.environ.get(environment.PATIENCE)


def take_over(text: str | None) -> None:
    """Set what the parent handed over, in this process and its children; None leaves the value of this host."""
    global PATIENCE, UNREACHED
    if text is not None:
        PATIENCE = UNREACHED = _seconds(text)
        os.environ[environment.PATIENCE] = text


def on_disk(operation: str, url: str, act: Callable[[Path], T]) -> T:
    """Call `act` with the path of a local URL, with retries. Raises StoreError."""
    return _try(operation, url, lambda: act(local_path(url)))


def elsewhere(operation: str, url: str, act: Callable[[Any, str], T]) -> T:
    """Call `act` with the filesystem of a URL and the path in it, with retries. Raises StoreError."""

    def attempt() -> T:
        fs = client(url)
        return act(fs, fs._strip_protocol(str(local_path(url)) if is_local(url) else url))

    return _try(operation, url, attempt)


def _try(operation: str, url: str, act: Callable[[], T]) -> T:
    begin, is_told = time.monotonic(), False
    for tries in itertools.count(1):
        try:
            return act()
        except Exception as error:  # each filesystem has its own exceptions; the user gets one line
            cause = explain(error, url)
        wait = SystemRandom().uniform(0, min(LONGEST_WAIT, FIRST_WAIT * 2**tries))
        passed, limit = time.monotonic() - begin, PATIENCE if cause.reached else UNREACHED
        if cause.kind != "busy" or passed + wait > limit:
            break
        if passed > TELL_SECONDS and not is_told:
            is_told = True
            _tell(f"cannot {operation} {url} so far: {cause.sentence}. It is tried for {limit - passed:.0f} s more")
        time.sleep(wait)
    tried = f" (tried {tries} times in {passed:.0f} s)" if tries > 1 else ""
    raise StoreError.during(operation, url, cause.sentence + tried, cause.hint, cause.kind)


def _tell(sentence: str) -> None:
    """Say on standard error that storage is waited for, with the variable that sets for how long."""
    screen.complain(screen.on_one_line(secrets.masked(f"{sentence} ({environment.PATIENCE}).")), begin="note: ")
