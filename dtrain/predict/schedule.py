"""How a pipeline spends its step: what each rank computes in which order, how long it waits, and what it keeps
meanwhile.

    python -m dtrain plan strategy=pipeline devices=4 pipeline.schedule=zbv

The orders are those of torch.distributed.pipelining, which runs them; a test holds these against them. A pipeline is
simulated once, for all its replicas alike: the cost grows with pp x stages x microbatches, not with the ranks beside
them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from dtrain.planned import PipelineShape


class Action(NamedTuple):
    """`kind`: F forward, B whole backward, I backward of the inputs alone, W of the weights alone."""

    kind: str
    stage: int
    microbatch: int


COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""In forwards of one stage: a backward multiplies twice as often (arXiv 2401.10241 takes the same)."""


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline in forwards of a stage: when each rank does what, (begin, end, action)."""

    rows: tuple[tuple[tuple[float, float, Action], ...], ...]
    length: float

    @property
    def bubble(self) -> float:
        """The share of the step that a rank waits, the mean over all ranks."""
        busy = sum(end - begin for row in self.rows for begin, end, _ in row)
        return 1 - busy / (self.length * len(self.rows))


def actions(shape: PipelineShape, pp: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The actions of `rank` of the `pp` ranks of a pipeline, in order."""
    found = ORDERS[shape.schedule](pp, shape.stages, microbatches, rank)
    return tuple(action for action in found if action.microbatch < microbatches)


@lru_cache(maxsize=64)
def timeline(
    shape: PipelineShape,
    pp: int,
    microbatches: int,
    forward: tuple[float, ...] | None = None,
    hop: float = 0.0,
    again: float = 0.0,
) -> Timeline:
    """Every action as early as what it needs is there, a rank doing one at a time.

    `forward` is the cost of each stage's forward (None: 1 each), `hop` the time from one rank to the next, `again` the
    share of a forward that a backward does once more (1: remat=full).
    """
    owners = shape.owners(pp)
    each = forward or (1.0,) * len(owners)
    orders = [actions(shape, pp, microbatches, rank) for rank in range(pp)]
    done: dict[Action, float] = {}
    clock, position, rows = [0.0] * pp, [0] * pp, [list[tuple[float, float, Action]]() for _ in range(pp)]
    left = sum(map(len, orders))
    while left:
        before = left
        for rank in range(pp):
            while position[rank] < len(orders[rank]):
                action = orders[rank][position[rank]]
                ready = _ready(action, owners, done, hop)
                if ready is None:
                    break
                cost = (COST[action.kind] + (again if action.kind in "BI" else 0.0)) * each[action.stage]
                begin = max(clock[rank], ready)
                clock[rank] = done[action] = begin + cost
                rows[rank].append((begin, clock[rank], action))
                position[rank] += 1
                left -= 1
        if left == before:
            raise ValueError(
                f"pipeline.schedule={shape.schedule}: with {pp} ranks and {microbatches} microbatches its ranks wait "
                "for each other"
            )
    return Timeline(tuple(map(tuple, rows)), max(clock))


def in_flight(shape: PipelineShape, pp: int, microbatches: int) -> tuple[int, ...]:
    """Of each stage the most microbatches whose activations wait at one time: from their forward to the end of their
    backward.
    """
    most = [0] * (pp * shape.stages)
    for rank in range(pp):
        held: dict[int, int] = defaultdict(int)
        for action in actions(shape, pp, microbatches, rank):
            held[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)


def _ready(action: Action, owners: Sequence[int], done: Mapping[Action, float], hop: float) -> float | None:
    """When what it needs of its neighbours is there; None: not yet known. Of its own rank the order sees to it."""
    kind, stage, microbatch = action
    if kind == "W" or (kind == "F" and stage == 0) or (kind != "F" and stage == len(owners) - 1):
        return 0.0
    other = stage - 1 if kind == "F" else stage + 1
    ends = [
        done[source]
        for source in (Action(name, other, microbatch) for name in ("F" if kind == "F" else "BI"))
        if source in done
    ]
    return ends[0] + hop * (owners[other] != owners[stage]) if ends else None


def _gpipe(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """All forwards, then all backwards in the same order (arXiv 1811.06965)."""
    for kind in "FB":
        for microbatch in range(count):
            yield Action(kind, rank, microbatch)


def _1f1b(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """As many forwards as there are ranks behind this one and itself, then one backward, one forward (arXiv
    1806.03377).
    """
    ahead = min(count, pp - rank)
    yield from (Action("F", rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(count):
        yield Action("B", rank, microbatch)
        if ahead + microbatch < count:
            yield Action("F", rank, ahead + microbatch)


def _looped_bfs(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """Every microbatch through one stage before the next stage begins; backwards from the last (arXiv 2211.05953)."""
    mine = range(rank, pp * stages, pp)
    yield from (Action("F", stage, microbatch) for stage in mine for microbatch in range(count))
    yield from (Action("B", stage, microbatch) for stage in reversed(mine) for microbatch in reversed(range(count)))


def _rounds(
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


def _interleaved_1f1b(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """1f1b whose ranks hold several stages each (arXiv 2104.04473)."""
    warm, forward, backward = _rounds(pp, stages, count, rank, ahead=2)
    for step in range(count * stages + warm):
        if step < count * stages:
            yield forward(step)
        if step >= warm:
            yield backward(step - warm, "B")


def _interleaved_zero_bubble(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """interleaved_1f1b whose backwards of weights come `rank` microbatches later and fill what would be waiting (arXiv
    2401.10241).
    """
    warm, forward, backward = _rounds(pp, stages, count, rank, ahead=1)
    late = 0
    for step in range(count * stages + warm):
        if step < count * stages:
            yield forward(step)
        if step >= warm:
            yield backward(step - warm, "I")
            if step - warm >= rank:
                yield backward(late, "W")
                late += 1
    yield from (backward(step, "W") for step in range(late, count * stages))


class _Counts:
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


def _zbv(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """Two stages on each rank, in a V; every backward in two (arXiv 2401.10241, section 6)."""
    here, back, most, counts = rank, 2 * pp - 1 - rank, max(2 * pp - 1, count), _Counts()

    def some(text: str, times: int = 1) -> Iterator[Action]:
        for _ in range(times):
            for kind, end in zip(text[::2], text[1::2], strict=True):
                yield counts.take(kind, here if end == "0" else back)

    yield from some("F0", 2 * (pp - rank) - 1)
    yield from some("F1F0", rank)
    yield from some("F1I1W1", pp - rank)
    while counts["F", back] < counts["F", here] or counts["F", here] < most:
        yield from some("F0", int(counts["F", here] < most))
        yield from some("I0W0F1I1W1")
    yield from some("I0I1", rank)
    yield from some("I0W0", pp - rank)
    yield from some("W1", counts["I", back] - counts["W", back])
    yield from some("W0", counts["I", here] - counts["W", here])


def _dualpipev(pp: int, stages: int, count: int, rank: int) -> Iterator[Action]:
    """DualPipe (arXiv 2412.19437) with half the copies, in a V (https://hackmd.io/@ufotalent/r1lVXsa9Jg)."""
    here, back, counts = rank, 2 * pp - 1 - rank, _Counts()

    def some(text: str, times: int = 1) -> Iterator[Action]:
        for _ in range(times):
            for kind, end in zip(text[::2], text[1::2], strict=True):
                yield from counts.oldest() if kind == "W" else [counts.take(kind, here if end == "0" else back)]

    yield from some("F0", (pp - rank - 1) * 2)
    yield from some("F0F1", rank + 1)
    yield from some("I1W*F1", pp - rank - 1)
    yield from some("F0B1F1B0", count - pp * 2 + rank + 1)
    yield from some("B1F1B0", pp - rank - 1)
    split = False  # from the middle of the last backwards on, those of weights are kept for the end
    for turn in range(rank + 1):
        split = split or (turn == (rank + 1) // 2 and rank % 2 == 1)
        yield counts.take("I" if split else "B", back)
        split = split or (turn == (rank + 1) // 2 and rank % 2 == 0)
        yield counts.take("I" if split else "B", here)
    yield from some("W*I0" if split else "W*B0", pp - rank - 1)
    yield from some("W*", rank + 1)


ORDERS: Mapping[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "looped_bfs": _looped_bfs,
    "interleaved_1f1b": _interleaved_1f1b,
    "interleaved_zero_bubble": _interleaved_zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
