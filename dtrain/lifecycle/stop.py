"""The request to stop: a signal, the time limit or `stop_after`, agreed by all ranks before any of them acts on it.

Until a step is done there is nothing to save, and a signal ends the run at once; later, the run stops after the current
step, with a checkpoint.
"""

import os
import signal
import time

import torch

from dtrain.config import environment
from dtrain.errors import Status
from dtrain.lifecycle import signals
from dtrain.lifecycle.unwatched import reports
from dtrain.mesh import Mesh

AGREE_SECONDS = 0.25
"""Seconds between two agreements of the ranks, and so the longest delay of a request."""
TIME_IS_UP = 99
"""Not the number of any signal."""


class StopSignal:
    """Call `requested(step)` before every step and `done()` after it; `status` and `cause` say why the run ended.

    `after`: the last step of this start. `seconds`: the time limit, from DTRAIN_BEGAN, the start of the command on the
    monotonic clock of this host.
    """

    def __init__(self, *, after: int | None, seconds: float | None = None) -> None:
        self._after = after
        self._until = None if seconds is None else float(os.environ.get(environment.BEGAN, time.monotonic())) + seconds
        self._steps, self._within = Pace(), Pace()
        self._listen = 0.0
        self.status: Status = "finished"
        self.cause = ""

    def __enter__(self) -> "StopSignal":
        self._training = signals.training()
        self._training.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._training.__exit__(None, None, None)

    def requested(self, step: int, mesh: Mesh) -> bool:
        """Whether to stop now, after `step` steps; the same answer on every rank."""
        self._within = Pace()
        if not self._agreed(self._steps, mesh) and self._after is not None and step >= self._after:
            self.status, self.cause = "stopped", f"stop_after={self._after}"
        return self.status != "finished"

    def listen(self) -> None:
        """Call after a step: from now on a signal lets the run save first. Reinstalls handlers that other code
        replaced.
        """
        if time.monotonic() >= self._listen:
            signals.listen()
            self._listen = time.monotonic() + AGREE_SECONDS

    def meanwhile(self, mesh: Mesh) -> bool:
        """Like `requested`, between two parts of long work that may be cut short, such as an evaluation."""
        return self._agreed(self._within, mesh)

    def _agreed(self, pace: "Pace", mesh: Mesh) -> bool:
        is_late = self._until is not None and time.monotonic() > self._until
        mine = signals.stop_request() or TIME_IS_UP * is_late
        places = mesh.world + 1
        code = mine * places + (mesh.world if mine and _is_for_all(mesh) else mesh.rank)
        if mesh.world > 1:
            if not pace.due():
                return False
            code, fewest = map(int, mesh.max(torch.tensor([float(code), -pace.turns(AGREE_SECONDS)])).tolist())
            pace.wait(-fewest)
        reason, rank = divmod(code, places)
        if reason:
            self.status = "interrupted" if reason == signal.SIGINT else "preempted"
            name = "the time limit" if reason == TIME_IS_UP else signal.Signals(reason).name
            is_of_one = reason != TIME_IS_UP and rank < mesh.world
            self.cause = f"{name} to rank {rank}" if is_of_one else name
        return reason > 0


def _is_for_all(mesh: Mesh) -> bool:
    """Whether a signal is for the whole run: this is its only rank, or the launcher passed it on."""
    folder = reports()
    return mesh.world == 1 or (folder is not None and (folder / signals.PASSED_ON).is_file())


class Pace:
    """Schedules meetings of ranks by the number of their turns, so that all ranks meet at the same turn."""

    def __init__(self) -> None:
        self._left, self._far, self._done, self._since = 1, 1, 0, time.perf_counter()

    def due(self) -> bool:
        self._left -= 1
        self._done += 1
        return self._left <= 0

    def turns(self, seconds: float) -> float:
        """The turns that fit into `seconds` at the pace since the last meeting; at least one."""
        return max(1.0, self._done / max(1e-6, time.perf_counter() - self._since) * seconds)

    def wait(self, turns: int) -> None:
        """Set the next meeting `turns` turns ahead, but at most twice as far as the last: the first turns may be
        quicker than the rest.
        """
        self._far = min(turns, 2 * self._far)
        self._left, self._done, self._since = self._far, 0, time.perf_counter()
