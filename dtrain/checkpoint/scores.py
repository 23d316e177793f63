"""The metrics of checkpoints, on rank 0: they are written beside the commits in the background, and the best of the
checkpoints is known at any time.
"""

import contextlib
import threading
from collections.abc import Mapping

from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.writer import CheckpointWriter
from dtrain.errors import StoreError
from dtrain.storage.attempts import best_step


class Scores:
    """`values`: step -> `checkpoint.best` of every checkpoint that is committed or being saved."""

    def __init__(self, retention: Retention) -> None:
        self._retention, self._policy = retention, retention.policy
        self.values = dict[int, float]()
        self._is_read = False
        self._unwritten = dict[int, Mapping[str, float]]()
        self._urls = dict[int, str]()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def restored(self, step: int, url: str = "") -> None:
        """Training goes on after `step`, from the checkpoint at `url` if that is committed."""
        if url:
            self._urls[step] = url
        if not self._is_read and self._policy.best:
            self.values = self._retention.scores()
        self._is_read = True
        for at in [at for at in self.values if at > step]:
            del self.values[at]

    @property
    def best(self) -> dict[str, dict[str, float]]:
        """Metric -> `value` and `step` of the best checkpoint; empty if there is none."""
        step = best_step(self.values, self._policy.best_is)
        return {} if step is None else {str(self._policy.best): {"value": self.values[step], "step": step}}

    def add(self, step: int, metrics: Mapping[str, float], *, is_saved: bool) -> bool:
        """Record metrics of the state after `step`. Returns whether it must be saved for them: it is the best, and
        `is_saved` is false.
        """
        metric = str(self._policy.best)
        if metric not in metrics:
            return False
        score = float(metrics[metric])
        others = {at: value for at, value in self.values.items() if at != step}
        is_best = best_step({**others, step: score}, self._policy.best_is) == step
        if is_saved or is_best:
            self.values[step] = score
            with self._lock:
                self._unwritten[step] = {**self._unwritten.get(step, {}), **metrics}
        return is_best and not is_saved

    def failed(self, step: int) -> None:
        """The save of `step` failed."""
        self.values.pop(step, None)
        with self._lock:
            self._unwritten.pop(step, None)

    def write(self, step: int, url: str) -> None:
        """Write the metrics of `step`, if they are known, beside the files of its checkpoint. Raises StoreError."""
        with self._lock:
            if step in self._unwritten:
                self._retention.score(url, self._unwritten[step])

    def committed(self, step: int, url: str) -> None:
        """Write what is known about committed checkpoints."""
        with self._lock:
            self._urls[step] = url
            self._write()

    def write_later(self, writer: CheckpointWriter | None) -> None:
        """Write, in a thread, when the running save has ended."""

        def write() -> None:
            if writer:
                writer.join()
            with self._lock:
                self._write()

        thread = threading.Thread(target=write, name="dtrain-score", daemon=True)
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]
        thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        for step in [step for step in self._unwritten if step in self._urls]:
            with contextlib.suppress(StoreError):  # the run itself still knows it, and tries again
                self._retention.score(self._urls[step], self._unwritten[step])
                del self._unwritten[step]
