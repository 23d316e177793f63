"""What to type where a plan does not fit: changes of a few words that were tried, the cheapest first.

A change is tried as the user would: its words are resolved and predicted again. Cheap is what takes the fewest seconds of all ranks together;
with as many ranks as before that is the shortest step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from dtrain.errors import WordsError
from dtrain.plan import Plan
from dtrain.predict.held import holding_of
from dtrain.predict.prediction import Prediction
from dtrain.predict.shapes import word_of

MOST = 3
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
    """At most three changes with which it fits; pairs of them where none alone is enough."""
    single = [tuple(words) for words in _candidates(plan)]
    found = list(_fitting(single, attempt))
    if not found:
        strongest = [ladder[-1] for ladder in _ladders(plan) if ladder]
        found = list(_fitting([(*one, *other) for one, other in combinations(strongest, 2)], attempt))
    return sorted(found, key=lambda change: change.cost)[:MOST]


def _fitting(candidates: list[tuple[str, ...]], attempt: Try) -> Iterator[Change]:
    for words in candidates:
        try:
            plan, prediction = attempt(words)
        except WordsError:  # other words are in its way
            continue
        if prediction.fits:
            yield Change(words, plan, prediction)


def _candidates(plan: Plan) -> Iterator[tuple[str, ...]]:
    for ladder in _ladders(plan):
        yield from ladder


def _ladders(plan: Plan) -> list[list[tuple[str, ...]]]:
    """For each thing that may be changed, the changes from mild to strong."""
    micro, holding, cuda = plan.batch.microbatch, holding_of(plan), plan.device == "cuda"
    remats, word = ["selective", "full"], word_of(plan.remat)
    strategies = [] if plan.mesh.data * plan.mesh.cp == 1 or holding.frees else ["fsdp"] if holding.shards else ["zero1", "zero2", "fsdp"]
    sizes = [size for size in (2, 4, 8) if size <= plan.devices and size > plan.mesh.tp]
    precisions = {"fp32": ["bf16", "bf16_true"], "bf16": ["bf16_true"], "fp16": ["bf16_true"]}.get(word_of(plan.precision), [])
    return [
        [(f"microbatch={size}",) for size in (micro // 2, micro // 4, 1) if 1 <= size < micro],
        [(f"remat={name}",) for name in remats[remats.index(word) + 1 if word in remats else 0 :]],
        [(f"strategy={name}",) for name in strategies],
        [(f"precision={name}",) for name in precisions if cuda],
        [(f"mesh.tp={size}",) for size in sizes],
        [("strategy.rests=cpu",)] if holding.shards and not holding.cpu and cuda else [],
        [(f"nodes={plan.nodes * times}",) for times in (2, 4, 8)] if cuda else [],
    ]
