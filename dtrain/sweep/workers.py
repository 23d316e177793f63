"""A sweep whose jobs are run by workers that somebody starts for this command: it waits for them, and tells of each job
as it ends.
"""

import time
from collections.abc import Callable, Sequence

from dtrain.errors import StoreError
from dtrain.lifecycle import signals
from dtrain.sweep import folder, trials
from dtrain.sweep.crew import Crew
from dtrain.sweep.folder import Job, State
from dtrain.sweep.jobs import Judged, Request
from dtrain.sweep.proposer import Ended

LOOK_SECONDS = 2.0
"""Between two looks at the jobs."""


class Workers:
    """Runs the jobs of a sweep by a crew. `jobs` gives the jobs so far, `ended` is called when one is over."""

    def __init__(
        self,
        root: str,
        crew: Crew,
        jobs: Callable[[], Sequence[Job]],
        ended: Callable[[Job, Ended, float], None],
    ) -> None:
        self._root, self._crew, self._jobs, self._tell = root, crew, jobs, ended
        self.finished, self.failed, self.stopped = list[str](), dict[str, Ended](), list[str]()
        self._done = {name for name, state in self._states().items() if state.status == "finished"}

    def run(self) -> None:
        """Returns when all workers have ended. Raises what the crew raises, and KeyboardInterrupt when asked twice."""
        signals.listen()
        asked = False
        with self._crew as crew:
            while crew.is_working():
                time.sleep(LOOK_SECONDS)
                if signals.stop_request() and not asked:
                    asked = True
                    crew.ask()
                self._look()
        self._look(last=True)

    def is_something_left(self) -> bool:
        return any(job.name not in self._done and job.name not in self.failed for job in self._jobs())

    def _states(self) -> dict[str, State]:
        return folder.states(self._root, self._jobs())

    def _look(self, *, last: bool = False) -> None:
        """Tell of jobs that have ended; `last`: of those that have failed too."""
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
                ended = Ended("finished", step=state.step, loss=state.loss)
                ended.metrics |= state.figures
                ended.last |= state.last
                self._tell(job, ended, 0.0)
            elif last and state.status == "failed":
                error = str(causes.get(job.name, {}).get("error") or "unknown")
                self.failed[job.name] = Ended("failed", 1, error=error)
                self._tell(job, self.failed[job.name], 0.0)


def by_crew(
    crew: Crew, request: Request, judged: Judged, every: Sequence[Job], ended: Callable[[Job, Ended, float], None]
) -> Workers:
    def listed() -> Sequence[Job]:
        drawn = trials.every(request.root, request.space) if judged.study.is_search else ()
        return [Job(trial.values, (), trial.job) for trial in drawn] or every

    return Workers(request.root, crew, listed, ended)
