"""A job that a command waits for: whether it has ended, why it has not begun, and a scheduler that does not answer."""

import time

from dtrain.errors import PreflightError
from dtrain.launcher import Detached
from dtrain.secrets import screen

LOOK_SECONDS, TELL_SECONDS = 10.0, 30.0
"""Time between two questions why a job waits, and after which the same answer is told again."""


class Watch:
    """Tells why `job` of the run at `out` waits: when the reason changes, and every 30 s."""

    def __init__(self, launcher: Detached, out: str, job: str) -> None:
        self._launcher, self._out, self._job = launcher, out, job
        self._asked = self._told = float("-inf")
        self._said = ""

    def is_there(self) -> bool:
        """Whether the job has not ended, as far as its scheduler answers."""
        try:
            if self._job not in self._launcher.jobs(self._out):
                return False
            if time.monotonic() - self._asked >= LOOK_SECONDS:
                self._asked = time.monotonic()
                self._tell(self._launcher.waiting(self._job))
        except PreflightError as error:  # the scheduler is started again; jobs run on meanwhile
            self._tell(f"the scheduler of job {self._job} cannot be reached; {error}")
        return True

    def _tell(self, sentence: str) -> None:
        """Figures and times after a semicolon change all the time."""
        now, is_new = time.monotonic(), sentence.partition(";")[0] != self._said.partition(";")[0]
        if sentence and (is_new or now - self._told >= TELL_SECONDS):
            self._told = now
            screen.complain(sentence, begin="note: ")
        self._said = sentence
