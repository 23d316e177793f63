"""The engine of a sweep: keeps its slots full of jobs until none is left.

    the command (no torch) ── zygote (loads torch) ── a child for each job

The command composes and resolves the words of a job and sends the plan; the child holds the lease, trains and saves.
Its output comes back over a pipe. A child ends with the zygote and so with the command, whatever kills it; the same
command then runs what is missing. Who may write a job is decided by the lease of its run alone.
"""

import math
import os
import selectors
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from dtrain import secrets
from dtrain.config.environment import SWEEP_BEGAN, WORKERS
from dtrain.errors import StoreError, WordsError, first_line
from dtrain.launcher import process
from dtrain.lifecycle import failure, signals, unwatched
from dtrain.lifecycle.kernel_log import memory_kills
from dtrain.planned import Plan
from dtrain.report.facts import alike
from dtrain.secrets import screen
from dtrain.storage import lease, options, store
from dtrain.sweep import folder, stop_request
from dtrain.sweep.folder import Job
from dtrain.sweep.live import Display
from dtrain.sweep.log import Log
from dtrain.sweep.proposer import Ended, Proposer
from dtrain.sweep.running import Running, start
from dtrain.sweep.space import label

AGAIN = ("memory", "killed", "exited", "hung", "lost", "storage", "gpu", "timeout", "preempted")
"""Kinds of failures that may pass; the others are the job's own."""
LOOK_SECONDS = 5.0
"""Between two looks at the jobs that other workers run, and for a request to stop."""
MOST_TROUBLES = 10
"""After so many looks in vain, with no job running, the sweep ends."""
PATIENCE_SECONDS = 60.0
"""After so long, a job that another host seems to run is tried, in case that host is gone."""
TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Decided:
    """A job that may begin. `config`: its config.yaml; `environment`: variables of its slot."""

    plan: Plan
    config: str
    environment: Mapping[str, str]


@dataclass
class Engine:
    """`slots`: jobs at a time; `retries`: of a failure that may pass; `stop_at_failure`: begin none after one."""

    root: str
    decide: Callable[[Job, int], Decided]
    """(job, number of its slot)"""
    slots: int
    retries: int
    stop_at_failure: bool
    modules: Sequence[str]
    """Those of dtrain that its jobs need."""
    seconds: float | None
    """After so long no more jobs begin."""
    proposer: Proposer
    display: Display

    def __post_init__(self) -> None:
        self.finished, self.stopped, self.failed = list[str](), list[str](), dict[str, Ended]()
        self._waiting, self._running = deque[Job](), dict[int, Running]()
        """Jobs that were proposed and have not begun; those in slots."""
        self._elsewhere = list[Job]()
        """Jobs that another worker runs, or that wait for the storage."""
        self._troubles = 0
        """How often in a row no job could begin."""
        self._looked, self._since = 0.0, dict[str, float]()
        """When they were looked at, and since when each is run elsewhere."""
        self._quiet = 0.0
        """No job is proposed before this time."""
        self._until = math.inf if self.seconds is None else time.monotonic() + self.seconds
        self._tries = Counter[str]()
        self._free = list(range(self.slots))
        self._selector = selectors.DefaultSelector()
        self._asked, self._began = 0, float(os.environ.get(SWEEP_BEGAN, time.time()))
        self._request, self._looked_for_request = 0, time.monotonic()
        """The newest request to stop before this worker began, and when it looked for a newer one."""
        self._crew = os.environ.get(WORKERS, "")
        self._watched = 0.0
        """When it was last looked whether jobs are suspended."""

    def run(self) -> None:
        """Returns when every job that the proposer gives is finished or has failed for good, or when the sweep was
        asked to stop. Raises KeyboardInterrupt when asked twice.
        """
        signals.listen()
        self._request = stop_request.newest(self.root, self._crew)
        with process.scratch("sweep") as self._scratch:
            try:
                while self._running or (self._may_begin() and self.is_something_left()):
                    self._look_for_request()
                    self._look_elsewhere()
                    self._fill()
                    self._listen()
                    self._watch()
                    self._pass_on()
                    self.display.tick(self._running.values())
            finally:
                self._end_all()
                unwatched.remove_stale()
                self._selector.close()

    def _over(self) -> bool:
        return bool(signals.stop_request()) or (self.stop_at_failure and bool(self.failed))

    def _may_begin(self) -> bool:
        return not self._over() and time.monotonic() < self._until

    def is_something_left(self) -> bool:
        """Whether a job is still to begin, or runs elsewhere."""
        return bool(self._waiting or self._elsewhere) or not self.proposer.is_done()

    # begin

    def _fill(self) -> None:
        """Begin jobs while slots are free; then have one more proposed, which waits for the next slot."""
        while self._may_begin() and self._propose() and self._free:
            job = self._waiting.popleft()
            try:
                if not self._is_taken(job):
                    self._begin(job, self._free[0])
            except WordsError as error:  # what it needs has changed since it was judged
                self._settle(job, Ended("failed", error.exit_code, "words", first_line(error)), 0.0)
            except (StoreError, OSError) as error:
                self._elsewhere += [job, *self._waiting]
                self._waiting.clear()
                self._wait(label(job.values), error)

    def _propose(self) -> bool:
        """Whether a job is there to begin."""
        if self._waiting or time.monotonic() < self._quiet:
            return bool(self._waiting)
        try:
            job = self.proposer.next()
        except (StoreError, OSError) as error:
            self._wait("the next job", error)
            return False
        self._waiting.extend([job] if job else [])
        return bool(job)

    def _wait(self, what: str, error: Exception) -> None:
        """Try again later: the storage or the system has trouble now. Raises the error if it does not pass."""
        self._troubles += 1
        if self._troubles > MOST_TROUBLES and not self._running:
            raise error
        screen.complain(f"{what} waits: {first_line(error)}", begin="note: ")
        self._looked = time.monotonic()
        self._quiet = self._looked + LOOK_SECONDS

    def _is_taken(self, job: Job) -> bool:
        """Whether another worker runs the job, and it is looked at again later, or has finished it."""
        url = store.join(self.root, job.name)
        if store.exists(store.join(url, "result.json")):
            state = folder.state(self.root, job.name)
            is_there = state.is_evaluated and job.until is not None and state.step >= job.until
            if state.status == "finished" or is_there:
                status: Literal["finished", "stopped"] = "stopped" if is_there else "finished"
                ended = Ended(status, step=state.step, loss=state.loss, metrics={**state.figures}, last={**state.last})
                self._settle(job, ended, 0.0)
                return True
        holder, since = lease.holder(url)[0], self._since.setdefault(job.name, time.monotonic())
        # on another host nobody sees whether it lives: the lease decides, which watches it
        if holder == "held" or (holder == "unknown" and time.monotonic() - since < PATIENCE_SECONDS):
            self._leave_to_others(job)
            return True
        del self._since[job.name]
        return self._has_failed_elsewhere(job)

    def _has_failed_elsewhere(self, job: Job) -> bool:
        """Whether another worker has met a failure in the job since this one began, and need not be followed."""
        facts = {} if self._tries[job.name] else folder.failure(self.root, job.name)
        may_pass = facts.get("kind") in AGAIN and facts.get("tries", 0) <= self.retries
        if may_pass or not facts.get("time", 0) > self._began:
            return False
        self._settle(job, Ended("failed", 1, str(facts.get("kind")), str(facts.get("error"))), 0.0)
        return True

    def _leave_to_others(self, job: Job) -> None:
        self._elsewhere.append(job)
        self.proposer.tell(job, Ended("elsewhere"))

    def _begin(self, job: Job, slot: int) -> None:
        decided = self.decide(job, slot)
        scratch = self._scratch / f"{job.name[:80]}-{self._tries[job.name]}"
        scratch.mkdir(exist_ok=True)
        (scratch / "log").unlink(missing_ok=True)
        log = Log(scratch / "log", store.join(decided.plan.out, "log.txt"))
        arguments = (decided.plan.to_dict(), decided.config, decided.environment, options.hand_over(), str(scratch))
        try:
            child = start(arguments, self.modules)
        except OSError:
            log.close(keep=False)
            raise
        self._free.remove(slot)
        self._troubles = 0
        self._tries[job.name] += 1
        plan = decided.plan
        running = Running(
            job=job,
            slot=slot,
            child=child,
            scratch=scratch,
            log=log,
            began=time.monotonic(),
            microbatch=plan.batch.microbatch,
            patience=plan.backend["timeout"],
            memory_kills=memory_kills(),
        )
        self._running[slot] = running
        self._selector.register(log, selectors.EVENT_READ, running)
        if hasattr(os, "pidfd_open"):  # elsewhere the end of its output is its end
            self._selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, running)

    # end

    def _listen(self) -> None:
        """Read output, and end jobs whose process has ended."""
        for key, _ in self._selector.select(TICK_SECONDS):
            running: Running = key.data
            if key.fileobj is not running.log:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                self._end(running)
            elif self._running.get(running.slot) is running and not running.log.read():
                self._selector.unregister(running.log)
                if not hasattr(os, "pidfd_open"):
                    self._end(running)
        for running in self._running.values():
            running.log.publish()

    def _watch(self) -> None:
        """Look whether jobs give a sign of life, every second in which this process is not suspended itself."""
        if time.monotonic() - self._watched > TICK_SECONDS:
            self._watched = time.monotonic()
            for running in self._running.values():
                running.look(TICK_SECONDS)

    def _end(self, running: Running) -> None:
        with suppress(ProcessLookupError):
            os.killpg(running.child.pid, signal.SIGKILL)  # what it forked
        ended = running.outcome(self.root)
        with suppress(KeyError, ValueError):
            self._selector.unregister(running.log)
        running.log.close(keep=ended.kind != "lease")
        shutil.rmtree(running.scratch, ignore_errors=True)
        del self._running[running.slot]
        self._free.append(running.slot)
        job = running.job
        if ended.kind == "preempted" and not self._over():  # somebody else asked this job alone to stop
            ended = replace(ended, status="failed")
        by_system = ended.status == "failed" and ended.kind in ("killed", "exited", "lost", "memory", "preempted")
        if by_system and not running.cause(self.root):
            self._write_cause(job, ended)
        if ended.kind == "lease":
            self._since[job.name] = time.monotonic()
            self._leave_to_others(job)
            return
        if ended.status == "failed" and self._may_begin() and (next_try := self._next_try(running, ended)):
            smaller = f" with {next_try.words[-1]}" * (next_try is not job)
            screen.complain(f"{label(job.values)}: {ended.error}; it starts again{smaller}", begin="note: ")
            self._waiting.append(next_try)
            return
        self._settle(job, ended, time.monotonic() - running.began)

    def _next_try(self, running: Running, ended: Ended) -> Job | None:
        """The job as it is tried again, out of memory with half the microbatch; None if that could not help."""
        job = running.job
        if ended.kind == "memory":
            is_free = not {"microbatch", "accumulate"} & job.values.keys() and self.retries > 0
            return job.with_microbatch(running.microbatch // 2) if is_free and running.microbatch > 1 else None
        return job if ended.kind in AGAIN and self._tries[job.name] <= self.retries else None

    def _write_cause(self, job: Job, ended: Ended) -> None:
        """Write failure.json for a process that could not."""
        facts = {
            "rank": 0,
            "time": time.time(),
            "kind": ended.kind,
            "error": ended.error,
            "message": ended.error,
            "exit_code": 1,
            "tries": self._tries[job.name],
        }
        with suppress(StoreError):
            if lease.holder(store.join(self.root, job.name))[0] in ("left", "free"):
                failure.save(store.join(self.root, job.name), facts)

    def _settle(self, job: Job, ended: Ended, seconds: float) -> None:
        self._tries.pop(job.name, None)  # it may be proposed again
        if ended.status == "finished":
            self.finished.append(job.name)
        elif ended.status == "failed":
            self.failed[job.name] = ended
        elif not (job.until and ended.is_evaluated):
            self.stopped.append(job.name)
        self.proposer.tell(job, ended)
        self.display.ended(job, ended, seconds)

    def _look_elsewhere(self) -> None:
        """Put the jobs of other workers back into the queue, which asks whether they are finished."""
        if self._elsewhere and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            self._waiting.extend(self._elsewhere)
            self._elsewhere.clear()

    # stop

    def _look_for_request(self) -> None:
        """Take a request to stop, from whatever host, as this process's own SIGTERM."""
        if time.monotonic() - self._looked_for_request < LOOK_SECONDS or self._over():
            return
        self._looked_for_request = time.monotonic()
        with suppress(StoreError):  # the next look may see it
            if stop_request.newest(self.root, self._crew) > self._request:
                screen.complain("asked to stop by dtrain sweep stop: jobs save and stop", begin="note: ")
                os.kill(os.getpid(), signal.SIGTERM)

    def _pass_on(self) -> None:
        """Have every job save and stop when the sweep was asked to stop, or a failure ends it."""
        number = signals.stop_request() or (signal.SIGTERM if self._over() else 0)
        if number and not self._asked:
            self._asked = number
            for running in self._running.values():
                with suppress(ProcessLookupError):
                    os.kill(running.child.pid, number)
                    os.kill(running.child.pid, signal.SIGCONT)  # one that is suspended saves too

    def _end_all(self) -> None:
        for running in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(running.child.pid, signal.SIGKILL)
            running.child.wait()
            running.log.close(keep=True)
        self._running.clear()


def summary(failed: Iterable[Ended]) -> list[str]:
    """How many jobs failed of each cause, a line each. Causes that differ in numbers alone are one."""
    causes: dict[str, list[str]] = {}
    for error in (secrets.masked(ended.error) for ended in failed):
        causes.setdefault(alike(error), []).append(error)
    return [f"{len(errors)} x {errors[0]}" for errors in sorted(causes.values(), key=len, reverse=True)]
