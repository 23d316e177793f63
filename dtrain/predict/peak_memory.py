"""Live memory of one rank at the points of a step that can be its peak: backwards, gradient reductions and the
optimizer's update.

    forward      of block j, when its weights were gathered: activations of the blocks before it
    backward     of block j: activations of the blocks before it, live memory inside it, and gradients of the blocks
                 after it and its own
    reduction    of block j's gradients: unsharded gradients, the send buffer, and the shards received
    update       gradients, and temporary memory of the optimizer

Memory changes linearly along a run of equal blocks, so only the ends of a run are examined: the cost depends neither on
the number of layers nor of ranks. torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py of torch 2.13 shows when
FSDP2 gathers, frees and reduces.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.chunks import BLOCK, LOSS_ROWS, rows_of
from dtrain.predict.shapes import Block, Chunk, Shapes, Weight, types_of
from dtrain.predict.state_bytes import Holding, flowing, gathered, holding_of, piece

Moment = dict[str, float]
"""Live memory at one moment: name -> bytes."""


PARTS = ("saved_output", "deferred_wgrad", "ends", "transient")
"""Of `Block.saved`, in the order of the last fields of Sizes."""


class Spot(NamedTuple):
    """Bytes at a point of a block's backward: `live` as `Sizes.peak_live`; gradients `made` of its weights, and those
    `coming`.
    """

    live: float
    made: float
    coming: float


@dataclass(frozen=True)
class Sizes:
    """Bytes of one block and one microbatch on one rank; `unit` as in Block. Weights: gathered (`whole`), and the
    copies of autocast that stay after its forward (`casts`). Gradients: from autograd (`made`), accumulated over
    microbatches (`summed`), on the wire (`sent`), after reduction (`end`), those there at the peak of its backward
    (`largest`), that wait for another use of the same weight (`tied`), memory that views leave unused until they are
    added up (`unused`), and that of the `last` weight. Activations: for the backward (`saved`), of these the block's
    input (`saved_input`) and output (`saved_output`); peak live memory of its backward (`peak_live`), the output
    (`passes`), and gradients that wait for the weight backward (`deferred_wgrad`), with the part that only the
    following block needs (`ends`), and what passes beside them (`transient`). `spots`: points of its backward at which
    the most can be alive.
    """

    count: int
    unit: bool
    whole: float
    casts: float
    made: float
    summed: float
    sent: float
    end: float
    largest: float
    tied: float
    unused: float
    last: float
    saved: float
    peak_live: float
    passes: float
    spots: tuple[Spot, ...]
    saved_input: float
    saved_output: float
    deferred_wgrad: float
    ends: float
    transient: float


def sizes_of(plan: Plan, shapes: Shapes, blocks: Sequence[Block], place: int = 0) -> Iterator[Sizes]:
    """Sizes of the blocks of a stage, of which the first is number `place` of those of its rank that remat may choose.
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


def _sizes(plan: Plan, shapes: Shapes, block: Block, *, again: bool) -> Sizes:
    """`again`: remat recomputes it from its input."""
    types, state, micro = types_of(plan), holding_of(plan), plan.batch.microbatch
    counts = [math.prod(gathered(plan, weight)) for weight in block.weights]
    tied = sum(math.prod(gathered(plan, weight)) for weight in block.ties)
    narrow = [count for count, weight in zip(counts, block.weights, strict=True) if weight.bits is not None]
    product = sum(count for count, weight in zip(counts, block.weights, strict=True) if weight.product) - sum(narrow)
    trained = [count for count, weight in zip(counts, block.weights, strict=True) if weight.trained]
    wide, at_once = types.compute if state.shards else types.param, state.every and plan.mesh.pp == 1
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
    return Sizes(
        block.count,
        block.unit,
        sum(counts) * wide,
        kept,
        made,
        sum(trained) * (types.reduce if state.shards and not at_once else wide),
        sum(trained) * types.reduce,
        sum(math.prod(piece(plan, weight)) for weight in block.weights if weight.trained) * types.param,
        largest,
        tied * wide,
        sum(count * _drags(plan, weight) for count, weight in zip(counts, block.weights, strict=True)) * wide,
        sum(trained[-1:]) * wide,
        saved * micro + left,
        peak_live + more,
        block.passes * flowing(plan).param * micro / split,
        tuple(_spots(plan, block, sample, more, made)) or (Spot(peak_live + more, 0.0, largest),),
        *(block.saved[way].of(plan) * micro for way in (own, *PARTS)),
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


@dataclass(frozen=True)
class Place:
    """One block of a stage in its backward, and the blocks before and after it."""

    before: Sequence[Sizes]
    block: Sizes
    behind: Sequence[Sizes]


def places(blocks: Sequence[Sizes]) -> Iterator[Place]:
    """The first two and the last two blocks of each run: one inside it has neighbours on both sides."""
    for index, run in enumerate(blocks):
        for done in {0, min(1, run.count - 1), max(0, run.count - 2), run.count - 1}:
            before, behind = replace(run, count=done), replace(run, count=run.count - 1 - done)
            yield Place((*blocks[:index], before), replace(run, count=1), (behind, *blocks[index + 1 :]))


def total(blocks: Sequence[Sizes], name: str, *, unit: bool | None = None) -> float:
    """Sum over all blocks, or over those whose `unit` is as given."""
    return sum(size.count * float(getattr(size, name)) for size in blocks if unit is None or size.unit == unit)


def inside(place: Place, live: float | None = None) -> Moment:
    """Activations during the backward of one microbatch, at its peak or where `live` bytes are in the block."""
    block = place.block
    live = block.peak_live if live is None else live
    saved = total(place.before, "saved") + total(place.before, "casts") + block.casts
    return {"activations": saved + min(block.saved, live), "inside a block": max(0.0, live - block.saved)}


def moments(plan: Plan, blocks: Sequence[Sizes]) -> Iterator[tuple[str, Moment]]:
    """Memory during the backwards and reductions of a rank without a pipeline."""
    state, several = holding_of(plan), plan.batch.accumulate > 1
    for place in places(blocks):
        for spot in place.block.spots:
            alive = inside(place, spot.live)
            if not state.shards:
                yield "backward", alive | _copies(state, place, blocks, spot, several=several)
                continue
            for last in {True, not several}:
                yield "backward", alive | _sharded(state, place, blocks, spot, several=several, last=last)
        if not state.shards:
            yield (
                "backward",
                _done(place) | _copies(state, place, blocks, Spot(0, place.block.made, 0), several=several),
            )
            continue
        yield "forward", _forward(state, place, blocks, several=several)
        yield "reduction", _reduced(plan, place, blocks, several=several)
    if state.shards:
        root = [size for size in blocks if not size.unit]
        ends = total(blocks, "end")
        yield (
            "reduction",
            {
                "gradients": ends,
                "gathered blocks": total(root, "whole"),
                "gradients on their way": total(root, "summed") + total(root, "sent"),
            },
        )


def _done(place: Place) -> Moment:
    """Activations when the backward of a block ends: its input, and the gradient of that."""
    return {
        "activations": total(place.before, "saved") + total(place.before, "casts") + place.block.saved_input,
        "inside a block": place.block.saved_input,
    }


def _copies(state: Holding, place: Place, blocks: Sequence[Sizes], spot: Spot, *, several: bool) -> Moment:
    """Gradients without sharding. Each new gradient exists briefly before it is added to the accumulated one; ddp
    accumulates them in addition to its buckets before the last microbatch.
    """
    if several or state.buckets:
        gradients = total(blocks, "made") * (several + state.buckets) + total(blocks, "unused") * several
        return {"gradients": gradients, "gradients on their way": spot.coming + _tied(place)}
    return {"gradients": total(place.behind, "made") + _tied(place) + spot.made + spot.coming}


def _tied(place: Place) -> float:
    """The gradient of a head with the weight of the embedding waits for that of the first block, and for their sum."""
    return total(place.behind, "tied") * (1 if total(place.before, "count") else 2)


def _gathered(state: Holding, place: Place, blocks: Sequence[Sizes], *, last: bool, own: bool) -> float:
    """Bytes of gathered weights: the root, the block and the prefetched one before it; or, without resharding after the
    forward, all blocks, which the `last` backward frees one by one.
    """
    root = total(blocks, "whole", unit=False)
    mine = place.block.whole * (own and place.block.unit)
    if state.frees:
        before = [size for size in place.before if size.unit and size.count]
        return root + mine + (before[-1].whole if before else 0.0)
    return root + (total(place.before, "whole", unit=True) + mine if last else total(blocks, "whole", unit=True))


def _sharded(state: Holding, place: Place, blocks: Sequence[Sizes], spot: Spot, *, several: bool, last: bool) -> Moment:
    """Sharded gradients during a backward. The root's stay unsharded until the end; those of the following block are
    still being sent.
    """
    behind = [size for size in place.behind if size.unit and size.count]
    root = total(place.behind, "made", unit=False)
    if several and state.every:
        gradients, root = total(blocks, "end", unit=True), root + total(blocks, "end", unit=False)
    elif several:
        waiting = [*place.before, place.block] if last else blocks
        gradients = total(waiting, "summed", unit=True) + (total(place.behind, "end", unit=True) if last else 0.0)
        root = total(blocks, "summed", unit=False)
    else:
        gradients = total(place.behind, "end", unit=True)
    sent = behind[0].sent if behind and (last or state.every) else 0.0
    if several and state.every and not behind:  # a reduction waits for the next one, in another microbatch too
        sent = total(blocks, "sent", unit=False)
    added = several and not state.every and place.block.made == place.block.summed  # one by one, by autograd
    return {
        "gradients": gradients + root,
        "gathered blocks": _gathered(state, place, blocks, last=last, own=True),
        "gradients on their way": spot.made * (not added) + spot.coming + _tied(place) + sent,
    }


def _forward(state: Holding, place: Place, blocks: Sequence[Sizes], *, several: bool) -> Moment:
    """Memory when a block was gathered for its forward: a copy of what came, and that of the block before, stay until
    the next one (`wait_for_unshard` of FSDPParamGroup).
    """
    root, block = total(blocks, "whole", unit=False), place.block
    if not block.unit:
        return {}
    before = [size.whole for size in place.before if size.unit and size.count] or [root]
    there = 0.0 if state.frees else total(place.before, "whole", unit=True)
    gradients = total(blocks, "end" if state.every else "summed") if several and state.frees else 0.0
    return {
        "activations": total(place.before, "saved"),
        "gradients": gradients,
        "gathered blocks": root + there + block.whole,
        "weights on their way": before[-1] + block.whole,
    }


def _reduced(plan: Plan, place: Place, blocks: Sequence[Sizes], *, several: bool) -> Moment:
    """Memory while a block's gradients are reduced: its activations and gathered weights are freed."""
    if not place.block.unit:
        return {}
    state, root = holding_of(plan), total(place.behind, "made", unit=False)
    shards = plan.mesh.dp_shard * plan.mesh.cp
    if several and state.every:
        gradients = total(blocks, "end")
    elif several:
        gradients = total(place.before, "summed", unit=True) + total(place.behind, "end", unit=True)
        root = total(blocks, "summed", unit=False)
    else:
        gradients = total(place.behind, "end", unit=True)
    block = place.block
    copied = (block.made if state.every or not several else block.summed) + block.sent
    # gloo reduces a copy of what is sent, and `foreach_reduce` has the last gradient in a variable
    gloo = plan.device == "cpu" and shards > 1
    way = max(copied, block.sent * (1 + gloo) + block.end + block.last * (shards > 1)) + _tied(place)
    return {
        "activations": total(place.before, "saved"),
        "gradients": gradients + root,
        "gathered blocks": _gathered(state, place, blocks, last=True, own=False),
        "gradients on their way": way,
    }
