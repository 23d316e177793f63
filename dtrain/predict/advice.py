"""Suggests changes of a few words that make a plan fit, the cheapest first.

Each change is tried: its words are resolved and predicted again. Its cost is the seconds of a step times the number of
ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dtrain.config import files
from dtrain.config.facts import Part, about, fact
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict.prediction import Prediction
from dtrain.predict.shapes import BYTES
from dtrain.predict.state_bytes import holding_of

MOST = 3
TRIES = 40
"""Number of predictions after which no more changes are combined: each takes up to a tenth of a second."""
SEARCHES = 4
"""Number of predictions as long as one of a plan with strategy=auto, which searches again."""
DEARER = 1.05
"""A change that takes more ranks than the plan has comes before others only if it costs so much less."""
Try = Callable[[tuple[str, ...]], tuple[Plan, Prediction]]
"""Added words -> the plan with them, and its prediction. Raises WordsError if they are invalid."""


@dataclass(frozen=True)
class Change:
    words: tuple[str, ...]
    plan: Plan
    prediction: Prediction

    @property
    def layout(self) -> tuple[Any, ...]:
        """Equal for changes that differ in small options alone."""
        plan = self.plan
        parts = (plan.strategy["_target_"], plan.strategy.get("offload"), plan.remat, plan.precision)
        return plan.mesh, plan.batch, *map(str, parts)

    @property
    def cost(self) -> float:
        """Seconds summed over all ranks; peak bytes if the time is not known."""
        time = self.prediction.time
        return time.seconds * self.plan.world if time else float(self.prediction.memory.peak)


def advise(plan: Plan, attempt: Try, layouts: Sequence[Change] = ()) -> list[Change]:
    """At most three changes that make the plan fit, one per kind; two or three are combined if fewer are not enough.
    `layouts`: the best of a search of all that the words leave open, which are always among them.
    """
    ladders, tried = [ladder for ladder in _ladders(plan) if ladder], [0]

    def rank(change: Change) -> float:
        return change.cost * (DEARER if change.plan.world > plan.world else 1)

    def counted(words: tuple[str, ...]) -> tuple[Plan, Prediction]:
        tried[0] += SEARCHES if _is_searched(plan) else 1
        return attempt(words)

    changes: dict[tuple[int, ...], Change] = {}
    for index, ladder in enumerate(ladders):
        fitting = [change for words in ladder if (change := _fitting(words, counted))]
        if fitting:
            changes[(index,)] = min(fitting, key=lambda change: change.cost)
    for together in (2, 3):
        if len(changes) >= MOST:
            break
        for indices in combinations(range(len(ladders)), together):
            if tried[0] > TRIES or any(set(enough) <= set(indices) for enough in changes):
                continue
            change = _fitting(tuple(word for index in indices for word in ladders[index][-1]), counted)
            if change:
                changes[indices] = change
    best = sorted(changes.items(), key=lambda item: rank(item[1]))[:MOST]
    mildest = [_milder([ladders[index] for index in indices], change, attempt) for indices, change in best]
    different: dict[Any, Change] = {}
    for change in sorted((*layouts, *mildest), key=rank):
        different.setdefault(change.layout, change)
    shown = [*different.values()][: MOST - len(layouts)]
    return sorted({change.layout: change for change in (*shown, *layouts)}.values(), key=rank)


def _fitting(words: tuple[str, ...], attempt: Try) -> Change | None:
    try:
        plan, prediction = attempt(words)
    except WordsError:  # it conflicts with other words
        return None
    return Change(words, plan, prediction) if prediction.fits else None


def _milder(ladders: list[list[tuple[str, ...]]], best: Change, attempt: Try) -> Change:
    """Replace the strongest step of each combined change by the mildest one that fits, if that is cheaper."""
    if len(ladders) == 1:
        return best
    steps = [ladder[-1] for ladder in ladders]
    for index, ladder in enumerate(ladders):
        for step in ladder[:-1]:
            milder = [*steps[:index], step, *steps[index + 1 :]]
            change = _fitting(tuple(word for words in milder for word in words), attempt)
            if change and change.cost < best.cost:
                best, steps = change, milder
                break
    return best


STRENGTH: Mapping[str, Callable[[Part], Any]] = {
    "remat": lambda part: 0 if "share" in part else ("all", "products", "inputs").index(fact(part, "keeps")),
    "strategy": lambda part: (
        fact(part, "holds") == "shards",
        fact(part, "reshard") == "forward",
        fact(part, "reduce") == "every",
    ),
    "precision": lambda part: tuple(-BYTES[fact(part, name)] for name in ("param", "compute")),
}
"""Group -> sort key of its words: the larger, the more memory a word saves."""


def _stronger(group: str, now: Part) -> list[str]:
    """Words of a group that may be tried (fact `try`) and save more memory than `now`, in ascending order of memory
    saved.
    """
    parts = {word: files.node(group, word) for word in files.groups()[group]}
    saved = {word: STRENGTH[group](part) for word, part in parts.items() if about(part).get("try")}
    return sorted((word for word in saved if saved[word] > STRENGTH[group](now)), key=lambda word: saved[word])


def _ladders(plan: Plan) -> list[list[tuple[str, ...]]]:
    """One list of changes per kind, from mild to strong. Kinds that leave the results unchanged come first."""
    micro, mesh, cuda = plan.batch.microbatch, plan.mesh, plan.device == "cuda"
    remats, strategies, precisions = (_stronger(group, getattr(plan, group)) for group in STRENGTH)
    gpus = int(plan.cluster.get("gpus", 0)) if cuda else 0
    split = ("tensor.sequence=split", "tensor.loss=split") if plan.tensor["sequence"] == "whole" else ()
    degrees: dict[str, list[tuple[str, ...]]] = {
        axis: [(f"mesh.{axis}={size}",) for size in (2, 4, 8) if getattr(mesh, axis) < size <= plan.devices]
        for axis in ("tp", "cp")
    }
    last = "reduce" in plan.strategy and fact(plan.strategy, "reduce") == "last" and plan.batch.accumulate > 1
    tensor: list[tuple[str, ...]] = [split] if split and mesh.tp > 1 else []
    if degrees["tp"]:
        tensor = [*degrees["tp"], (*degrees["tp"][-1], *split)]
    layout: list[list[tuple[str, ...]]] = (
        []
        if _is_searched(plan)
        else [
            [(f"remat={name}",) for name in remats],
            [("strategy.reduce=every",)] if last and mesh.pp == 1 else [],
            [(f"strategy={name}",) for name in strategies],
            tensor,
            degrees["cp"],
            [(f"mesh.pp={mesh.pp * times}",) for times in (2, 4) if mesh.pp > 1 and mesh.pp * times <= plan.world],
            [(f"mesh.pp={mesh.pp // 2}",)] if mesh.pp > 1 else [],
            [("strategy.offload=cpu",)] if not holding_of(plan).cpu and cuda else [],
        ]
    )
    return [
        [(f"microbatch={size}",) for size in (micro // 2, micro // 4, 1) if 1 <= size < micro],
        *layout,
        [(f"precision={name}",) for name in precisions if cuda],
        [(f"devices={size}",) for size in (2, 4, 8) if plan.devices < size <= gpus],
        [(f"nodes={plan.nodes * times}",) for times in (2, 4, 8)] if cuda else [],
    ]


def _is_searched(plan: Plan) -> bool:
    """Whether strategy=auto chose its layout, so that only what it does not choose can be changed."""
    return "(auto:" in plan.why.get("strategy", "")
