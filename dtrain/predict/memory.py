"""Peak memory of a rank, and its breakdown. See it with `dtrain plan`.

Persistent state and the gradients that the optimizer reads are exact (state_bytes.py). Temporary memory is that of
torch's operators (peak_memory.py): compared with measurements on the CPU, not yet on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.planned import Plan
from dtrain.predict import reference
from dtrain.predict.block_bytes import BlockBytes, sizes_of
from dtrain.predict.in_flight import Flight, flight, pipelined
from dtrain.predict.peak_memory import Moment, moments
from dtrain.predict.shapes import Block, Shapes, stages_of, types_of
from dtrain.predict.state_bytes import StateBytes, count_state, holding_of, message
from dtrain.predict.update import update
from dtrain.predict.view import kinds


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. `parameters` and `optimizer` at rest, `gradients` when the optimizer reads them,
    `activations` at their maximum, `buffers`: those of the model, tables, and a step's samples. `peak`: maximum of the
    total, reached at `when` on `stage`; `moment` is its breakdown. `host`: bytes in host memory for a checkpoint being
    written and for offloaded state; `copies`: for copies kept there between checkpoints. `known`: False if activations
    are not included.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    when: str
    stage: str
    moment: Mapping[str, int]
    host: int
    copies: int
    known: bool = True


def memory(plan: Plan, shapes: Shapes) -> Memory:
    """Memory of the fullest rank."""
    return max(classes(plan, shapes), key=lambda memory: memory.peak)


def classes(plan: Plan, shapes: Shapes) -> list[Memory]:
    """Memory of the fullest rank of each class: ranks differ only by their pipeline rank."""
    stages, every = stages_of(plan, shapes), list[tuple[Sequence[Block], Sequence[BlockBytes]]]()
    owners = plan.pipeline.owners(plan.mesh.pp) if plan.mesh.pp > 1 else [0]
    places, known = dict.fromkeys(owners, 0), dict[tuple[int, int], list[BlockBytes]]()
    for stage, owner in zip(stages, owners, strict=True):
        key = id(stage), places[owner]
        known[key] = known.get(key) or list(sizes_of(plan, shapes, stage, places[owner]))
        every.append((stage, known[key]))
        places[owner] += sum(block.count for block in stage if block.listed)
    ranks = kinds(plan, stages)
    shares = {kind: _rank_bytes(plan, shapes, every, ranks.index(kind)) for kind in dict.fromkeys(ranks)}
    return [_of_rank(plan, shapes, shares[kind], rank) for rank, kind in enumerate(ranks)]


@dataclass(frozen=True)
class RankBytes:
    """Memory of pipeline ranks of one kind. `frozen`: bytes of a reference model; `base`: what is there all the time;
    `update`: what the optimizer's step adds.
    """

    sizes: Sequence[Sequence[BlockBytes]]
    flights: Sequence[Flight]
    state: StateBytes
    frozen: int
    buffers: float
    base: Moment
    update: Moment


def _rank_bytes(
    plan: Plan, shapes: Shapes, every: Sequence[tuple[Sequence[Block], Sequence[BlockBytes]]], rank: int
) -> RankBytes:
    """`every`: the blocks of every pipeline stage, and their sizes."""
    owners = plan.pipeline.owners(plan.mesh.pp) if plan.mesh.pp > 1 else [rank]
    mine = [stage for stage, owner in enumerate(owners) if owner == rank]
    blocks, sizes = [block for stage in mine for block in every[stage][0]], [every[stage][1] for stage in mine]
    state, away = count_state(plan, blocks), holding_of(plan).cpu and plan.device != "cpu"
    if holding_of(plan).buckets and plan.mesh.batch == plan.mesh.ranks > 1 == plan.mesh.ep:
        state.gradients += types_of(plan).param * message(shapes, blocks)
    pp, cp = plan.mesh.pp, plan.mesh.cp
    buffers = shapes.buffers / pp + shapes.tables / cp + shapes.sample * plan.batch.local / cp
    base: Moment = {"buffers": buffers, "average": state.average}
    base |= {} if away else {"parameters": state.parameters, "optimizer": state.optimizer}
    frozen = reference.held(plan, shapes, state)
    base |= {} if away else {"reference": frozen}
    base["reference's logits"] = reference.logits(plan, shapes)
    step = {} if away else {"gradients": state.gradients, "optimizer's own": update(plan, blocks)}
    handed = [each[-1].activations.output for _, each in every]
    flights = [flight(plan, shapes, every[stage][1], stage, handed) for stage in mine] if pp > 1 else []
    return RankBytes(sizes=sizes, flights=flights, state=state, frozen=frozen, buffers=buffers, base=base, update=step)


def _of_rank(plan: Plan, shapes: Shapes, share: RankBytes, rank: int) -> Memory:
    state, away = share.state, holding_of(plan).cpu and plan.device != "cpu"
    one = plan.mesh.pp == 1
    timeline = [*(moments(plan, share.sizes[0]) if one else pipelined(plan, shapes, share.sizes, share.flights, rank))]
    timeline.append(("optimizer step", share.update))
    whole = ((when, share.base | moment) for when, moment in timeline)
    when, moment = max(whole, key=lambda each: sum(each[1].values()))
    activations = max(moment.get("activations", 0.0) for _, moment in timeline)
    local = state.parameters + state.optimizer + state.average
    return Memory(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=round(activations),
        buffers=round(share.buffers),
        peak=round(sum(moment.values())),
        when=when,
        stage="" if one else f"pp rank {rank}",
        moment={name: round(size) for name, size in moment.items() if size >= 1},
        host=local + away * (state.all - state.average + share.frozen),
        copies=2 * local * bool(plan.checkpoint.get("memory")),
        known=not shapes.unknown,
    )
