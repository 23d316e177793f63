"""Removes old checkpoints. The newest, every n-th and the best by a metric are kept. A checkpoint loses its commit
first, and never before a newer one is committed.
"""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

from dtrain.checkpoint import commit as commits
from dtrain.config.period import Period, is_due
from dtrain.errors import LeaseError, StoreError
from dtrain.storage import lease, store
from dtrain.storage.attempts import (
    SCORES,
    Attempt,
    best_step,
    in_order,
    lease_of,
    listed,
    place,
    remove,
    scores_of,
)

Best = Literal["lowest", "highest"]
T = TypeVar("T")
STREAMS = 16
"""Checkpoints that are removed at a time: each waits for the storage, and after a smaller `keep` they are many."""


@dataclass(frozen=True)
class Policy:
    """`every`: steps between checkpoints (0: only on request); `ephemeral`: between those that are removed as soon as a
    newer one is committed. The newest `keep` (None: all), every step divisible by `keep_every`, and the first one with
    the lowest or highest metric `best` are kept.
    """

    every: Period
    keep: int | None
    keep_every: int | None = None
    best: str | None = None
    ephemeral: int = 0
    best_is: Best = "lowest"

    def due(self, step: int) -> bool:
        return is_due(self.every, step) or is_due(self.ephemeral, step)

    def passing(self, step: int) -> bool:
        """Whether the checkpoint of this step is kept only until the next one is committed."""
        return is_due(self.ephemeral, step) and not is_due(self.every, step)

    def staying(self, steps: list[int], scores: Mapping[int, float]) -> set[int]:
        """The steps to keep, newest first, out of those with a valid checkpoint."""
        lasting = [step for step in steps if not self.passing(step)]
        periodic = {step for step in lasting if self.keep is None or (self.keep_every and step % self.keep_every == 0)}
        return self.relied_on(steps, scores) | periodic

    def relied_on(self, steps: list[int], scores: Mapping[int, float]) -> set[int]:
        """The steps in favour of which others are removed: the newest and the best."""
        lasting = [step for step in steps if not self.passing(step)]
        newest = {*steps[:1], *lasting[: max(1, self.keep or 0)]}
        best = best_step({step: scores[step] for step in steps if step in scores}, self.best_is) if self.best else None
        return newest if best is None else {*newest, best}


@dataclass
class Retention:
    """Retention under `out`, on rank 0. Checkpoints are listed once, before the first removal: everything later was
    written by this run, which holds the lease. `damaged`: the places of attempts that a restore skipped. Nothing is
    read twice, so the cost of a save does not grow with the number of checkpoints.
    """

    out: str
    policy: Policy
    damaged: set[str] = field(default_factory=set)
    _living: str = ""
    _known: dict[str, Attempt] | None = None
    _begun: dict[str, Attempt] = field(default_factory=dict)
    _valid: dict[str, bool] = field(default_factory=dict)
    _scores: dict[str, float] = field(default_factory=dict)
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _wanted: int | None = None
    _busy: bool = False

    def begin(self, url: str, step: int) -> None:
        """Note that a save of this step begins; its files are kept until another save begins."""
        name = url.rsplit("/", 1)[-1]
        self._living = url
        self._begun[url] = Attempt(lease_of(name), step, name, url, {})

    def committed(self, url: str) -> None:
        """Note that the checkpoint is valid."""
        self._valid[url] = True

    def score(self, url: str, metrics: Mapping[str, float]) -> None:
        """Write metrics beside the commit at `url`. Raises StoreError."""
        best = self.policy.best
        if best is not None and best in metrics and url not in self._scores:
            try:
                store.publish(store.join(url, SCORES), json.dumps(dict(metrics)).encode())
            except StoreError as error:
                if error.kind != "exists":
                    raise
            self._scores[url] = float(metrics[best])

    def scores(self) -> dict[int, float]:
        """Step -> metric `best` of each checkpoint under `out` that has it. Not while checkpoints are removed."""
        valid = [one for one in self._attempts() if self._may_be_valid(one)]
        scores = {one.step: self._score(one) for one in reversed(valid)}
        return {step: score for step, score in scores.items() if math.isfinite(score)}

    def apply(self, step: int) -> None:
        """Remove the checkpoints that need not be kept now that `step` is committed. Raises StoreError after all other
        removals.

        Only one thread removes: if another one is at work, it takes a further turn, and this call returns at once.
        """
        failed: StoreError | None = None
        with self._turn:
            self._wanted = step
            if self._busy:
                return
            self._busy = True
        try:
            while (wanted := self._next()) is not None:
                try:
                    self._apply(wanted)
                except LeaseError:
                    raise
                except StoreError as error:
                    failed = error
        except BaseException:
            with self._turn:
                self._wanted, self._busy = None, False
                self._turn.notify_all()
            raise
        if failed:
            raise failed

    def _next(self) -> int | None:
        """The next removal to do; None if there is none, which ends the turn."""
        with self._turn:
            step, self._wanted = self._wanted, None
            if step is None:
                self._busy = False
                self._turn.notify_all()
            return step

    def settled(self, seconds: float) -> bool:
        """Whether all removals end within `seconds`."""
        with self._turn:
            return self._turn.wait_for(lambda: not self._busy, max(0.0, seconds))

    def _apply(self, step: int) -> None:
        attempts = self._attempts()
        stay = self._staying([one for one in attempts if one.step <= step])
        oldest = min((one.step for one in stay), default=step)
        faults, kept = list[str](), {one.url for one in stay} | {self._living}
        # checkpoints with more steps are never removed
        doubtful = iter([one for one in reversed(attempts) if one.step <= step and one.url not in kept])

        def obsolete(one: Attempt) -> bool:
            return self._may_be_valid(one) or one.step < oldest or self._is_left_over(one)

        while several := [*islice(doubtful, STREAMS)]:
            gone = [one for one in several if obsolete(one)]
            if gone:
                lease.verify(self.out)  # the commit may be long ago
            faults += [fault for each in _in_threads(self._remove, gone) for fault in each]
        if faults:
            raise StoreError("; ".join(faults[:3]))

    def _attempts(self) -> list[Attempt]:
        """All known attempts under `out`, newest first."""
        if self._known is None:
            self._known = {one.url: one for one in listed(self.out)}
        for url in list(self._begun):
            if url != self._living:
                self._known.setdefault(url, self._begun.pop(url))
        return in_order({**self._begun, **self._known}.values())

    def _staying(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """The attempts to keep, newest first. The newest and the best are verified before anything is removed in their
        favour; others are not read.
        """
        doubtful = list(attempts)
        while True:
            first = dict[int, Attempt]()
            for one in doubtful:
                if self._may_be_valid(one):
                    first.setdefault(one.step, one)
            scores = {at: self._score(one) for at, one in first.items()} if self.policy.best else {}
            stay = [first[at] for at in self.policy.staying(list(first), scores)]
            relied_on = [first[at] for at in self.policy.relied_on(list(first), scores)]
            wrong = [one for one in relied_on if not self._is_valid(one.url)]
            if not wrong:
                return stay
            doubtful = [one for one in doubtful if one not in wrong]

    def _may_be_valid(self, one: Attempt) -> bool:
        """Whether the attempt may be valid, judged without reading it."""
        return place(one.url) not in self.damaged and self._valid.get(one.url, one.is_committed)

    def _is_left_over(self, one: Attempt) -> bool:
        """Whether the attempt was left by a dead run or a failed save."""
        return not one.is_committed and not store.exists(store.join(one.url, commits.NAME))

    def _remove(self, one: Attempt) -> list[str]:
        """Why it could not be removed; empty if it is gone, or not ours."""
        if not _ours(one.url):
            return []
        try:
            remove(one.url)
        except StoreError as error:
            return [str(error)]
        for known in (self._known or {}, self._begun, self._valid, self._scores):
            known.pop(one.url, None)
        return []

    def _is_valid(self, url: str) -> bool:
        if url not in self._valid:
            try:
                commits.read(url)
                self._valid[url] = True
            except commits.DamagedError:
                self._valid[url] = False
        return self._valid[url]

    def _score(self, one: Attempt) -> float:
        if one.url not in self._scores and SCORES in one.files:
            self._scores[one.url] = scores_of(one).get(str(self.policy.best), math.nan)
        return self._scores.get(one.url, math.nan)


def _in_threads(act: Callable[[Attempt], T], attempts: Sequence[Attempt]) -> list[T]:
    """The result of `act` for each, in threads if they are several."""
    if len(attempts) < 2:
        return [*map(act, attempts)]
    with ThreadPoolExecutor(len(attempts), "dtrain-tidy") as pool:
        return [*pool.map(act, attempts)]


def _ours(url: str) -> bool:
    """Whether a folder may be removed: neither it nor its parent is a link."""
    return not store.is_local(url) or not any(
        path.is_symlink() for path in (store.local_path(url), store.local_path(url).parent)
    )
