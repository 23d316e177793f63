"""Bytes of one block and one microbatch on one rank: weights, gradients and activations, from which peak_memory.py and
in_flight.py put together the memory of a step.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.chunks import BLOCK, LOSS_ROWS, rows_of
from dtrain.predict.shapes import Block, Chunk, Shapes, Weight, types_of
from dtrain.predict.state_bytes import flowing, gathered, holding_of, piece


class Spot(NamedTuple):
    """Bytes at a point of a block's backward: `live` as `ActivationBytes.peak_live`; gradients `made` of its weights,
    and those `coming`.
    """

    live: float
    made: float
    coming: float


@dataclass(frozen=True)
class WeightBytes:
    """`gathered`: unsharded weights; `casts`: copies of autocast that stay after the forward."""

    gathered: float
    casts: float


@dataclass(frozen=True)
class GradientBytes:
    """`computed`: as autograd gives them; `accumulated`: summed over microbatches; `sent`: on the wire; `reduced`: what
    is left on this rank; `largest`: those there at the peak of the backward; `tied`: those that wait for another use of
    the same weight; `unused`: memory that views leave unused until they are added up; `last`: that of the last weight.
    """

    computed: float
    accumulated: float
    sent: float
    reduced: float
    largest: float
    tied: float
    unused: float
    last: float


@dataclass(frozen=True)
class ActivationBytes:
    """`saved` for the backward, of these the block's input (`saved_input`) and output (`saved_output`); `peak_live`:
    live memory at the peak of the backward; `output`: what the next block receives. Gradients that wait for the weight
    backward (`deferred_wgrad`), with the part that only the following block needs (`ends`), and what passes beside them
    (`transient`).
    """

    saved: float
    saved_input: float
    saved_output: float
    peak_live: float
    output: float
    deferred_wgrad: float
    ends: float
    transient: float


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of each of `count` equal blocks in a row, of one microbatch, on one rank. `unit`: as in Block; `spots`:
    points of the backward at which the most can be alive.
    """

    count: int
    unit: bool
    weights: WeightBytes
    gradients: GradientBytes
    activations: ActivationBytes
    spots: tuple[Spot, ...]


def sizes_of(plan: Plan, shapes: Shapes, blocks: Sequence[Block], place: int = 0) -> Iterator[BlockBytes]:
    """Bytes of the blocks of a stage, of which the first is number `place` of those of its rank that remat may choose.
    Of a run of blocks the recomputed ones come first, but for the last of them, beside which the most is kept.
    """
    share = float(fact(plan.remat, "share", 0.0)) if fact(plan.remat, "keeps") == "inputs" else 1.0
    for block in blocks:
        chosen = range(place, place + block.count) if block.listed else range(0)
        again = [index for index in chosen if int((index + 1) * share) == int(index * share)]
        behind = place + block.count - 1 - again[-1] if again else block.count
        place += len(chosen)
        parts = (len(again) - 1, True), (block.count - len(again) - behind, False), (bool(again), True), (behind, False)
        for count, is_again in parts:
            if count > 0:
                yield _sizes(plan, shapes, replace(block, count=int(count)), again=is_again)


def _sizes(plan: Plan, shapes: Shapes, block: Block, *, again: bool) -> BlockBytes:
    """`again`: remat recomputes it from its input."""
    types, state, micro = types_of(plan), holding_of(plan), plan.batch.microbatch
    counts = [math.prod(gathered(plan, weight)) for weight in block.weights]
    tied = sum(math.prod(gathered(plan, weight)) for weight in block.ties)
    narrow = [count for count, weight in zip(counts, block.weights, strict=True) if weight.bits is not None]
    product = sum(count for count, weight in zip(counts, block.weights, strict=True) if weight.product) - sum(narrow)
    trained = [count for count, weight in zip(counts, block.weights, strict=True) if weight.trained]
    wide = types.compute if state.shards else types.param
    saved, peak_live = _activations(plan, block, again=again)
    # what remat keeps of a block begins with its input, of which the block itself may save no more than a cast
    own = "inputs" if block.listed and (again or fact(plan.remat, "keeps") == "products") else "saved_input"
    product += tied * (block.chunk is not None)
    casts = product * types.compute * (types.autocast and not state.shards) + block.widened
    sample, (peak_live, largest) = peak_live, _peak(plan, block, peak_live, wide)
    left, chunk = 0.0, 0.0
    if block.chunk:
        left, chunk, largest = _chunk(plan, block, block.chunk, wide * max([*trained, tied], default=0), casts)
        casts = 0
    recast = again or "products" in (fact(plan.remat, "keeps"), fact(plan.compile, "keeps"))
    kept = _joined(plan, block, again=again) if block.listed and recast else casts
    chunk += max(narrow, default=0) * (types.param + types.compute * types.autocast)  # unpacked for one product
    more, made = chunk + casts - kept, sum(trained) * wide
    split = plan.mesh.cp * (plan.mesh.tp if plan.tensor.get("sequence") == "split" else 1)
    return BlockBytes(
        count=block.count,
        unit=block.unit,
        weights=WeightBytes(gathered=sum(counts) * wide, casts=kept),
        gradients=_gradients(plan, block, counts, wide=wide, largest=largest),
        activations=ActivationBytes(
            saved=saved * micro + left,
            saved_input=block.saved[own].of(plan) * micro,
            saved_output=block.saved["saved_output"].of(plan) * micro,
            peak_live=peak_live + more,
            output=block.passes * flowing(plan).param * micro / split,
            deferred_wgrad=block.saved["deferred_wgrad"].of(plan) * micro,
            ends=block.saved["ends"].of(plan) * micro,
            transient=block.saved["transient"].of(plan) * micro,
        ),
        spots=tuple(_spots(plan, block, sample, more, made)) or (Spot(peak_live + more, 0.0, largest),),
    )


def _gradients(plan: Plan, block: Block, counts: Sequence[int], *, wide: int, largest: float) -> GradientBytes:
    """`counts`: numbers of each gathered weight; `wide`: bytes of a number of a gradient from autograd."""
    types, state = types_of(plan), holding_of(plan)
    at_once = state.every and plan.mesh.pp == 1
    trained = [count for count, weight in zip(counts, block.weights, strict=True) if weight.trained]
    return GradientBytes(
        computed=sum(trained) * wide,
        accumulated=sum(trained) * (types.reduce if state.shards and not at_once else wide),
        sent=sum(trained) * types.reduce,
        reduced=sum(math.prod(piece(plan, weight)) for weight in block.weights if weight.trained) * types.param,
        largest=largest,
        tied=sum(math.prod(gathered(plan, weight)) for weight in block.ties) * wide,
        unused=sum(count * _drags(plan, weight) for count, weight in zip(counts, block.weights, strict=True)) * wide,
        last=sum(trained[-1:]) * wide,
    )


def _joined(plan: Plan, block: Block, *, again: bool) -> float:
    """Bytes of the weights that a compiled block casts side by side, and keeps so for its backward."""
    types, alone = types_of(plan), plan.mesh.tp == 1 and not holding_of(plan).shards
    compiled = fact(plan.compile, "keeps") == "products" and fact(plan.remat, "keeps") != "products"
    if again or not (types.autocast and alone and compiled) or fact(plan.precision, "flops") == "fp8":
        return 0.0
    return types.compute * sum(weight.count for weight in block.weights if weight.joined)


def _spots(plan: Plan, block: Block, peak: float, more: float, made: float) -> Iterator[Spot]:
    """Those that a trace saw, which runs no chunks of a loss. `peak`: peak live memory of one sample, beside which
    there is `more`; bytes of the gradients that are `made` in all.
    """
    micro, whole = plan.batch.microbatch, sum(vars(block.peak_live).values())
    highest, each = block.peak_live.of(plan), made / block.trained if made else types_of(plan).param
    for live, complete, coming in () if block.chunk else block.moments:
        yield Spot((peak - (1 - live / whole) * highest) * micro + more, complete * each, coming * each)


def _peak(plan: Plan, block: Block, peak_live: float, wide: int) -> tuple[float, float]:
    """(live memory, gradients of its weights) at the peak of both in the backward of a block and microbatch, of a
    sample's `peak_live`. Gradients come into being one by one; where older ones are there already, each is added to
    its own, DTensors not in place (isTensorSubclassLike in torch/csrc/autograd/functions/accumulate_grad.h).
    """
    micro, state, several = plan.batch.microbatch, holding_of(plan), plan.batch.accumulate > 1
    # of whole logits that a kernel reads, at least where none are split
    compiled = plan.mesh.tp == plan.mesh.pp == 1 and not _as_written(plan)
    high = 0.0 if compiled else min(block.high.of(plan) * micro, LOSS_ROWS)
    halves = plan.mesh.pp > 1 and fact(plan.pipeline.order, "splits_backward")
    if halves or not block.making:
        counts = [math.prod(gathered(plan, weight)) for weight in block.weights if weight.trained]
        return peak_live * micro + high, float(max(counts, default=0) * wide)
    spared = block.peak_live.of(plan) - peak_live
    in_place = several and not state.every and wide == types_of(plan).reduce
    added = in_place if state.shards else several or state.buckets
    twice = added and not state.shards and plan.mesh.tp > 1
    moments = []
    for (live, weights), (after, _) in zip(block.making, (*block.making[1:], block.making[-1]), strict=True):
        sizes = [math.prod(gathered(plan, weight)) * wide * weight.trained for weight in weights]
        made = sum(sizes[-1:] if added else sizes)
        made += sum(sizes[-1:]) * (twice + sum(_drags(plan, weight) for weight in weights[-1:]))
        # copies of autocast end with the gradients of their weights
        freed = sum(sizes[:-1]) / wide * types_of(plan).compute * (types_of(plan).autocast and not state.shards)
        moments.append(((live.of(plan) - spared) * micro + high * (not weights) - freed, made))
        if weights and _stacks(plan, weights[-1]):
            moments.append(((after.of(plan) - spared) * micro - freed, made + sizes[-1]))
    return max(moments, key=sum)


def _drags(plan: Plan, weight: Weight) -> int:
    """How often a gradient's memory holds it, beside itself: that of rows of an embedding is a view of all rows."""
    return (plan.mesh.tp - 1) * (weight.embedding and weight.tp == 0)


def _stacks(plan: Plan, weight: Weight) -> bool:
    """Whether the gradients of experts are made one by one, then stacked (dtrain.model.moe.by_expert)."""
    aligned = not any(dim * types_of(plan).compute % 16 for dim in weight.shape[1:])
    return weight.experts and not (aligned and fact(plan.precision, "compute") == "bf16")


def _as_written(plan: Plan) -> bool:
    """Whether the loss is not compiled: on a GPU it is where blocks are."""
    return plan.device == "cpu" or fact(plan.compile, "keeps") == "all"


def _chunk(plan: Plan, block: Block, chunk: Chunk, largest: float, casts: float) -> tuple[float, float, float]:
    """(bytes that a loss over chunks of logits leaves for its backward; those in its largest chunk; those of the
    `largest` gradient of a weight that are neither).

    Left is the gradient of the weight in fp32, formed in the forward but where the backward computes the chunks again.
    In a chunk: the logits, of which a few rows are in fp32 too, the weight in the type of the products (`casts`), all
    hidden states in it, and the gradient of the weight, on a CPU beside a product for it in 16 bits.
    """
    tokens, tp = plan.batch.microbatch * chunk.tokens / plan.mesh.cp, plan.mesh.tp if chunk.split else 1
    rows = rows_of(plan, chunk)
    numbers = min(rows, tokens) * chunk.vocabulary / tp
    weight, narrow = 4 * chunk.numbers / tp * chunk.trained, chunk.bytes < 4
    again, cpu, high = block.backward_work > (1 + chunk.trained) * block.work, plan.device == "cpu", 0.0
    # fp32 logits that are not needed again are overwritten, and those of a kernel exist nowhere
    if (narrow or again or tp > 1) and _as_written(plan):
        high = min(4 * numbers, BLOCK[plan.device] * (plan.threads if cpu else 1))
    before = weight * (tokens > rows)  # the sum of other chunks
    product = weight * chunk.bytes / 4 * (narrow and cpu)
    if not again and flowing(plan).param > chunk.bytes:
        casts += tokens * chunk.numbers / chunk.vocabulary * chunk.bytes
    live = numbers * chunk.bytes + casts + max(high + before, weight + product)
    # autograd takes a gradient in fp32 as it is, and one in another type is a copy
    if again:
        return 0.0, max(0.0, live - largest), largest
    largest *= largest < weight
    return weight, max(weight, live - largest), largest


def _activations(plan: Plan, block: Block, *, again: bool) -> tuple[float, float]:
    """(saved bytes, peak live bytes of the backward) of one sample; recomputed tensors are live in the backward as if
    saved.
    """
    everything = block.saved["all"].of(plan)
    whole = min(everything, block.saved[fact(plan.compile, "keeps")].of(plan)) if block.listed else everything
    peak_live = block.peak_live.of(plan) - (everything - whole)
    if not block.listed:
        return whole, peak_live
    keeps = fact(plan.remat, "keeps")
    if keeps == "inputs":
        return block.saved["inputs"].of(plan) if again else whole, peak_live
    kept = block.saved[keeps].of(plan)
    if keeps == "products" and "summands" in block.saved:  # a rank's part of a sum, before tensor parallelism splits it
        kept += block.saved["summands"].of(plan) - block.saved["summed"].of(plan)
    return min(whole, kept), peak_live
