"""Schedules of a pipeline: in which order each rank runs the forwards and backwards of its stages. Without torch.

A schedule is a class with `order`; its word in conf/pipeline/ states how many stages a rank holds and where
(`stages`, `more`, `layout`), how many microbatches it needs (`least`, in multiples of the ranks, and whole `rounds`),
whether it splits a backward in two (`splits_backward`), and which class of torch.distributed.pipelining runs it
(`runner`); without one, the actions run in the order of the schedule.
"""

from collections import Counter
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
    """(number of forwards before the first backward, the n-th forward, the n-th backward) of schedules that run rounds
    of microbatches through each stage in turn.
    """
    size = count // max(1, count // pp)

    def nth(step: int, kind: str, *, last_first: bool) -> Action:
        turn, place = divmod(step, size * stages)
        local, microbatch = divmod(place, size)
        return Action(kind, (stages - 1 - local if last_first else local) * pp + rank, turn * size + microbatch)

    warm = min((stages - 1) * size + ahead * (pp - 1 - rank), count * stages)
    return warm, lambda step: nth(step, "F", last_first=False), lambda step, kind: nth(step, kind, last_first=True)


class VShape:
    """The actions of a rank that holds two stages of a V: 0, on the way down, and 1, on the way back."""

    def __init__(self, pp: int, rank: int) -> None:
        self._stages = {"0": rank, "1": 2 * pp - 1 - rank}
        self._deferred: list[Action] = []
        self.counts = Counter[str]()
        """Action, such as F0 -> how often it was taken."""

    def take(self, text: str, times: int = 1) -> Iterator[Action]:
        """The next microbatch of each action of `text`, such as F0B1; `W*`: of the oldest backward of weights that is
        open, if there is one.
        """
        for action in [text[place : place + 2] for place in range(0, len(text), 2)] * times:
            kind, end = action[0], action[1]
            if end != "*":
                first = Action(kind, self._stages[end], self.counts[action.replace("B", "I")])
                self.counts.update([f"I{end}", f"W{end}"] if kind == "B" else [action])
                self._deferred += [first] if kind == "I" else []
                yield first
            elif self._deferred:
                yield Action("W", *self._deferred.pop(0)[1:])
