"""A search as a proposer: trials drawn from the results of earlier ones, each remembered before its job begins.

Nothing but files is kept: what a search knows is read again from its trials and the results of their jobs. Trial n is
drawn from the results of the trials up to n - ahead; the later ones count as running, whether they are or not, so that
one worker draws the same values whatever was quick and whatever was killed. Of jobs that other workers run it does not
wait for the results.
"""

import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtrain.sweep import trials
from dtrain.sweep.drawing import Sampler
from dtrain.sweep.folder import Job, State
from dtrain.sweep.proposer import Ended
from dtrain.sweep.study import Study
from dtrain.sweep.trials import Trial

ATTEMPTS = 20
"""How often values that an earlier trial has are drawn again; then that trial's result counts twice."""


class Search:
    """`make(values)`: the job that has them; `known`: the trials of the folder, with the states of their jobs."""

    def __init__(
        self,
        root: str,
        study: Study,
        sampler: Sampler,
        read: Callable[[int], Trial | None],
        make: Callable[[Mapping[str, Any]], Job],
        known: Iterable[tuple[Trial, State]],
    ) -> None:
        self._root, self._study, self._sampler, self._read, self._make = root, study, sampler, read, make
        self._trials, self._of_job = list[Trial](), dict[str, list[Trial]]()
        self._unended, self._free = dict[int, Trial](), 0
        self._elsewhere = set[str]()
        """Jobs that other workers run."""
        self._again = deque[Job]()
        """Jobs that were drawn by a command that has ended before them."""
        for trial, state in known:
            if state.status == "finished":
                trial.losses = study.losses(state.figures, state.loss, state.last)
            self._again.extend(self._add(trial))

    def next(self) -> Job | None:
        if self._again:
            return self._again.popleft()
        while self._number < self._count and not self._is_too_early(self._number):
            trial = self._read(self._number) or self._drawn(self._number)
            if trial and (jobs := self._add(trial)):
                return jobs[0]
        return None

    def is_done(self) -> bool:
        return not self._again and self._number >= self._count

    def tell(self, job: Job, ended: Ended) -> None:
        if ended.status == "elsewhere":
            self._elsewhere.add(job.name)
            return
        self._elsewhere.discard(job.name)
        if ended.status == "stopped":
            return
        finished = ended.status == "finished"
        losses = self._study.losses(ended.metrics, ended.loss, ended.last) if finished else self._study.worst()
        for trial in self._of_job[job.name]:
            trial.losses = losses
            self._unended.pop(trial.number, None)

    @property
    def _number(self) -> int:
        """The lowest one that no trial has: the next, or one whose file is gone."""
        while self._free < len(self._trials) and self._trials[self._free].number == self._free:
            self._free += 1
        return self._free

    @property
    def _count(self) -> int:
        return self._study.trials or 0

    def _is_too_early(self, number: int) -> bool:
        """Whether a result is missing from which trial `number` is to be drawn."""
        late = (trial for trial in self._unended.values() if trial.number <= number - self._study.ahead)
        return any(trial.job not in self._elsewhere for trial in late)

    def _drawn(self, number: int) -> Trial | None:
        """Draw a trial and remember it; None if another worker was faster, whose trial is to be read."""
        past = [
            trial if trial.number <= number - self._study.ahead else replace(trial, losses=None)
            for trial in self._trials[:number]
        ]
        first = self._study.begin[number] if number < len(self._study.begin) else {}
        for attempt in range(ATTEMPTS):
            job = self._make({**self._sampler.draw(number, attempt, past), **first})
            if job.name not in self._of_job:
                break
        trial = Trial(number, job.values, job.name)
        return trial if trials.record(self._root, trial) else None

    def _add(self, trial: Trial) -> list[Job]:
        """The job of a trial, unless it has ended or is that of an earlier trial."""
        bisect.insort(self._trials, trial, key=lambda each: each.number)
        same = self._of_job.setdefault(trial.job, [])
        trial.losses = same[0].losses if same else trial.losses
        same.append(trial)
        if trial.losses is not None:
            return []
        self._unended[trial.number] = trial
        return [replace(self._make(trial.values), name=trial.job)] if len(same) == 1 else []
