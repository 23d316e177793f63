"""The wish to stop: Ctrl-C, SIGTERM, SIGUSR1 or the step the user named, agreed by all ranks before any of them acts on it.

The first signal asks for a stop after the current step; the second one stops at once.
"""

import signal
import time
from types import FrameType

import torch

from dtrain.mesh import Mesh
from dtrain.result import Status

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AGREE_SECONDS = 0.25
"""Ranks ask each other about this often: a stop waits no longer, and a step costs nothing."""

_received: list[int] = []


def listen() -> None:
    """Note signals from now on; a forked child goes on noting them."""
    for number in SIGNALS:
        signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if len(_received) > 1:
        raise KeyboardInterrupt


class StopSignal:
    """Ask `requested(step)` before every step; afterwards `status` says why the run ended."""

    def __init__(self, *, after: int | None) -> None:
        self._after, self._next, self._since = after, 1, time.perf_counter()
        self._checked = 0
        self.status: Status = "finished"

    def __enter__(self) -> "StopSignal":
        listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        _received.clear()

    def requested(self, step: int, mesh: Mesh) -> bool:
        """Whether to stop now, after `step` steps; the same answer on every rank."""
        reason = self._agreed(step, mesh)
        if reason:
            self.status = "interrupted" if reason == signal.SIGINT else "preempted"
        elif self._after is not None and step >= self._after:
            self.status = "stopped"
        return self.status != "finished"

    def _agreed(self, step: int, mesh: Mesh) -> int:
        mine = _received[0] if _received else 0
        if mesh.world == 1:
            return mine
        if self._next > step - self._checked:
            return 0
        steps, self._since = (step - self._checked) / max(1e-6, time.perf_counter() - self._since) * AGREE_SECONDS, time.perf_counter()
        reason, fewest = mesh.max(torch.tensor([float(mine), -max(1.0, steps)])).tolist()
        self._checked, self._next = step, int(-fewest)
        return int(reason)
