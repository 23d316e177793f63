"""Stopping early as a proposer: each job is proposed again and again, to stop at the next rung that it may go to, and
goes on from its own checkpoint.

Nothing but the jobs' own files is kept. A rule tells from the losses at the rungs how far each job may go
(dtrain/sweep/rungs.py, population.py); whatever has not come so far is proposed. A search that proposes the jobs learns
of each the loss at its first rung.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dtrain.sweep.folder import Job
from dtrain.sweep.history import Curves
from dtrain.sweep.proposer import Ended, Proposer
from dtrain.sweep.rungs import Curve, at

LOOK_SECONDS = 1.0
"""Between two looks for the first checkpoint of a job that another one waits for."""

Rule = Callable[[Sequence[Job], Mapping[str, Curve], int], Sequence[tuple[Job, int]]]
"""(jobs in their order, losses, how many jobs there will be) -> every job that there is by now, with the step that it
may go to.
"""


class Stopping:
    """`source` proposes `total` jobs; `rungs`: the steps of the stops, the last of which is the end of a run; `loss`:
    of a job that stopped; `told`: how the source is told it; `is_saved`: whether the job of that name has a checkpoint.
    """

    def __init__(
        self,
        source: Proposer,
        rule: Rule,
        rungs: Sequence[int],
        curves: Curves,
        *,
        total: int,
        loss: Callable[[Ended], float],
        told: Callable[[float], Ended],
        is_saved: Callable[[str], bool],
    ) -> None:
        self._source, self._rule, self._rungs, self._curves, self._total = source, rule, rungs, curves, total
        self._loss, self._told, self._is_saved = loss, told, is_saved
        self._of_source = dict[str, Job]()
        self._jobs, self._goals = dict[str, Job](), dict[str, int]()
        """Every job, and the step that it may go to."""
        self._ready = list[str]()
        """The jobs that are to go on, those that have come farthest first."""
        self._running, self._over = dict[str, int](), set[str]()
        """The goal of each job that was proposed; those that this command does not try again."""
        self._saved, self._looked = set[str](), -math.inf
        self._is_new = False
        """Whether something is known that was not judged."""

    def next(self) -> Job | None:
        while (job := self._source.next()) is not None:
            self._of_source[job.name] = job
            self._curves.setdefault(job.name, {})  # those of all folders are read
            self._learn(job)
        self._judge()
        name = next(filter(self._is_free, self._ready), None)
        if name is None:
            return None
        self._ready.remove(name)
        job, goal = self._jobs[name], self._goals[name]
        self._running[name] = goal
        return job if goal == self._rungs[-1] else replace(job, words=(*job.words, f"stop_after={goal}"), until=goal)

    def is_done(self) -> bool:
        if self._running or not self._source.is_done():
            return False
        self._judge()
        return not self._ready

    def tell(self, job: Job, ended: Ended) -> None:
        if ended.status == "elsewhere":
            return
        goal = self._running.pop(job.name)
        if ended.step > goal:  # another worker was faster
            del self._curves[job.name]
        elif ended.is_evaluated:
            self._curves[job.name][ended.step] = self._loss(ended)
        elif ended.status == "failed":
            self._curves[job.name][goal] = math.inf
        if ended.status == "failed" or self._reached(job.name) < goal:
            self._over.add(job.name)
        self._learn(job)

    def report(self) -> str:
        """How many jobs came to their end and how many stopped early, and the steps to there."""
        stops = [[step for step, loss in self._curves[name].items() if loss < math.inf] for name in self._jobs]
        ends = [max(steps) for steps in stops if steps]
        finished, early = ends.count(self._rungs[-1]), sum(end < self._rungs[-1] for end in ends)
        taken = sum(job.parent[1] for name, job in self._jobs.items() if job.parent and self._curves[name])
        is_left = not self.is_done() or any(self._reached(name) < self._goals[name] for name in self._jobs)
        return (
            f"{finished} of {len(stops)} jobs are finished, {early} stopped early: {sum(ends) - taken:,} steps of "
            f"{self._total * self._rungs[-1]:,}" + "; the same command goes on" * is_left
        )

    def _learn(self, job: Job) -> None:
        """Take notice of a job's rungs, and tell the source the loss at the first one."""
        self._is_new = True
        loss = at(self._curves[job.name], self._rungs[0])
        if job.name in self._of_source and loss is not None:
            self._source.tell(job, self._told(loss))

    def _judge(self) -> None:
        """Apply the rule, if anything is new."""
        if not self._is_new:
            return
        self._is_new, jobs = False, list(self._of_source.values())
        ruled = self._rule(jobs, self._curves, len(jobs) if self._source.is_done() else self._total)
        self._jobs = {job.name: job for job, _ in ruled}
        self._goals = {job.name: goal for job, goal in ruled}
        left = [name for name in self._jobs if name not in self._running and name not in self._over]
        left = [name for name in left if self._reached(name) < self._goals[name]]
        self._ready = sorted(left, key=self._reached, reverse=True)

    def _is_free(self, name: str) -> bool:
        """Whether no job is still to begin with the newest checkpoint of this one, which may remove it when it goes
        on.
        """
        newest = name, self._reached(name)
        return all(job.parent != newest or self._has_begun(job) for job in self._jobs.values())

    def _has_begun(self, job: Job) -> bool:
        """Whether a job has a checkpoint of its own, or will have none."""
        if job.name in self._saved or job.name in self._over or self._curves[job.name]:
            return True
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self._saved |= {job.name} if self._is_saved(job.name) else set()
        return job.name in self._saved

    def _reached(self, name: str) -> int:
        """The steps of the newest stop of a job, or those of the checkpoint that it is to begin with."""
        parent = self._jobs[name].parent if name in self._jobs else None
        return max(self._curves[name], default=parent[1] if parent else 0)
