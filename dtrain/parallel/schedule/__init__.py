"""Schedules of a pipeline: in which order each rank runs the forwards and backwards of its stages. Without torch.

A schedule is a class with `order`; its word in conf/pipeline/ states how many stages a rank holds and where
(`stages`, `more`, `layout`), how many microbatches it needs (`least`, in multiples of the ranks, and whole `rounds`),
whether it splits a backward in two (`splits_backward`), and which class of torch.distributed.pipelining runs it
(`runner`); an order without one is run as it stands.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

from dtrain.predict.schedule import Action as Action


class Schedule(Protocol):
    """A pipeline schedule."""

    def order(self, pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
        """The actions of `rank`, of `pp` ranks with `stages` stages each, for `count` microbatches."""
        ...


def rounds(
    pp: int, stages: int, count: int, rank: int, *, ahead: int
) -> tuple[int, Callable[[int], Action], Callable[[int, str], Action]]:
    """(forwards before the first backward, the n-th forward, the n-th backward) of schedules that go through their
    stages in rounds.
    """
    size = count // max(1, count // pp)

    def nth(step: int, kind: str, *, last_first: bool) -> Action:
        turn, place = divmod(step, size * stages)
        local, microbatch = divmod(place, size)
        return Action(kind, (stages - 1 - local if last_first else local) * pp + rank, turn * size + microbatch)

    warm = min((stages - 1) * size + ahead * (pp - 1 - rank), count * stages)
    return warm, lambda step: nth(step, "F", last_first=False), lambda step, kind: nth(step, kind, last_first=True)


class Counts:
    """The next microbatch of every kind of action of every stage."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = defaultdict(int)
        self._open: list[Action] = []

    def __getitem__(self, of: tuple[str, int]) -> int:
        return self._next[of]

    def take(self, kind: str, stage: int) -> Action:
        counted = ("I", "W") if kind == "B" else (kind,)
        action = Action(kind, stage, self._next[counted[0], stage])
        for each in counted:
            self._next[each, stage] += 1
        if kind == "I":
            self._open.append(action)
        return action

    def oldest(self) -> Iterator[Action]:
        """The backward of weights whose inputs were first, if one is open."""
        for first in self._open[:1]:
            self._open.pop(0)
            yield Action("W", first.stage, first.microbatch)
