"""Workers of a sweep that a launcher of Hydra starts: each is `dtrain sweep work` on its folder. The command waits for
them, and tells of each job as it ends.
"""

import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.errors import StoreError, WordsError, first_line
from dtrain.launcher import process
from dtrain.lifecycle import signals
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.sweep import folder, trials
from dtrain.sweep.folder import Job, State
from dtrain.sweep.foreign import Foreign, launch
from dtrain.sweep.jobs import Judged, Request
from dtrain.sweep.proposer import Ended

LOOK_SECONDS = 2.0
"""Between two looks at the jobs."""
TAIL = 4000
"""Characters of what a worker printed last that are told when it fails."""


@dataclass(frozen=True)
class Watch:
    """The command that a worker serves, on the same host: its pid, and a file that is there until it asks to stop."""

    pid: int
    wanted: str

    def is_over(self) -> bool:
        return not Path(self.wanted).exists() or process.is_gone(self.pid, 0)


def work(_: Any, words: Sequence[str], watch: Watch | None) -> tuple[int, str]:
    """In a worker: `dtrain sweep work <words>`. Returns its exit code and the end of what it complained of."""
    with tempfile.TemporaryFile() as complaints:
        command = [sys.executable, "-m", "dtrain", "sweep", "work", *words]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=complaints)
        asked = False
        while child.poll() is None:
            if watch and not asked and watch.is_over():
                child.terminate()  # its jobs save
                asked = True
            time.sleep(0.1)
        complaints.seek(0)
        return child.returncode, complaints.read().decode(errors="replace")[-TAIL:]


class Workers:
    """Runs the jobs of a sweep by workers. `launch` starts them, with a file that is there until they are asked to
    stop, waits for them and returns what `work` returned in each; `jobs` gives the jobs so far, `ended` is called when
    one is over.
    """

    def __init__(
        self,
        root: str,
        launch: Callable[[Path], Iterable[tuple[int, str]]],
        jobs: Callable[[], Sequence[Job]],
        ended: Callable[[Job, Ended, float], None],
    ) -> None:
        self._root, self._launch, self._jobs, self._tell = root, launch, jobs, ended
        self.finished, self.failed, self.stopped = list[str](), dict[str, Ended](), list[str]()
        self._done: set[str] = set()
        self._error: Exception | None = None
        self._results = list[tuple[int, str]]()

    def run(self) -> None:
        """Returns when all workers have ended. Raises what the launcher raises."""
        signals.listen()
        self._done = {name for name, state in self._states().items() if state.status == "finished"}
        with process.scratch("workers") as scratch:
            wanted = scratch / "wanted"
            wanted.touch()
            thread = threading.Thread(target=self._wait, args=[wanted], name="dtrain-workers", daemon=True)
            thread.start()
            while thread.is_alive():
                thread.join(LOOK_SECONDS)
                if signals.stop_request():
                    wanted.unlink(missing_ok=True)
                self._look()
        if self._error:
            raise self._error
        self._look(last=True)

    def is_something_left(self) -> bool:
        return any(job.name not in self._done and job.name not in self.failed for job in self._jobs())

    def _wait(self, wanted: Path) -> None:
        try:
            self._results = [*self._launch(wanted)]
        except Exception as error:  # a launcher raises what it likes
            self._error = error if isinstance(error, WordsError) else WordsError(f"hydra/launcher: {first_line(error)}")

    def _states(self) -> dict[str, State]:
        return folder.states(self._root, self._jobs())

    def _look(self, *, last: bool = False) -> None:
        """Tell of jobs that have ended; `last`: of those that have failed too, and of workers that did."""
        try:
            states = self._states()
            causes = folder.failures(self._root) if last else {}
        except StoreError:
            if last:
                raise
            return
        for job in self._jobs():
            state = states[job.name]
            if state.status == "finished" and job.name not in self._done:
                self._done.add(job.name)
                self.finished.append(job.name)
                figures = dict(state.figures)
                self._tell(job, Ended("finished", step=state.step, loss=state.loss, metrics=figures), 0.0)
            elif last and state.status == "failed":
                error = str(causes.get(job.name, {}).get("error") or "unknown")
                self.failed[job.name] = Ended("failed", 1, error=error)
                self._tell(job, self.failed[job.name], 0.0)
        for code, complaints in self._results if last else ():
            if code not in (0, 1) and not signals.stop_request():
                screen.complain(f"a worker ended with exit code {code}: {secrets.masked(complaints.strip())}")


def workers(
    hydras: Foreign,
    request: Request,
    judged: Judged,
    every: Sequence[Job],
    ended: Callable[[Job, Ended, float], None],
) -> Workers:
    """Workers that a launcher of Hydra's starts. Those of this host share its slots and end with this command."""
    root, number = request.root, judged.config.sweep.workers
    parallel = judged.config.sweep.parallel if hydras.is_queue else max(1, judged.slots // (number or 1))
    words = [
        str(store.local_path(root).resolve()) if store.is_local(root) else root,
        *(str(word) for word in request.words if word.key == "trust"),
        f"sweep.parallel={parallel}",
        f"sweep.retries={judged.config.sweep.retries}",
        f"sweep.fail={judged.config.sweep.fail}",
    ]

    def listed() -> Sequence[Job]:
        drawn = trials.every(root, request.space) if judged.study.is_search else ()
        return [Job(trial.values, (), trial.job) for trial in drawn] or every

    def started(wanted: Path) -> Iterable[tuple[int, str]]:
        watch = None if hydras.is_queue else Watch(os.getpid(), str(wanted))
        return launch(hydras, functools.partial(work, words=words, watch=watch), number)

    return Workers(root, started, listed, ended)
