"""Which checkpoints stay: the newest ones, every n-th, the best by a metric; of what goes the commit goes first, and never before a newer one stands."""

import json
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain import lease, store
from dtrain.checkpoint import commit as commits
from dtrain.errors import LeaseError, StoreError

SCORES = "METRICS.json"
"""Beside a commit: what was measured of it."""


@dataclass(frozen=True)
class Policy:
    """`every` steps between checkpoints (0: only when asked) and `ephemeral` between those that go as soon as a newer one stands; the newest
    `keep` stay (None: all), and every step divisible by `keep_every`, and the one with the lowest metric `best`."""

    every: int
    keep: int | None
    keep_every: int | None = None
    best: str | None = None
    ephemeral: int = 0

    def due(self, step: int) -> bool:
        return any(period and step % period == 0 for period in (self.every, self.ephemeral))

    def passing(self, step: int) -> bool:
        """Whether it was saved only to be there until the next one is."""
        return bool(self.ephemeral) and step % self.ephemeral == 0 and not (self.every and step % self.every == 0)

    def staying(self, steps: list[int], scores: Mapping[int, float]) -> set[int]:
        """Of the steps with a valid checkpoint, newest first, those that stay."""
        lasting = [step for step in steps if not self.passing(step)]
        stay = {*steps[:1], *lasting[: max(1, self.keep) if self.keep is not None else None]}
        stay |= {step for step in lasting if self.keep_every and step % self.keep_every == 0}
        scored = {step: scores[step] for step in lasting if math.isfinite(scores.get(step, math.nan))}
        return stay | ({min(scored, key=lambda step: (scored[step], -step))} if scored and self.best else set())


@dataclass
class Retention:
    """Of the checkpoints under `out`; rank 0 has it, and what it was told or read is not read again. `living`: what is being written now."""

    out: str
    policy: Policy
    living: str = ""
    _valid: set[str] = field(default_factory=set)
    _scores: dict[str, float] = field(default_factory=dict)
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _wanted: int | None = None
    _busy: bool = False

    def committed(self, url: str) -> None:
        """This one is known to be valid."""
        self._valid.add(url)

    def score(self, url: str, metrics: Mapping[str, float]) -> None:
        """Note beside the commit at `url` what was measured of it. Raises StoreError."""
        best = self.policy.best
        if best is not None and best in metrics and url not in self._scores:
            self._scores[url] = float(metrics[best])
            store.publish(store.join(url, SCORES), json.dumps(dict(metrics)).encode())

    def apply(self, step: int) -> None:
        """Remove what need not stay now that the checkpoint of `step` stands. Raises StoreError, after all that can be removed is.

        One thread at a time does: when another is at it, that one goes over it once more, and this returns at once.
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
        """What is wanted by now; None, and the turn is over, when that is nothing."""
        with self._turn:
            step, self._wanted = self._wanted, None
            if step is None:
                self._busy = False
                self._turn.notify_all()
            return step

    def settled(self, seconds: float) -> bool:
        """Whether, within so many seconds, nothing is being removed any more."""
        with self._turn:
            return self._turn.wait_for(lambda: not self._busy, max(0.0, seconds))

    def _apply(self, step: int) -> None:
        attempts = commits.attempts(self.out)
        valid: dict[int, list[str]] = {}
        for at, url in attempts:
            if self._is_valid(url):
                valid.setdefault(at, []).append(url)
        scores = {at: self._score(urls[0]) for at, urls in valid.items()} if self.policy.best else {}
        stay = self.policy.staying(list(valid), scores)
        oldest = min(stay, default=step)
        faults = list[str]()
        for at, url in reversed(attempts):
            kept = url == self.living or (at in stay and url == valid[at][0])
            if not kept and (at in valid or at < oldest or self._is_left_over(at, url, step)):
                lease.verify(self.out)  # it may be long since the commit
                faults += self._remove(at, url)
        if faults:
            raise StoreError("; ".join(faults[:3]))

    def _is_left_over(self, at: int, url: str, step: int) -> bool:
        """Begun by a run that died."""
        return at <= step and not store.exists(store.join(url, commits.NAME))

    def _remove(self, at: int, url: str) -> Iterable[str]:
        if not _ours(url):
            return
        self._valid.discard(url)
        try:
            store.remove(store.join(url, commits.NAME))
            store.remove(url)
            if not store.children(commits.folder(self.out, at)):
                store.remove(commits.folder(self.out, at))
        except StoreError as error:
            yield str(error)

    def _is_valid(self, url: str) -> bool:
        if url not in self._valid:
            try:
                commits.read(url)
            except commits.DamagedError:
                return False
            self._valid.add(url)
        return True

    def _score(self, url: str) -> float:
        if url not in self._scores:
            try:
                told: dict[str, Any] = json.loads(store.read(store.join(url, SCORES)))
                self._scores[url] = float(told[str(self.policy.best)])
            except (StoreError, ValueError, KeyError, TypeError):
                return math.nan
        return self._scores[url]


def _ours(url: str) -> bool:
    """Whether a folder may go: not what a link leads to."""
    return not store.is_local(url) or not any(path.is_symlink() for path in (store.local_path(url), store.local_path(url).parent))
