"""Floating-point operations of one optimizer step, two for a multiply and an add: matrix products, convolutions and
attention.

    forward     2 x (products + attention) of all samples
    backward    products: once more for the gradient of the weights, once for that of the input where there is one;
                attention: 5 products for the forward's 2: scores are computed again (FlashAttention, arXiv 2205.14135)
    recomputed  the forward of the blocks that remat computes again, but for a last product, whose result nobody needs;
                with remat=selective nothing that is counted here

Attention counts the whole square of a sequence, causal or not, as torch.utils.flop_counter and the usual MFU do (PaLM,
arXiv 2204.02311); but for the ring of mesh.cp, whose n ranks leave out what a causal mask hides of each other's blocks,
and compute (n + 1) / 2n of it. Experts are computed on every rank of mesh.tp.
"""

from dataclasses import dataclass

from dtrain.config.facts import fact
from dtrain.predict.shapes import Block, Decided, Shapes


@dataclass(frozen=True)
class Work:
    """Of the whole run in one step, all ranks together."""

    forward: int
    backward: int
    recomputed: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recomputed


def work(plan: Decided, shapes: Shapes) -> Work:
    """All zero where the model's work is not known."""
    samples, cp = plan.batch.size, plan.mesh.cp
    seen = (cp + 1) / (2 * cp) if plan.context.get("attention") == "ring" else 1.0
    forward = samples * sum(2 * (block.work + seen * block.attention_work) * block.count for block in shapes.blocks)
    backward = samples * sum(
        (2 * block.backward_work + 5 * seen * block.attention_work * block.grad_out) * block.count
        for block in shapes.blocks
    )
    again = samples * sum(
        2 * (block.recompute_work - (1 - seen) * block.attention_work) * block.count
        for block in shapes.blocks
        if block.listed and block.grad_out
    )
    alone = samples * (plan.mesh.tp - 1) * sum(block.count * _experts(block) for block in shapes.blocks)
    return Work(round(forward) + 2 * alone, round(backward) + 4 * alone, round(again * recomputed(plan, shapes.listed)))


def _experts(block: Block) -> int:
    """Multiply-adds of one sample in experts and their routers, which every rank of tp computes whole."""
    return sum(
        3 * each.rows * each.width * each.hidden + each.rows // each.active * each.width * each.count
        for each in block.experts
    )


def recomputed(plan: Decided, blocks: int) -> float:
    """The share of so many blocks that is computed twice."""
    if fact(plan.remat, "keeps") != "inputs":
        return 0.0
    return 1 - int(blocks * fact(plan.remat, "share", 0.0)) / max(1, blocks)
