"""Who says which job of a sweep comes next: the engine asks a proposer whenever it has room, and tells it how each job
ended.

The grid is the simplest one: a list of jobs. A search draws its next job from the results so far.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dtrain.sweep.folder import Job


@dataclass
class Ended:
    """How one attempt at a job ended: the contents of its outcome.json. `metrics`: the best ones where these are asked;
    `last`: of its last step. `elsewhere`: another worker runs it, and the engine asks again later how it ended.
    """

    status: Literal["finished", "failed", "stopped", "elsewhere"]
    exit_code: int = 0
    kind: str = ""
    error: str = ""
    step: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    @property
    def is_evaluated(self) -> bool:
        """Whether the metrics are those of its last step: it came where it was to go."""
        return self.status == "finished" or (self.status == "stopped" and not self.exit_code)


class Proposer(Protocol):
    """The order of the jobs of a sweep."""

    def next(self) -> Job | None:
        """The next job to begin; None: none as long as nothing more has ended. A job may come again, with other words
        but the same folder, and then goes on from its last checkpoint. Raises StoreError; the engine asks again.
        """
        ...

    def is_done(self) -> bool:
        """Whether `next` will never give a job again, whatever comes of those that run."""
        ...

    def tell(self, job: Job, ended: Ended) -> None:
        """A job that it proposed has ended, or is run by another worker."""
        ...


class Listed:
    """The jobs of a list, in its order."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = deque(jobs)

    def next(self) -> Job | None:
        return self._jobs.popleft() if self._jobs else None

    def is_done(self) -> bool:
        return not self._jobs

    def tell(self, job: Job, ended: Ended) -> None:
        """The list is as it is."""
