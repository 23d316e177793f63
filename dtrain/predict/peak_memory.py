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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from dtrain.planned import Plan
from dtrain.predict.block_bytes import BlockBytes, Spot
from dtrain.predict.state_bytes import Holding, holding_of

Moment = dict[str, float]
"""Live memory at one moment: name -> bytes."""


@dataclass(frozen=True)
class Place:
    """One block of a stage in its backward, and the blocks before and after it."""

    before: Sequence[BlockBytes]
    block: BlockBytes
    behind: Sequence[BlockBytes]


def places(blocks: Sequence[BlockBytes]) -> Iterator[Place]:
    """The first two and the last two blocks of each run: one inside it has neighbours on both sides."""
    for index, run in enumerate(blocks):
        for done in {0, min(1, run.count - 1), max(0, run.count - 2), run.count - 1}:
            before, behind = replace(run, count=done), replace(run, count=run.count - 1 - done)
            yield Place((*blocks[:index], before), replace(run, count=1), (behind, *blocks[index + 1 :]))


def total(blocks: Sequence[BlockBytes], name: str, *, unit: bool | None = None) -> float:
    """Sum over all blocks, or over those whose `unit` is as given. `name`: a field of BlockBytes, such as
    `gradients.sent`.
    """
    figure = attrgetter(name)
    return sum(size.count * float(figure(size)) for size in blocks if unit is None or size.unit == unit)


def inside(place: Place, live: float | None = None) -> Moment:
    """Activations during the backward of one microbatch, at its peak or where `live` bytes are in the block."""
    block = place.block
    live = block.activations.peak_live if live is None else live
    saved = total(place.before, "activations.saved") + total(place.before, "weights.casts") + block.weights.casts
    return {
        "activations": saved + min(block.activations.saved, live),
        "inside a block": max(0.0, live - block.activations.saved),
    }


def moments(plan: Plan, blocks: Sequence[BlockBytes]) -> Iterator[tuple[str, Moment]]:
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
            end = Spot(live=0, made=place.block.gradients.computed, coming=0)
            yield "backward", _done(place) | _copies(state, place, blocks, end, several=several)
            continue
        yield "forward", _forward(state, place, blocks, several=several)
        yield "reduction", _reduced(plan, place, blocks, several=several)
    if state.shards:
        root = [size for size in blocks if not size.unit]
        moment = {
            "gradients": total(blocks, "gradients.reduced"),
            "gathered blocks": total(root, "weights.gathered"),
            "gradients on their way": total(root, "gradients.accumulated") + total(root, "gradients.sent"),
        }
        yield "reduction", moment


def _done(place: Place) -> Moment:
    """Activations when the backward of a block ends: its input, and the gradient of that."""
    before = total(place.before, "activations.saved") + total(place.before, "weights.casts")
    own = place.block.activations.saved_input
    return {"activations": before + own, "inside a block": own}


def _copies(state: Holding, place: Place, blocks: Sequence[BlockBytes], spot: Spot, *, several: bool) -> Moment:
    """Gradients without sharding. Each new gradient exists briefly before it is added to the accumulated one; ddp
    accumulates them in addition to its buckets before the last microbatch.
    """
    if several or state.buckets:
        computed, unused = total(blocks, "gradients.computed"), total(blocks, "gradients.unused")
        gradients = computed * (several + state.buckets) + unused * several
        return {"gradients": gradients, "gradients on their way": spot.coming + _tied(place)}
    return {"gradients": total(place.behind, "gradients.computed") + _tied(place) + spot.made + spot.coming}


def _tied(place: Place) -> float:
    """The gradient of a head with the weight of the embedding waits for that of the first block, and for their sum."""
    return total(place.behind, "gradients.tied") * (1 if total(place.before, "count") else 2)


def _gathered(state: Holding, place: Place, blocks: Sequence[BlockBytes], *, last: bool, own: bool) -> float:
    """Bytes of gathered weights: the root, the block and the prefetched one before it; or, without resharding after the
    forward, all blocks, which the `last` backward frees one by one.
    """
    root = total(blocks, "weights.gathered", unit=False)
    mine = place.block.weights.gathered * (own and place.block.unit)
    if state.frees:
        before = [size for size in place.before if size.unit and size.count]
        return root + mine + (before[-1].weights.gathered if before else 0.0)
    if last:
        return root + (total(place.before, "weights.gathered", unit=True) + mine)
    return root + total(blocks, "weights.gathered", unit=True)


def _sharded(
    state: Holding, place: Place, blocks: Sequence[BlockBytes], spot: Spot, *, several: bool, last: bool
) -> Moment:
    """Sharded gradients during a backward. The root's stay unsharded until the end; those of the following block are
    still being sent.
    """
    behind = [size for size in place.behind if size.unit and size.count]
    root = total(place.behind, "gradients.computed", unit=False)
    if several and state.every:
        gradients = total(blocks, "gradients.reduced", unit=True)
        root = root + total(blocks, "gradients.reduced", unit=False)
    elif several:
        waiting = [*place.before, place.block] if last else blocks
        gradients = total(waiting, "gradients.accumulated", unit=True)
        gradients += total(place.behind, "gradients.reduced", unit=True) if last else 0.0
        root = total(blocks, "gradients.accumulated", unit=False)
    else:
        gradients = total(place.behind, "gradients.reduced", unit=True)
    sent = behind[0].gradients.sent if behind and (last or state.every) else 0.0
    if several and state.every and not behind:  # a reduction waits for the next one, in another microbatch too
        sent = total(blocks, "gradients.sent", unit=False)
    made = place.block.gradients
    added = several and not state.every and made.computed == made.accumulated  # one by one, by autograd
    return {
        "gradients": gradients + root,
        "gathered blocks": _gathered(state, place, blocks, last=last, own=True),
        "gradients on their way": spot.made * (not added) + spot.coming + _tied(place) + sent,
    }


def _forward(state: Holding, place: Place, blocks: Sequence[BlockBytes], *, several: bool) -> Moment:
    """Memory when a block was gathered for its forward: a copy of what came, and that of the block before, stay until
    the next one (`wait_for_unshard` of FSDPParamGroup).
    """
    root, block = total(blocks, "weights.gathered", unit=False), place.block
    if not block.unit:
        return {}
    before = [size.weights.gathered for size in place.before if size.unit and size.count] or [root]
    there = 0.0 if state.frees else total(place.before, "weights.gathered", unit=True)
    kept = "gradients.reduced" if state.every else "gradients.accumulated"
    return {
        "activations": total(place.before, "activations.saved"),
        "gradients": total(blocks, kept) if several and state.frees else 0.0,
        "gathered blocks": root + there + block.weights.gathered,
        "weights on their way": before[-1] + block.weights.gathered,
    }


def _reduced(plan: Plan, place: Place, blocks: Sequence[BlockBytes], *, several: bool) -> Moment:
    """Memory while a block's gradients are reduced: its activations and gathered weights are freed."""
    if not place.block.unit:
        return {}
    state, root = holding_of(plan), total(place.behind, "gradients.computed", unit=False)
    shards = plan.mesh.dp_shard * plan.mesh.cp
    if several and state.every:
        gradients = total(blocks, "gradients.reduced")
    elif several:
        gradients = total(place.before, "gradients.accumulated", unit=True)
        gradients += total(place.behind, "gradients.reduced", unit=True)
        root = total(blocks, "gradients.accumulated", unit=False)
    else:
        gradients = total(place.behind, "gradients.reduced", unit=True)
    made = place.block.gradients
    copied = (made.computed if state.every or not several else made.accumulated) + made.sent
    # gloo reduces a copy of what is sent, and `foreach_reduce` has the last gradient in a variable
    gloo = plan.device == "cpu" and shards > 1
    way = max(copied, made.sent * (1 + gloo) + made.reduced + made.last * (shards > 1)) + _tied(place)
    return {
        "activations": total(place.before, "activations.saved"),
        "gradients": gradients + root,
        "gathered blocks": _gathered(state, place, blocks, last=True, own=False),
        "gradients on their way": way,
    }
