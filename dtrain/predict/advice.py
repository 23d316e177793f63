"""Advice where a plan does not fit: changes of a few words that were tried, the cheapest first.

A change is tried as the user would: its words are resolved and predicted again. Cheap is what takes the fewest seconds
of all ranks together; with as many ranks as before that is the shortest step.
"""

from collections.abc import Callable, Mapping
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
"""Predictions after which no more changes are put together: each takes up to a tenth of a second."""
Try = Callable[[tuple[str, ...]], tuple[Plan, Prediction]]
"""Words that are added -> the plan and what is predicted of it. Raises WordsError where they cannot be."""


@dataclass(frozen=True)
class Change:
    words: tuple[str, ...]
    plan: Plan
    prediction: Prediction

    @property
    def cost(self) -> float:
        """Seconds of all ranks; where no time is known, bytes."""
        found = self.prediction.time
        return found.seconds * self.plan.world if found else float(self.prediction.memory.peak)


def advise(plan: Plan, attempt: Try) -> list[Change]:
    """At most three changes with which it fits, alike ones once; two or three together where fewer are not enough."""
    ladders, tried = [ladder for ladder in _ladders(plan) if ladder], [0]

    def counted(words: tuple[str, ...]) -> tuple[Plan, Prediction]:
        found = attempt(words)
        tried[0] += 1
        return found

    found: dict[tuple[int, ...], Change] = {}
    for index, ladder in enumerate(ladders):
        fitting = [change for words in ladder if (change := _fitting(words, counted))]
        if fitting:
            found[(index,)] = min(fitting, key=lambda change: change.cost)
    for together in (2, 3):
        if len(found) >= MOST:
            break
        for indices in combinations(range(len(ladders)), together):
            if tried[0] > TRIES or any(set(enough) <= set(indices) for enough in found):
                continue
            change = _fitting(tuple(word for index in indices for word in ladders[index][-1]), counted)
            if change:
                found[indices] = change
    best = sorted(found.items(), key=lambda item: item[1].cost)[:MOST]
    return sorted(
        (_milder([ladders[index] for index in indices], change, attempt) for indices, change in best),
        key=lambda change: change.cost,
    )


def _fitting(words: tuple[str, ...], attempt: Try) -> Change | None:
    try:
        plan, prediction = attempt(words)
    except WordsError:  # other words are in its way
        return None
    return Change(words, plan, prediction) if prediction.fits else None


def _milder(ladders: list[list[tuple[str, ...]]], best: Change, attempt: Try) -> Change:
    """Of changes together the strongest were tried: each is taken as mild as it may be, where that is cheaper."""
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
        fact(part, "holds") == "shards", fact(part, "reshard") == "forward", fact(part, "reduce") == "every",
    ),
    "precision": lambda part: tuple(-BYTES[fact(part, name)] for name in ("param", "compute")),
}  # fmt: skip
"""Group -> how much memory a word of it saves, to be compared."""


def _stronger(group: str, now: Part) -> list[str]:
    """The words of a group that may be tried (fact `try`) and save more memory than `now`, those that save least
    first.
    """
    parts = {word: files.node(group, word) for word in files.groups()[group]}
    saved = {word: STRENGTH[group](part) for word, part in parts.items() if about(part).get("try")}
    return sorted((word for word in saved if saved[word] > STRENGTH[group](now)), key=lambda word: saved[word])


def _ladders(plan: Plan) -> list[list[tuple[str, ...]]]:
    """For each thing that may be changed, the changes from mild to strong. Those that change no number of the run come
    first.
    """
    micro, holding, cuda, mesh = plan.batch.microbatch, holding_of(plan), plan.device == "cuda", plan.mesh
    remats, strategies, precisions = (_stronger(group, getattr(plan, group)) for group in STRENGTH)
    gpus = int(plan.cluster.get("gpus", 0)) if cuda else 0
    split = ("tensor.sequence=split", "tensor.loss=split") if plan.tensor["sequence"] == "whole" else ()
    degrees: dict[str, list[tuple[str, ...]]] = {
        axis: [(f"mesh.{axis}={size}",) for size in (2, 4, 8) if getattr(mesh, axis) < size <= plan.devices]
        for axis in ("tp", "cp")
    }
    tensor: list[tuple[str, ...]] = [split] if split and mesh.tp > 1 else []
    if degrees["tp"]:
        tensor = [*degrees["tp"], (*degrees["tp"][-1], *split)]
    return [
        [(f"microbatch={size}",) for size in (micro // 2, micro // 4, 1) if 1 <= size < micro],
        [(f"remat={name}",) for name in remats],
        [(f"strategy={name}",) for name in strategies],
        [(f"precision={name}",) for name in precisions if cuda],
        tensor,
        degrees["cp"],
        [(f"mesh.pp={mesh.pp * times}",) for times in (2, 4) if mesh.pp > 1 and mesh.pp * times <= plan.world],
        [(f"mesh.pp={mesh.pp // 2}",)] if mesh.pp > 1 else [],
        [("strategy.offload=cpu",)] if not holding.cpu and cuda else [],
        [(f"devices={size}",) for size in (2, 4, 8) if plan.devices < size <= gpus],
        [(f"nodes={plan.nodes * times}",) for times in (2, 4, 8)] if cuda else [],
    ]  # fmt: skip
