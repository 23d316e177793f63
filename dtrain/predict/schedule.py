"""Simulates one step of a pipeline: the order of actions on each rank, idle time, and microbatches in flight.

    python -m dtrain plan strategy=pipeline devices=4 pipeline.schedule=zbv

One pipeline is simulated for all replicas: the cost grows with pp x stages x microbatches, not with the number of
ranks.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import le
from typing import Any, NamedTuple

from dtrain.build import build
from dtrain.config.facts import fact
from dtrain.errors import WordsError
from dtrain.planned import PipelineShape


class Action(NamedTuple):
    """`kind`: F forward, B full backward, I input gradients only, W weight gradients only."""

    kind: str
    stage: int
    microbatch: int


COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Cost in units of one forward: a backward has twice the products (as assumed in arXiv 2401.10241)."""


ROUNDS = 4
"""Microbatches for each rank of a pipeline after which its schedule repeats itself."""


def first_rounds(shape: PipelineShape, microbatches: int, pp: int) -> int:
    """Number of microbatches to simulate, if the others run as the last of these."""
    size = microbatches // max(1, microbatches // pp) if fact(shape.order, "rounds") else pp
    return min(microbatches, ROUNDS * size)


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline: for each rank (begin, end, action), in units of one forward."""

    rows: tuple[tuple[tuple[float, float, Action], ...], ...]
    length: float

    @property
    def bubble(self) -> float:
        """Idle fraction of the step, averaged over all ranks."""
        busy = sum(end - begin for row in self.rows for begin, end, _ in row)
        return 1 - busy / (self.length * len(self.rows))


def actions(shape: PipelineShape, pp: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The actions of `rank` of the `pp` ranks of a pipeline, in order."""
    return _actions(_class_of(shape), shape, pp, microbatches, rank)


def _class_of(shape: PipelineShape) -> Any:
    """The class of its order, which may have been defined anew under its old name."""
    return type(build(shape.order))


@lru_cache(maxsize=512)
def _actions(made: Hashable, shape: PipelineShape, pp: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    order = build(shape.order).order(pp, shape.stages, microbatches, rank)
    return tuple(action for action in order if action.microbatch < microbatches)


def orders(shape: PipelineShape, pp: int, microbatches: int) -> list[tuple[Action, ...]]:
    """The actions of every rank. Raises WordsError unless every microbatch passes forward and then backward exactly
    once through each stage, on the rank that holds the stage.
    """
    return _orders(_class_of(shape), shape, pp, microbatches)


@lru_cache(maxsize=64)
def _orders(made: Hashable, shape: PipelineShape, pp: int, microbatches: int) -> list[tuple[Action, ...]]:
    ranks, owners = [actions(shape, pp, microbatches, rank) for rank in range(pp)], shape.owners(pp)
    for rank, mine in enumerate(ranks):
        done = set[tuple[str, int, int]]()
        for kind, stage, index in mine:
            before = "I" if kind == "W" else "F"
            if kind != "F" and (before, stage, index) not in done and (before, stage, index) in mine:
                raise WordsError(
                    f"pipeline.schedule={shape.schedule}: rank {rank} of the pipeline runs {kind} of microbatch "
                    f"{index} in stage {stage} before its {before}. Its order must yield them the other way around."
                )
            done.add((kind, stage, index))
        due = {(stage, index) for stage, owner in enumerate(owners) if owner == rank for index in range(microbatches)}
        passes = [[action[1:] for action in mine if action[0] in kinds] for kinds in ("F", "BI", "BW")]
        if any(len(each) != len(due) or set(each) != due for each in passes):
            _refuse_count(shape, ranks, owners, microbatches)
    return ranks


def _refuse_count(
    shape: PipelineShape, ranks: Sequence[Sequence[Action]], owners: Sequence[int], microbatches: int
) -> None:
    """Raises WordsError for an action that is not run once, by the rank that holds its stage."""
    asked = Counter(
        (rank, Action(kind, action.stage, action.microbatch))
        for rank, mine in enumerate(ranks)
        for action in mine
        for kind in ("IW" if action.kind == "B" else action.kind)
    )
    due = [
        (rank, Action(kind, stage, index))
        for stage, rank in enumerate(owners)
        for kind in "FIW"
        for index in range(microbatches)
    ]
    odd = asked - Counter(due) or Counter(due) - asked
    if odd:
        rank, action = next(iter(odd))
        name = {"F": "forward", "I": "backward", "W": "backward of the weights"}[action.kind]
        raise WordsError(
            f"pipeline.schedule={shape.schedule}: the {name} of microbatch {action.microbatch} in stage {action.stage} "
            f"is run {asked[rank, action]} times by rank {rank} of the pipeline. Its order must yield each action "
            "of its own stages once."
        )


def transfers(shape: PipelineShape, pp: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """The actions of `rank`, with those of kind < and > by which it begins to receive an input and the gradient of an
    output. A rank with one stage receives what its next action needs; others as torch orders it (`_add_send_recv` in
    torch/distributed/pipelining/schedules.py): once another rank has it, or its own later stage.
    """
    return _transfers(_class_of(shape), shape, pp, microbatches)[rank]


@lru_cache(maxsize=64)
def _transfers(made: Hashable, shape: PipelineShape, pp: int, microbatches: int) -> list[tuple[Action, ...]]:
    owners, ranks = shape.owners(pp), [actions(shape, pp, microbatches, rank) for rank in range(pp)]
    last = len(owners) - 1
    if shape.stages == 1:
        return [tuple(each for action in mine for each in _received(action, last)) for mine in ranks]
    mixed, done, begun = [list[Action]() for _ in ranks], set[tuple[str, int, int]](), [0] * pp
    left = sum(map(len, ranks))
    while left:
        before = left
        for rank, mine in enumerate(ranks):
            if begun[rank] == len(mine):
                continue
            action = kind, stage, index = mine[begun[rank]]
            way, source, target = ("F", stage - 1, stage + 1) if kind == "F" else ("B", stage + 1, stage - 1)
            if kind != "W" and 0 <= source <= last and (way, source, index) not in done:
                continue
            mixed[rank].append(action)
            begun[rank] += 1
            left -= 1
            if kind == "W":
                continue
            done.add((way, stage, index))
            if 0 <= target <= last and (kind != "F" or owners[target] != rank):
                mixed[owners[target]].append(Action("<" if kind == "F" else ">", target, index))
        if left == before:
            raise _deadlock(shape, pp, microbatches)
    return [tuple(each) for each in mixed]


def _received(action: Action, last: int) -> Iterator[Action]:
    kind, stage, index = action
    if kind == "F" and stage:
        yield Action("<", stage, index)
    elif kind in "BI" and stage < last:
        yield Action(">", stage, index)
    yield action


class Step(NamedTuple):
    """One action in an order that every rank can follow: where its seconds are in a table of kinds and stages, and the
    places of the result of another rank that it waits for and of its own (NONE, UNUSED: there is none).
    """

    action: Action
    rank: int
    cost: int
    source: int
    target: int


KINDS = "FBIW"
NONE, UNUSED = -1, -2


def _steps(shape: PipelineShape, pp: int, microbatches: int) -> list[Step]:
    return _in_order(_class_of(shape), shape, pp, microbatches)


@lru_cache(maxsize=16)
def _in_order(made: Hashable, shape: PipelineShape, pp: int, microbatches: int) -> list[Step]:
    """Every action of a pipeline, after the ones that it needs. Raises WordsError if there is no such order."""
    owners, ranks = shape.owners(pp), orders(shape, pp, microbatches)
    last, size = len(owners) - 1, len(owners) * microbatches
    done, position, steps = bytearray(2 * size + 2), [0] * pp, list[Step]()
    left = sum(map(len, ranks))
    while len(steps) < left:
        before = len(steps)
        for rank, mine in enumerate(ranks):
            while position[rank] < len(mine):
                action = kind, stage, microbatch = mine[position[rank]]
                base, source, needed = (0, stage - 1, NONE) if kind == "F" else (size, stage + 1, NONE)
                # what its own rank has done before, its order ensures
                if kind != "W" and 0 <= source <= last and owners[source] != rank:
                    needed = base + source * microbatches + microbatch
                    if not done[needed]:
                        break
                target = UNUSED if kind == "W" else base + stage * microbatches + microbatch
                done[target] = 1
                steps.append(Step(action, rank, KINDS.index(kind) * len(owners) + stage, needed, target))
                position[rank] += 1
        if len(steps) == before:
            raise _deadlock(shape, pp, microbatches)
    return steps


def _deadlock(shape: PipelineShape, pp: int, microbatches: int) -> WordsError:
    return WordsError(
        f"pipeline.schedule={shape.schedule}: with {pp} ranks and {microbatches} microbatches its ranks deadlock. Its "
        "order must run first what another rank waits for."
    )


def _begins(
    steps: Sequence[Step], costs: Sequence[float], pp: int, results: int, hop: float
) -> tuple[list[float], float]:
    """(when each step begins, when the last one ends): as early as its inputs allow, one at a time on each rank."""
    clock, done, begins = [0.0] * pp, [0.0] * (results + 2), list[float]()
    done[NONE] = -hop
    for step in steps:
        ready, now = done[step.source] + hop, clock[step.rank]
        begin = ready if ready > now else now
        clock[step.rank] = done[step.target] = begin + costs[step.cost]
        begins.append(begin)
    return begins, max(clock)


def _costs(each: Sequence[float], again: float) -> list[float]:
    """Of every kind of action in every stage."""
    return [(COST[kind] + (again if kind in "BI" else 0.0)) * one for kind in KINDS for one in each]


@lru_cache(maxsize=64)
def timeline(
    shape: PipelineShape,
    pp: int,
    microbatches: int,
    forward: tuple[float, ...] | None = None,
    hop: float = 0.0,
    again: float = 0.0,
) -> Timeline:
    """Schedule every action as early as its inputs allow, one at a time on each rank.

    `forward`: cost of each stage's forward (None: 1 each); `hop`: transfer time between ranks; `again`: fraction of a
    forward that a backward recomputes (1: remat=full).
    """
    steps, costs = _steps(shape, pp, microbatches), _costs(forward or (1.0,) * (pp * shape.stages), again)
    begins, length = _begins(steps, costs, pp, 2 * pp * shape.stages * microbatches, hop)
    rows = [list[tuple[float, float, Action]]() for _ in range(pp)]
    for step, begin in zip(steps, begins, strict=True):
        rows[step.rank].append((begin, begin + costs[step.cost], step.action))
    return Timeline(tuple(map(tuple, rows)), length)


@lru_cache(maxsize=256)
def length_of(
    shape: PipelineShape, pp: int, microbatches: int, forward: tuple[float, ...] | None, hop: float, again: float
) -> float:
    """The length of a `timeline`. Of many microbatches the first rounds are simulated, and the others take as long each
    as those of the last round, and as the slowest rank computes.
    """
    each = forward or (1.0,) * (pp * shape.stages)
    few, costs = first_rounds(shape, microbatches, pp), _costs(each, again)

    def length(count: int) -> float:
        return _begins(_steps(shape, pp, count), costs, pp, 2 * pp * shape.stages * count, hop)[1]

    most = length(few)
    if few == microbatches:
        return most
    ranks, round_ = [0.0] * pp, few // ROUNDS
    for spent, owner in zip(each, shape.owners(pp), strict=True):
        ranks[owner] += spent * (COST["F"] + COST["B"] + again)
    return most + (microbatches - few) * max(*ranks, (most - length(few - round_)) / round_)


def bubble(shape: PipelineShape, pp: int, microbatches: int, again: float = 0.0) -> float:
    """Idle fraction of a step of so many microbatches, with all stages taken as equal."""
    if pp == 1:
        return 0.0
    each = shape.stages * (COST["F"] + COST["B"] + again)
    return 1 - microbatches * each / length_of(shape, pp, microbatches, forward=None, hop=0.0, again=again)


Marks = tuple[bool, ...]


class Spot(NamedTuple):
    """A moment of a rank, when it begins a backward of `kind` in the stage at `place` of its own. `counts`: of each of
    them the microbatches between their forward and the end of their backward; those whose input came and whose forward
    did not begin; whose gradient came and is needed; whose own gradient was sent back and is held; and whose weight
    gradients are still to come. Whether any was finished (`begun`), whether another backward of the stage came after it
    or it was a full one (`added`), and whether the last backward was one of the weights alone (`apart`).
    """

    kind: str
    place: int
    counts: tuple[tuple[int, ...], ...]
    begun: Marks
    added: Marks
    apart: Marks

    @property
    def flying(self) -> tuple[int, ...]:
        return tuple(counts[0] for counts in self.counts)


def spots(shape: PipelineShape, pp: int, microbatches: int, rank: int) -> tuple[Spot, ...]:
    """The moments of a rank at which its backwards begin, less those at which it holds as much or less of the same."""
    return _spots(_class_of(shape), shape, pp, microbatches, rank)


@lru_cache(maxsize=1024)
def _spots(made: Hashable, shape: PipelineShape, pp: int, microbatches: int, rank: int) -> tuple[Spot, ...]:
    mine = [stage for stage, owner in enumerate(shape.owners(pp)) if owner == rank]
    flying, early, received = ([0] * len(mine) for _ in range(3))
    back, left = ([0] * len(mine) for _ in range(2))
    begun, added, apart = ([False] * len(mine) for _ in range(3))
    most = dict[tuple[str, int, tuple[Marks, Marks, Marks]], list[tuple[int, ...]]]()
    for kind, stage, _ in _transfers(made, shape, pp, microbatches)[rank]:
        place = mine.index(stage)
        if kind in "<>":
            (early if kind == "<" else received)[place] += 1
            continue
        if kind == "F":
            flying[place] += 1
            early[place] = max(0, early[place] - 1)  # the first stage, and one whose input is of its own rank, has none
            back[place] *= shape.stages == 1  # what was sent is held until something is sent again
            continue
        now = (*flying, *early, *received, *back, *left)
        others = most.setdefault((kind, place, (tuple(begun), tuple(added), tuple(apart))), [])
        if not any(_is_within(now, other) for other in others):
            others[:] = [*(other for other in others if not _is_within(other, now)), now]
        added[place] |= kind == "B" or stage == 0 or (kind == "I" and apart[place])
        apart[place] = kind == "W" and stage > 0
        if kind != "W":
            back[place] = 1
        if kind == "I":
            left[place] += 1
            continue
        begun[place] = True
        flying[place] -= 1
        received[place] = max(0, received[place] - 1)
        left[place] -= kind == "W"
    return tuple(
        Spot(kind, place, counts=_by_stage(now, len(mine)), begun=begins, added=adds, apart=aparts)
        for (kind, place, (begins, adds, aparts)), every in most.items()
        for now in every
    )


def _by_stage(counts: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple(counts[each::stages] for each in range(stages))


def _is_within(counts: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(map(le, counts, others))


def in_flight(shape: PipelineShape, pp: int, microbatches: int) -> tuple[int, ...]:
    """Maximum number of microbatches in flight in each stage, from their forward to the end of their backward."""
    ranks = [[spot.flying for spot in spots(shape, pp, microbatches, rank)] for rank in range(pp)]
    most = [map(max, zip(*counts, strict=True)) for counts in ranks]
    return tuple(next(most[owner]) for owner in shape.owners(pp))
