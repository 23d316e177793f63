"""Small models on a GPU: blocks that compute for a shorter time than their kernels take to launch are neither compiled
nor computed in bf16, whose casts are launches too.

The time is that of the whole batch on one GPU, so that no mesh changes the numbers of a run. See the choice with
`dtrain plan cluster=h100x8`, in the rows of `precision` and `compile`.
"""

from dataclasses import replace

from dtrain.build import build
from dtrain.config import files
from dtrain.config.schema import Config
from dtrain.planned import BatchShape, MeshShape, Plan
from dtrain.predict import formulas
from dtrain.predict.time import compute_seconds
from dtrain.resolve.chunk import STAND_IN

SECONDS = 1e-4
"""Compute of a block, forward and backward, below which it is small."""
WORDS = {"precision": "fp32", "compile": "none"}


def words(config: Config, plan: Plan) -> dict[str, str]:
    """The words that `precision=auto` and `compile=auto` mean for small blocks, beside those that it means already;
    empty for other blocks, and where the shapes of the model are not known before it is built.
    """
    open_ = {
        name: word
        for name, word in WORDS.items()
        if config.choices[name] == "auto" and not plan.why[name].startswith(f"{word} ")
    }
    return open_ if open_ and plan.device == "cuda" and block_seconds(plan) < SECONDS else {}


def reason(word: str, plan: Plan) -> str:
    return f"{word} (auto: small blocks, at most {block_seconds(plan) * 1e6:.0f} us of compute for the whole batch)"


def block_seconds(plan: Plan) -> float:
    """Seconds in which one GPU computes the slowest block, forward and backward, for the whole batch; infinite if the
    shapes of the model are not known.
    """
    size = plan.batch.size
    alone = replace(
        plan, mesh=MeshShape(), batch=BatchShape(size, size, 1, 1),
        strategy=files.node("strategy", "single"), remat=files.node("remat", "none"),
    )  # fmt: skip
    shapes = formulas.shapes(alone)
    if shapes is None:
        return float("inf")
    machine = build(plan.cluster or {**files.node("cluster", STAND_IN)})
    listed = [replace(block, count=1) for block in shapes.blocks if block.listed]
    return max((sum(compute_seconds(alone, shapes, (block,), machine)) for block in listed), default=float("inf"))
