"""Live memory of one rank of a pipeline: microbatches are in flight in its stages, from their forward to the end of
their backward.

    forward      its input and what is saved for the backward, until that has ended
    backward     the gradient received, live memory of a block, the gradient sent back; one of the inputs alone keeps
                 all, with the gradients that wait for the weights
    reduction    of the gradients of all stages, after the last backward
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.block_bytes import BlockBytes
from dtrain.predict.peak_memory import Moment, inside, places, total
from dtrain.predict.schedule import Spot, first_rounds, spots
from dtrain.predict.shapes import Shapes, types_of
from dtrain.predict.state_bytes import holding_of


@dataclass(frozen=True)
class Flight:
    """Bytes of one microbatch in one stage. From its forward on: tensors `saved` for the backward, of which the input
    `given` by another rank comes before, and the output `sent` to the next stage. In its backward: the gradient that
    was `received`, live memory of a block, then the gradient sent (`returned`), and memory that waits for the weight
    backward (`left`).

    `first`, `later`: (live memory beyond `saved`, gradients on their way) at the peak of its backwards. In the `first`
    one of a step gradients come into being block by block; each `later` one adds to all `gradients` of the stage.
    `inner`: live memory beyond `saved` and `left` in a backward of the inputs, which lets go of nothing; `rerun`:
    beyond `saved`, in a weight backward: that of logits in chunks runs anew.
    `narrow`: gradients that a weight backward leaves in the type of the products, until the next backward adds them.
    `leads`: it is the first stage of all.
    """

    given: float
    saved: float
    sent: float
    received: float
    first: tuple[float, float]
    later: tuple[float, float]
    gradients: float
    returned: float
    left: float
    inner: float
    rerun: float
    narrow: float
    leads: bool


def pipelined(
    plan: Plan, shapes: Shapes, stages: Sequence[Sequence[BlockBytes]], flights: Sequence[Flight], rank: int
) -> Iterator[tuple[str, Moment]]:
    """Memory of a rank that holds these stages: gradients are accumulated unsharded over the microbatches, and FSDP2
    keeps all blocks gathered. `flights`: of each of the stages.
    """
    state, blocks = holding_of(plan), [size for stage in stages for size in stage]
    # inputs of all microbatches, concatenated
    base = {
        "gathered blocks": total(blocks, "weights.gathered") if state.shards else 0.0,
        "inputs": shapes.inputs * plan.batch.local / plan.mesh.cp,
    }
    for moment in _in_flight(plan, flights, rank):
        yield "backward", base | moment
    if state.shards:
        for moment in _reductions(stages, 1 + (plan.device == "cpu")):
            yield "reduction", base | moment


def flight(plan: Plan, shapes: Shapes, blocks: Sequence[BlockBytes], stage: int, handed: Sequence[float]) -> Flight:
    """Memory of one microbatch in a stage of the pipeline. What comes from another rank is in a receive buffer until it
    was used; a stage on the same rank gets the tensor itself. `handed`: bytes that each stage sends to the next.

    The graph below a weight stays alive until its gradient is computed (torch/distributed/pipelining/_backward.py of
    torch 2.13); the first stage leaves everything to the weight backward.
    """
    owners = plan.pipeline.owners(plan.mesh.pp)
    first, last = stage == 0, stage == len(owners) - 1
    returns = _returned(plan, shapes)
    saved = total(blocks, "activations.saved") + total(blocks, "weights.casts")
    computed, accumulated = total(blocks, "gradients.computed"), total(blocks, "gradients.accumulated")
    deferred, end = total(blocks, "activations.deferred_wgrad"), blocks[-1].activations
    first_spots, later_spots = list[tuple[float, float]](), list[tuple[float, float]]()
    for place in places(blocks):
        live, block = sum(inside(place).values()) - saved, place.block
        if not last and not total(place.behind, "count"):
            live -= handed[stage]  # the gradient of the output was received
        made = block.gradients
        first_spots.append((live, total(place.behind, "gradients.accumulated") + made.largest))
        # FSDP2 converts the gradients of a block together
        later_spots.append((live, made.largest if made.computed == made.accumulated else made.computed))
    first_spots.append((blocks[0].activations.saved_input * 2 - saved, accumulated))
    before = not first and owners[stage - 1] != owners[stage]
    own = 0.0 if first else blocks[0].activations.saved_input
    given = max(own, handed[stage - 1]) if before else 0.0
    return Flight(
        given=given,
        saved=saved + returns * last + given - own,
        sent=0.0 if last else max(0.0, handed[stage] - end.saved_output),
        received=0.0 if last else handed[stage],
        first=max(first_spots, key=sum),
        later=max(later_spots, key=sum),
        gradients=accumulated,
        returned=handed[stage - 1] if before else 0.0,
        left=0.0 if first else deferred - end.ends - returns * last,
        inner=max(size.activations.transient for size in blocks),
        rerun=end.peak_live - end.saved if last and shapes.blocks[-1].chunk else 0.0,
        narrow=0.0 if first or computed == accumulated else computed,
        leads=first,
    )


def _returned(plan: Plan, shapes: Shapes) -> float:
    """Bytes of the outputs of one microbatch, which the schedule keeps, beside what the loss saves: in 16 bits or split
    over the vocabulary it saves the logits themselves (dtrain/objective/vocabulary.py).
    """
    itself = types_of(plan).compute < 4 or (plan.mesh.tp > 1 and plan.tensor.get("loss") == "split")
    if fact(plan.objective, "task") == "next_token" and itself:
        return 0.0
    return shapes.returns.of(plan) * plan.batch.microbatch


def _reductions(stages: Sequence[Sequence[BlockBytes]], buffers: int) -> Iterator[Moment]:
    """Memory while the gradients of one unit after the other are reduced, the last stage's first, of a stage those of
    the root. A unit is freed before, and its gradients are in `buffers`: gloo reduces a copy of what is sent.
    """
    left = [size for stage in stages for size in stage]
    whole, summed, done = total(left, "weights.gathered"), total(left, "gradients.accumulated"), 0.0
    for stage in reversed(stages):
        for unit in ([size for size in stage if not size.unit], *([size] for size in stage if size.unit)):
            one = [replace(size, count=min(1, size.count)) for size in unit]
            sent = buffers * total(one, "gradients.sent")
            yield {
                "gathered blocks": whole - total(one, "weights.gathered"),
                "gradients": summed,
                "gradients on their way": sent + done + total(one, "gradients.reduced"),
            }
            whole, summed = whole - total(unit, "weights.gathered"), summed - total(unit, "gradients.accumulated")
            done += total(unit, "gradients.reduced")


def _in_flight(plan: Plan, flights: Sequence[Flight], rank: int) -> Iterator[Moment]:
    """The moments of a rank when it holds the most, and when it holds the most activations."""
    count, shape, pp = plan.batch.accumulate, plan.pipeline, plan.mesh.pp
    if fact(shape.order, "keeps") == "all":
        yield from _all_in_flight(count, flights)
        return
    # torch's schedule of one stage keeps the first output that it sent
    always = sum(each.sent for each in flights) if shape.stages == 1 else 0.0
    best, most = Moment(), 0.0
    for spot in spots(shape, pp, first_rounds(shape, count, pp), rank):
        flying = always + sum(_held(each, counts) for each, counts in zip(flights, spot.counts, strict=True))
        moment = _backward(flights, spot, flying)
        best = max(best, moment, key=lambda moment: sum(moment.values()))
        most = max(most, flying)
    yield best
    yield {"activations": most}


def _held(each: Flight, counts: Sequence[int]) -> float:
    """Activations of all microbatches in a stage."""
    sizes = each.saved + each.sent, each.given, each.received, each.returned, each.left
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _all_in_flight(count: int, flights: Sequence[Flight]) -> Iterator[Moment]:
    """The moments of a schedule that begins the backwards after all `count` forwards, in the last stage."""
    flying = count * sum(each.saved + each.sent for each in flights)
    yield {"activations": flying + flights[-1].received}
    for place in reversed(range(len(flights))):
        here = flights[place]
        for done in {0, min(1, count - 1)}:
            begun = tuple(other > place - done for other in range(len(flights)))
            spot = Spot(kind="B", place=place, counts=(), begun=begun, added=begun, apart=(False,) * len(flights))
            yield _backward(flights, spot, flying - done * (here.saved + here.sent) + here.received)
        flying -= count * (here.saved + here.sent)


def _backward(flights: Sequence[Flight], spot: Spot, flying: float) -> Moment:
    """Memory in a backward, with `flying` activations. The first stage of all, whose inputs need no gradient, does all
    of its backward with that of the weights.
    """
    here = flights[spot.place]
    live, way = here.later if spot.begun[spot.place] else here.first
    if spot.kind == "W" and not here.leads:
        live, way = here.rerun, here.narrow or way
    elif spot.kind == "I":
        live, way = max(live, here.left + here.inner), 0.0
    places = (place for place, apart in enumerate(spot.apart) if apart and (place != spot.place or spot.kind != "W"))
    return {
        "activations": flying + min(0.0, live),
        "inside a block": max(0.0, live),
        "gradients on their way": way + sum(flights[place].narrow for place in places),
        "gradients": sum(
            each.gradients
            for each, begun, added in zip(flights, spot.begun, spot.added, strict=True)
            if (added if each.narrow else begun)
        ),
    }
