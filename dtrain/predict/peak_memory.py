"""Live memory of one rank at the moments of a step that can be its peak: backwards, reductions, the optimizer's
update.

    backward     of block j: what the blocks before it have kept, what is alive inside it, gradients of those behind it
                 and its own
    reduction    of block j's gradients: whole ones, the buffer they are sent from, the pieces that arrive
    update       gradients, and what the optimizer needs for itself

Everything grows or shrinks evenly along a run of equal blocks, so only the ends of a run are looked at: the cost
depends neither on the number of layers nor of ranks. When FSDP2 gathers, frees and reduces:
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py of torch 2.13.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dtrain.config.facts import fact
from dtrain.predict.schedule import actions
from dtrain.predict.shapes import Block, Decided, Shapes, types_of
from dtrain.predict.state_bytes import Holding, flowing, gathered, holding_of, piece
from dtrain.predict.work import recomputed

Moment = dict[str, float]
"""Live memory at one moment: name -> bytes."""


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank, of one block and one microbatch; `unit` as in Block. Of its weights: as computed with
    (`whole`), copies that autocast makes (`casts`). Of their gradients: as autograd makes them (`made`), as
    microbatches are summed up (`summed`), on the wire (`sent`), at the end (`end`), the `largest`. Of activations: what
    is `kept`, of it what it was handed (`taken`) and hands on (`given`), the most alive in its backward (`peak_live`),
    what it `passes` on, and the gradients that wait for a backward of the weights alone (`deferred_wgrad`), without
    what only a block behind needs (`ends`).
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
    kept: float
    peak_live: float
    passes: float
    taken: float
    given: float
    deferred_wgrad: float
    ends: float


def sizes_of(plan: Decided, shapes: Shapes, block: Block) -> Sizes:
    types, state, micro = types_of(plan), holding_of(plan), plan.batch.microbatch
    counts = [math.prod(gathered(plan, weight)) for weight in block.weights]
    product = sum(count for count, weight in zip(counts, block.weights, strict=True) if weight.product)
    trained = [count for count, weight in zip(counts, block.weights, strict=True) if weight.trained]
    wide, at_once = types.compute if state.shards else types.param, state.every and plan.mesh.pp == 1
    kept, peak_live = _activations(plan, shapes, block)
    return Sizes(
        block.count, block.unit, sum(counts) * wide, product * types.compute * (types.autocast and not state.shards),
        sum(trained) * wide,
        sum(trained) * (types.reduce if state.shards and not at_once else wide), sum(trained) * types.reduce,
        sum(math.prod(piece(plan, weight)) for weight in block.weights if weight.trained) * types.param,
        max(trained, default=0) * wide,
        kept * micro, peak_live * micro, block.passes * flowing(plan).param * micro / plan.mesh.cp,
        *(block.kept[way].of(plan) * micro for way in ("taken", "given", "deferred_wgrad", "ends")),
    )  # fmt: skip


def _activations(plan: Decided, shapes: Shapes, block: Block) -> tuple[float, float]:
    """(kept, most alive in the backward) of one sample; what is computed again is alive then as if it had been kept."""
    everything = block.kept["all"].of(plan)
    whole = min(everything, block.kept[fact(plan.compile, "keeps")].of(plan)) if block.listed else everything
    peak_live = block.peak_live.of(plan) - (everything - whole)
    if not block.listed:
        return whole, peak_live
    if fact(plan.remat, "keeps") != "inputs":
        return min(whole, block.kept[fact(plan.remat, "keeps")].of(plan)), peak_live
    again = recomputed(plan, shapes.listed)
    return (1 - again) * whole + again * block.kept["inputs"].of(plan), peak_live


@dataclass(frozen=True)
class Place:
    """One block of a stage in its backward, and what lies before and behind it."""

    before: Sequence[Sizes]
    block: Sizes
    behind: Sequence[Sizes]


def places(blocks: Sequence[Sizes]) -> Iterator[Place]:
    """The first and the last block of each run."""
    for index, run in enumerate(blocks):
        one = replace(run, count=1)
        for done in {0, run.count - 1}:
            yield Place(
                (*blocks[:index], replace(run, count=done)),
                one,
                (replace(run, count=run.count - 1 - done), *blocks[index + 1 :]),
            )


def total(blocks: Sequence[Sizes], name: str, *, unit: bool | None = None) -> float:
    """Of all blocks, or of those that are units (or not)."""
    return sum(size.count * float(getattr(size, name)) for size in blocks if unit is None or size.unit == unit)


def inside(place: Place) -> Moment:
    """Activations in the backward of one microbatch."""
    block = place.block
    kept = total(place.before, "kept") + total(place.before, "casts") + block.kept + block.casts
    return {"activations": kept, "inside a block": max(0.0, block.peak_live - block.kept)}


def moments(plan: Decided, blocks: Sequence[Sizes]) -> Iterator[tuple[str, Moment]]:
    """The backwards and reductions of a rank without a pipeline."""
    state, several = holding_of(plan), plan.batch.accumulate > 1
    for place in places(blocks):
        if not state.shards:
            yield "backward", inside(place) | _copies(state, place, blocks, several=several)
            continue
        for last in {True, not several}:
            yield "backward", inside(place) | _sharded(state, place, blocks, several=several, last=last)
        yield "reduction", _reduced(state, place, blocks, several=several)
    if state.shards:
        root = [size for size in blocks if not size.unit]
        ends = total(blocks, "end")
        yield "reduction", {
            "gradients": ends, "gathered blocks": total(root, "whole"),
            "gradients on their way": total(root, "summed") + total(root, "sent"),
        }  # fmt: skip


def _copies(state: Holding, place: Place, blocks: Sequence[Sizes], *, several: bool) -> Moment:
    """One more of the gradients is there for a moment before it is added to what is there; before its last microbatch
    ddp sums them up beside its buckets.
    """
    if several or state.buckets:
        return {
            "gradients": total(blocks, "made") * (several + state.buckets),
            "gradients on their way": place.block.largest,
        }
    return {"gradients": total(place.behind, "made") + place.block.made}


def _gathered(state: Holding, place: Place, blocks: Sequence[Sizes], *, last: bool, own: bool) -> float:
    """The root always, and the block; the one before it is on its way. Or all, of which the `last` backward frees one
    after the other.
    """
    root = total(blocks, "whole", unit=False)
    mine = place.block.whole * (own and place.block.unit)
    if state.frees:
        before = [size for size in place.before if size.unit and size.count]
        return root + mine + (before[-1].whole if before else 0.0)
    return root + (total(place.before, "whole", unit=True) + mine if last else total(blocks, "whole", unit=True))


def _sharded(state: Holding, place: Place, blocks: Sequence[Sizes], *, several: bool, last: bool) -> Moment:
    """The root's gradients are whole until the end; those of the block behind are still being sent."""
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
    return {
        "gradients": gradients + root, "gathered blocks": _gathered(state, place, blocks, last=last, own=True),
        "gradients on their way": place.block.made + sent,
    }  # fmt: skip


def _reduced(state: Holding, place: Place, blocks: Sequence[Sizes], *, several: bool) -> Moment:
    """The block's activations are gone and it is no longer gathered."""
    if not place.block.unit:
        return {}
    root = total(place.behind, "made", unit=False)
    if several and state.every:
        gradients = total(blocks, "end")
    elif several:
        gradients, root = (
            total(place.before, "summed", unit=True) + total(place.behind, "end", unit=True),
            total(blocks, "summed", unit=False),
        )
    else:
        gradients = total(place.behind, "end", unit=True)
    way = (place.block.made if state.every or not several else place.block.summed) + place.block.sent + place.block.end
    return {
        "activations": total(place.before, "kept"), "gradients": gradients + root,
        "gathered blocks": _gathered(state, place, blocks, last=True, own=False), "gradients on their way": way,
    }  # fmt: skip


def pipelined(
    plan: Decided, shapes: Shapes, stages: Sequence[Sequence[Sizes]], handed: Sequence[float], rank: int
) -> Iterator[tuple[str, Moment]]:
    """Of a rank that holds these stages: gradients are summed whole over the microbatches, and FSDP2 keeps all blocks
    gathered.

    `handed`: bytes of one microbatch that each stage of the pipeline gives to the next.
    """
    state, blocks = holding_of(plan), [size for stage in stages for size in stage]
    mine = dict(zip(_owned(plan, rank), stages, strict=True))
    flights = {
        stage: _flight(plan, some, stage, handed, shapes.returns.of(plan) * plan.batch.microbatch)
        for stage, some in mine.items()
    }
    both = {"gradients": total(blocks, "summed"), "gathered blocks": total(blocks, "whole") if state.shards else 0.0}
    between = {
        "between stages": _between(plan, handed, rank) + shapes.inputs * plan.batch.local / plan.mesh.cp
    }  # of all microbatches, put together
    largest = max(size.made if state.shards else size.largest for size in blocks)
    for most, own in _in_flight(plan, flights, rank):
        yield (
            "backward",
            {"activations": most, "inside a block": own, **both, **between, "gradients on their way": largest},
        )
    if state.shards:
        yield (
            "reduction",
            {**both, **between, "gradients on their way": max(size.sent for size in blocks) + total(blocks, "end")},
        )


@dataclass(frozen=True)
class Flight:
    """Bytes of one microbatch in one stage. From its forward on: what autograd `kept`, and what is `sent` to another
    rank. In its backward: `inside` a block, then the gradient sent `backward_work`; and what waits for the backward of
    the weights (`left`).
    """

    kept: float
    sent: float
    inside: float
    backward_work: float
    left: float


def _flight(plan: Decided, blocks: Sequence[Sizes], stage: int, handed: Sequence[float], returns: float) -> Flight:
    """Tensors from other stages have buffers of their own (`_between`); a stage of the same rank is handed the tensor
    itself.

    Until the last gradient of a weight is there the graph below it stays whole
    (torch/distributed/pipelining/_backward.py of torch 2.13); the first stage leaves all to the backward of the
    weights.
    """
    owners = plan.pipeline.owners(plan.mesh.pp)
    first, last = stage == 0, stage == len(owners) - 1
    kept = total(blocks, "kept") + total(blocks, "casts")
    most = max(sum(inside(place).values()) for place in places(blocks)) - kept
    return Flight(
        kept + returns * last - (0.0 if first else blocks[0].taken),
        0.0 if last else max(0.0, handed[stage] - blocks[-1].given) * (owners[stage + 1] != owners[stage]),
        most,
        0.0 if first else handed[stage - 1] * (owners[stage - 1] != owners[stage]),
        0.0 if first else total(blocks, "deferred_wgrad") - blocks[-1].ends - returns * last,
    )


def _in_flight(plan: Decided, flights: Mapping[int, Flight], rank: int) -> Iterator[tuple[float, float]]:
    """(activations kept, alive beside them inside a block): when both are most together, and when most are kept.

    Schedules of several stages wait at the end of a step for what they sent, and keep it until then; that of one until
    the next is sent.
    """
    count, shape = plan.batch.accumulate, plan.pipeline
    if fact(shape.order, "keeps") == "all":
        yield (
            count * sum(each.kept + each.sent for each in flights.values()),
            max(each.inside for each in flights.values()),
        )
        return
    few = min(count, 4 * plan.mesh.pp * shape.stages)  # by then it has come to a steady state
    few = few if count == few else few - few % max(1, count // max(1, count // plan.mesh.pp))
    best, most, ends = (0.0, 0.0), 0.0, shape.stages > 1
    flying = 0.0 if ends else sum(each.sent + each.backward_work for each in flights.values())
    for kind, stage, _ in actions(shape, plan.mesh.pp, few, rank):
        here = flights[stage]
        if kind == "F":
            flying += here.kept + here.sent
            continue
        best = max(best, (flying, here.inside * (kind != "W")), key=sum)
        flying += here.backward_work * ends * (kind in "BI") + here.left * (kind == "I")
        most = max(most, flying)
        if kind != "I":
            flying -= here.kept + here.sent * (not ends) + here.left * (kind == "W")
    more = ends * (count - few) * sum(each.sent + each.backward_work for each in flights.values())
    yield best[0] + more, best[1]
    yield most + more, 0.0


def _between(plan: Decided, handed: Sequence[float], rank: int) -> float:
    """Torch's schedules keep room for what comes from each side, of every microbatch."""
    return plan.batch.accumulate * sum(
        (handed[stage - 1] if stage else 0.0) + handed[stage] * (stage < len(handed) - 1)
        for stage in _owned(plan, rank)
    )


def _owned(plan: Decided, rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(plan.pipeline.owners(plan.mesh.pp)) if owner == rank]
