"""The screen of a sweep while it runs: on a terminal a table that is drawn again twice a second, elsewhere a line for
each job that ends.

It reads no file: how far a job is stands in the output that the engine gets from it over a pipe.
"""

import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Collection
from types import TracebackType
from typing import Any, Protocol

from dtrain.config.word import cut
from dtrain.secrets import masked, screen
from dtrain.sweep.folder import Job
from dtrain.sweep.log import Log
from dtrain.sweep.proposer import Ended
from dtrain.sweep.space import label
from dtrain.sweep.study import Study, value_of

REDRAW_SECONDS = 0.5
MOST_ROWS = 12
"""Jobs that the table shows."""
WINDOW_SECONDS = 60.0
"""Of which the jobs a minute are counted."""
NO_CURSOR = ("dumb", "unknown")
"""Terminals on which nothing can be drawn again."""
STEP = re.compile(r"step (\d+/\d+) +(.*)")
"""A line of the console logger."""


class Running(Protocol):
    """A job in its slot. `log`: its output; `began`: by the monotonic clock."""

    job: Job
    log: Log
    began: float


class Display(Protocol):
    """A context around the work of the engine, which tells it of its jobs."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def ended(self, job: Job, how: Ended, seconds: float) -> None:
        """A job is over, after so many seconds."""
        ...

    def tick(self, running: Collection[Running]) -> None:
        """These jobs are in slots. Called at least once a second, and whenever something happens."""
        ...


def display(title: str, total: int, done: int, study: Study) -> Display:
    """The display that standard output can show. `done`: jobs of the `total` that were finished before."""
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in NO_CURSOR:
        return Table(title, total, done, study)
    return Lines(total, done, study)


class Lines:
    """A line for each job that has ended."""

    def __init__(self, total: int, done: int, study: Study) -> None:
        self._total, self._study, self._ends = total, study, itertools.count(done + 1)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def ended(self, job: Job, how: Ended, seconds: float) -> None:
        is_rung = bool(job.until) and how.is_evaluated
        number = f"[step {how.step}]" if is_rung else f"[{next(self._ends)}/{self._total}]"
        if how.status == "failed":
            screen.complain(f"{number} {label(job.values)} failed: {how.error}")
        else:
            took = f" · {seconds:.1f} s" if seconds else ""
            line = f"{number} {how.status} {label(job.values)}{_figures(self._study, how)}{took}"
            screen.say(screen.on_one_line(line))

    def tick(self, running: Collection[Running]) -> None:
        pass


class Table:
    """The jobs that run, and above them how many are done and have failed, the best, jobs a minute and the time left.
    A failure has a line of its own at once, above the table.
    """

    def __init__(self, title: str, total: int, done: int, study: Study) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title, self._total, self._done, self._failed, self._study = title, total, done, 0, study
        self._ends = deque[float]()
        self._begun = time.monotonic()
        self._best: tuple[float, str] | None = None
        self._drawn = 0.0
        self._live = Live(console=Console(), auto_refresh=False, transient=True)

    def __enter__(self) -> "Table":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def ended(self, job: Job, how: Ended, seconds: float) -> None:
        self._ends.append(time.monotonic())
        if job.until and how.is_evaluated:
            return
        self._done += how.status == "finished"
        self._failed += how.status == "failed"
        if how.status == "failed":
            screen.complain(f"{label(job.values)} failed: {how.error}")
        elif how.status == "finished" and len(self._study.metrics) == 1:
            [loss] = self._study.losses(how.metrics, how.loss)
            if self._best is None or loss < self._best[0]:
                self._best = loss, f"best{_figures(self._study, how)} · {label(job.values)}"

    def tick(self, running: Collection[Running]) -> None:
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._live.update(self._picture(running), refresh=True)

    def _picture(self, running: Collection[Running]) -> Any:
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid.grid(padding=(0, 2), expand=False)
        for each in itertools.islice(running, MOST_ROWS):
            step, figures = _progress(each.log)
            row = label(each.job.values), step, figures, _clock(time.monotonic() - each.began)
            grid.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in row))
        more = len(running) - MOST_ROWS
        lines = [Text(self._summary(len(running)), style="bold"), *([Text(self._best[1])] if self._best else [])]
        return Group(*lines, grid, *([Text(f"and {more} more")] if more > 0 else []))

    def _summary(self, running: int) -> str:
        now, left = time.monotonic(), max(0, self._total - self._done - self._failed)
        while self._ends and now - self._ends[0] > WINDOW_SECONDS:
            self._ends.popleft()
        rate = len(self._ends) / max(1.0, min(WINDOW_SECONDS, now - self._begun))
        parts = [self._title, f"{self._done} of {self._total} finished", f"{running} running"]
        parts += [f"{self._failed} failed"] * bool(self._failed)
        if rate:
            parts += [f"{60 * rate:.0f} jobs a minute", f"left {_clock(left / rate)}"]
        return " · ".join(parts)


def _progress(log: Log) -> tuple[str, str]:
    """The newest step of a job out of all, and its figures, as its console logger told them."""
    match = STEP.fullmatch(log.newest(b"step "))
    return (match[1], cut(screen.on_one_line(masked(match[2])), 60)) if match else ("", "")


def _figures(study: Study, ended: Ended) -> str:
    if not ended.is_evaluated:
        return ""
    return "".join(f" · {name} {value_of(name, ended.metrics, ended.loss):.4g}" for name in study.metrics)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
