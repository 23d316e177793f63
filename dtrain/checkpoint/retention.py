"""Which checkpoints stay: the newest ones, every n-th, the best by a metric; of what goes the commit goes first, and
never before a newer one stands.
"""

import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dtrain.checkpoint import commit as commits
from dtrain.errors import LeaseError, StoreError
from dtrain.storage import lease, store
from dtrain.storage.attempts import Attempt, in_order, lease_of, listed, place

Best = Literal["lowest", "highest"]
SCORES = "METRICS.json"
"""Beside a commit: what was measured of it."""


@dataclass(frozen=True)
class Policy:
    """`every` steps between checkpoints (0: only when asked) and `ephemeral` between those that go as soon as a newer
    one stands; the newest `keep` stay (None: all), and every step divisible by `keep_every`, and the one whose metric
    `best` is the lowest, or the highest.
    """

    every: int
    keep: int | None
    keep_every: int | None = None
    best: str | None = None
    ephemeral: int = 0
    best_is: Best = "lowest"

    def due(self, step: int) -> bool:
        return any(period and step % period == 0 for period in (self.every, self.ephemeral))

    def passing(self, step: int) -> bool:
        """Whether it was saved only to be there until the next one is."""
        return bool(self.ephemeral) and step % self.ephemeral == 0 and not (self.every and step % self.every == 0)

    def staying(self, steps: list[int], scores: Mapping[int, float]) -> set[int]:
        """Of the steps with a valid checkpoint, newest first, those that stay."""
        lasting = [step for step in steps if not self.passing(step)]
        periodic = {step for step in lasting if self.keep is None or (self.keep_every and step % self.keep_every == 0)}
        return self.relied_on(steps, scores) | periodic

    def relied_on(self, steps: list[int], scores: Mapping[int, float]) -> set[int]:
        """Of those that stay, the ones for whose sake others go: the newest and the best."""
        lasting = [step for step in steps if not self.passing(step)]
        newest = {*steps[:1], *lasting[: max(1, self.keep or 0)]}
        scored = {step: scores[step] for step in lasting if math.isfinite(scores.get(step, math.nan))}
        sign = 1 if self.best_is == "lowest" else -1
        return newest | (
            {min(scored, key=lambda step: (sign * scored[step], -step))} if scored and self.best else set()
        )


@dataclass
class Retention:
    """Of the checkpoints under `out`; rank 0 has it. They are listed once, before the first is removed: what is under
    `out` after that, this run wrote itself, because it holds the lease. `damaged` has the places of attempts that a
    restore passed over. What it was told or read is not read again, so a save costs the same however many checkpoints
    there are.
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
        """This one is being written from now on: it stays until another is begun, whatever its step."""
        name = url.rsplit("/", 1)[-1]
        self._living = url
        self._begun[url] = Attempt(lease_of(name), step, name, url, {})

    def committed(self, url: str) -> None:
        """This one is known to be valid."""
        self._valid[url] = True

    def score(self, url: str, metrics: Mapping[str, float]) -> None:
        """Note beside the commit at `url` what was measured of it. Raises StoreError."""
        best = self.policy.best
        if best is not None and best in metrics and url not in self._scores:
            self._scores[url] = float(metrics[best])
            store.publish(store.join(url, SCORES), json.dumps(dict(metrics)).encode())

    def apply(self, step: int) -> None:
        """Remove what need not stay now that the checkpoint of `step` stands. Raises StoreError, after all that can be
        removed is.

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
        """The work due now; None, and the turn is over, when there is none."""
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
        attempts = self._attempts()
        stay = self._staying([one for one in attempts if one.step <= step])
        oldest = min((one.step for one in stay), default=step)
        faults = list[str]()
        for one in reversed(attempts):
            kept = (
                one.step > step or one.url == self._living or one in stay
            )  # what has done more steps is never removed
            if not kept and (self._may_be_valid(one) or one.step < oldest or self._is_left_over(one)):
                lease.verify(self.out)  # it may be long since the commit
                faults += self._remove(one)
        if faults:
            raise StoreError("; ".join(faults[:3]))

    def _attempts(self) -> list[Attempt]:
        """All that is known under `out`, newest first."""
        if self._known is None:
            self._known = {one.url: one for one in listed(self.out)}
        for url in list(self._begun):
            if url != self._living:
                self._known.setdefault(url, self._begun.pop(url))
        return in_order({**self._begun, **self._known}.values())

    def _staying(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Of the attempts, newest first, those that stay. The newest and the best are read before anything goes for
        their sake; others are taken for what they seem to be.
        """
        doubtful = list(attempts)
        while True:
            first = dict[int, Attempt]()
            for one in doubtful:
                if self._may_be_valid(one):
                    first.setdefault(one.step, one)
            scores = {at: self._score(one) for at, one in first.items()} if self.policy.best else {}
            stay = [first[at] for at in self.policy.staying(list(first), scores)]
            wrong = [
                first[at] for at in self.policy.relied_on(list(first), scores) if not self._is_valid(first[at].url)
            ]
            if not wrong:
                return stay
            doubtful = [one for one in doubtful if one not in wrong]

    def _may_be_valid(self, one: Attempt) -> bool:
        """By what is known without reading it."""
        return place(one.url) not in self.damaged and self._valid.get(one.url, one.is_committed)

    def _is_left_over(self, one: Attempt) -> bool:
        """Begun by a run that died, or by a save that failed."""
        return not one.is_committed and not store.exists(store.join(one.url, commits.NAME))

    def _remove(self, one: Attempt) -> Iterable[str]:
        if not _ours(one.url):
            return
        try:
            store.remove(store.join(one.url, commits.NAME))
            store.remove(one.url)
            step = one.url.rsplit("/", 1)[0]
            if not store.children(step):
                store.remove(step)
        except StoreError as error:
            yield str(error)
            return
        for known in (self._known or {}, self._begun, self._valid, self._scores):
            known.pop(one.url, None)

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
            try:
                told: dict[str, Any] = json.loads(store.read(store.join(one.url, SCORES)))
                self._scores[one.url] = float(told[str(self.policy.best)])
            except (StoreError, ValueError, KeyError, TypeError, RecursionError):
                self._scores[one.url] = math.nan
        return self._scores.get(one.url, math.nan)


def _ours(url: str) -> bool:
    """Whether a folder may go: not what a link leads to."""
    return not store.is_local(url) or not any(
        path.is_symlink() for path in (store.local_path(url), store.local_path(url).parent)
    )
