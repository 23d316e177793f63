"""Floating-point operations of one optimizer step, two per multiply-add: matrix products, convolutions and attention.

    forward     2 x (products + attention) of all samples
    backward    products: once for the weight gradients, once for the input gradients if there are any;
                attention: 5 products for 2 in the forward, as scores are recomputed (FlashAttention, arXiv 2205.14135)
    recomputed  the forward of the blocks that remat recomputes, except a last product whose result is not needed;
                nothing with remat=selective

A loss of logits in chunks is one operator with a weight: a schedule that splits the backward runs its backward twice.

Attention counts the full square of a sequence, causal or not, as torch.utils.flop_counter and the usual MFU do (PaLM,
arXiv 2204.02311). The ring of mesh.cp is an exception: its n ranks skip blocks that the causal mask hides, and compute
(n + 1) / 2n of the square. Experts are computed on every rank of mesh.tp.
"""

from collections import Counter
from dataclasses import dataclass

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Block, Shapes, stages_of


@dataclass(frozen=True)
class Work:
    """Operations of one step, summed over all ranks."""

    forward: int
    backward: int
    recomputed: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed


def work(plan: Plan, shapes: Shapes) -> Work:
    """Operations of one step; all zero if the work of the model is not known."""
    samples, cp = plan.batch.size, plan.mesh.cp
    visible = (cp + 1) / (2 * cp) if plan.context.get("attention") == "ring" else 1.0
    forward = backward = again = 0.0
    for block in shapes.blocks:
        attention = block.attention_work
        forward += 2 * (block.work + visible * attention) * block.count
        parts = 2 if block.chunk and plan.mesh.pp > 1 and fact(plan.pipeline.order, "splits_backward") else 1
        backward += (2 * block.backward_work * parts + 5 * visible * attention * block.grad_out) * block.count
        if block.listed and block.grad_out:
            again += 2 * (block.recompute_work - (1 - visible) * attention) * block.count
    duplicated = samples * (plan.mesh.tp - 1) * sum(block.count * _experts(block) for block in shapes.blocks)
    remat = round((samples * again + 2 * duplicated) * recomputed(plan, shapes))
    return Work(round(samples * forward) + 2 * duplicated, round(samples * backward) + 4 * duplicated, remat)


def _experts(block: Block) -> int:
    """Multiply-adds of one sample in experts and their routers, which every tp rank repeats."""
    return sum(
        3 * each.rows * each.width * each.hidden + each.rows // each.active * each.width * each.count
        for each in block.experts
    )


def recomputed(plan: Plan, shapes: Shapes) -> float:
    """Fraction of the blocks that remat recomputes, which it chooses among those of each rank."""
    if fact(plan.remat, "keeps") != "inputs":
        return 0.0
    share, ranks = fact(plan.remat, "share", 0.0), Counter[int]()
    owners = plan.pipeline.owners(plan.mesh.pp) if plan.mesh.pp > 1 else [0]
    for stage, owner in zip(stages_of(plan, shapes), owners, strict=True):
        ranks[owner] += sum(block.count for block in stage if block.listed)
    return 1 - sum(int(count * share) for count in ranks.values()) / max(1, shapes.listed)
