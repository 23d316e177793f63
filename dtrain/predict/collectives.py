"""Predicts the collectives of one rank in one optimizer step: axis, number of calls and bytes. See them with `dtrain
plan`.

Bytes are the payload of a call on one rank as nccl-tests counts it
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the whole tensor that is reduced, gathered or
scattered, including padding; for an all-to-all the send buffer of a rank, including its own part; for a message its
tensor. `dtrain.predict.time` converts this to bytes on the wire. Groups of one rank are left out.

Only one rank per pipeline stage is examined, the first on all other axes. The rows that experts exchange depend on the
data: here all experts get equally many, which is right on average. Evaluation, saves and setup at the start are not
included.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.chunks import rows_of
from dtrain.predict.shapes import Block, Shapes, Split, Weight, stages_of
from dtrain.predict.state_bytes import gathered, gathered_bytes, message
from dtrain.predict.view import View, kinds

STOP_BYTES = 8
"""Two numbers with which ranks agree on a stop."""


@dataclass(frozen=True)
class Call:
    """`calls` collectives of one `kind` over `axis`, with `bytes` in total; `when`: step, flush (of the log), data or
    agreement.
    """

    axis: str
    kind: str
    what: str
    calls: int
    bytes: float
    when: str = "step"


def padded(shape: tuple[int, ...], ranks: int) -> int:
    """Number of elements of all shards together, with dim 0 padded to equal parts."""
    return math.prod((-(-shape[0] // ranks) * ranks, *shape[1:]))


def collectives(plan: Plan, shapes: Shapes, rank: int = 0) -> tuple[Call, ...]:
    """Collectives of one rank with pipeline rank `rank` (0 without a pipeline)."""
    return _of(View(plan, shapes, rank, stages_of(plan, shapes)))


def of_data_axes(plan: Plan, shapes: Shapes) -> tuple[Call, ...]:
    """Those of `collectives` that gather weights and reduce gradients over the data axes."""
    return _of(View(plan, shapes, 0, stages_of(plan, shapes)), [_data])


def of_pipeline_ranks(plan: Plan, shapes: Shapes) -> list[tuple[Call, ...]]:
    """Collectives of one rank with each pipeline rank; those of ranks that hold the same are one object."""
    every = stages_of(plan, shapes)
    ranks = kinds(plan, every)
    known = {kind: _of(View(plan, shapes, ranks.index(kind), every)) for kind in dict.fromkeys(ranks)}
    return [known[kind] for kind in ranks]


def _of(view: View, parts: Sequence[Callable[[View], Iterable[Call]]] = ()) -> tuple[Call, ...]:
    merged: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    first: dict[tuple[str, str, str, str], Call] = {}
    for call in (call for part in parts or PARTS for call in part(view)):
        key = (call.axis, call.kind, call.what, call.when)
        if call.calls and view.groups[call.axis].size > 1:
            calls, size = merged.get(key, (0, 0.0))
            merged[key] = calls + call.calls, size + call.bytes
            first.setdefault(key, call)
    return tuple(replace(first[key], calls=calls, bytes=size) for key, (calls, size) in merged.items())


def _data(view: View) -> Iterator[Call]:
    if view.holding.shards:
        for stage in view.stages.values():
            yield from _sharded(view, stage)
        whole = sum(
            block.count * (weight.trained and not weight.shape) for block, _ in view.blocks for weight in block.weights
        )
        if whole:
            yield Call("batch", "all_reduce", "gradients", 1, whole * view.types.param)
    elif view.plan.mesh.pp * view.plan.mesh.tp * view.plan.mesh.ep == 1:
        yield from _ddp(view)
    else:
        yield from _averaged(view)


def _sharded(view: View, stage: tuple[Block, ...]) -> Iterator[Call]:
    """FSDP2: each listed block and the head is an FSDP unit, the rest belongs to the root; experts are sharded over the
    ranks that hold the same ones.
    """
    apart, several = view.plan.mesh.ep > 1, view.plan.batch.accumulate > 1
    listed = [index for index, block in enumerate(stage) if block.listed]
    stays = next((index for index in listed if stage[index].stays), listed[-1] if listed else -1)
    root: list[Weight] = []
    once = view.plan.batch.accumulate if view.holding.frees else 1
    for index, block in enumerate(stage):
        experts = [weight for weight in block.weights if weight.experts and apart]
        dense = [weight for weight in block.weights if weight not in experts]
        if block.head:
            yield from _unit(view, dense, 1, once)
        elif block.listed:
            one = int(index == stays)  # its backward follows at once, so it stays gathered
            yield from _unit(view, dense, block.count - one, _gathers(view, block))
            yield from _unit(view, dense, one, _gathers(view, block, stays=True))
            yield from _unit(view, experts, block.count, _gathers(view, block), axis="expert_shard")
        else:
            root += dense * block.count
    yield from _unit(view, root, 1, once)
    yield from _wasted(view, [stage[index] for index in listed], root, several=several)


def _gathers(view: View, block: Block, *, stays: bool = False) -> int:
    """Number of all-gathers of a block per step: before each forward and backward, unless it is still gathered."""
    back = block.uses * block.grad_out
    if view.holding.frees:
        return view.plan.batch.accumulate * (max(1, back) if stays else block.uses + back)
    return max(1, back) if view.plan.mesh.pp == 1 else 1


def _wasted(view: View, listed: list[Block], root: list[Weight], *, several: bool) -> Iterator[Call]:
    """Unneeded prefetches of FSDP2 for the next backward: the last block without a backward; and, if gradients are
    accumulated and the root has no weights, the last block of the previous microbatch.
    """
    if view.plan.mesh.pp > 1:
        return
    without = [block for block, after in itertools.pairwise(listed) if after.grad_out and not block.grad_out]
    if without:
        yield from _gathered(view, list(without[-1].weights), int(view.holding.frees), "dp_shard")
    elif several and not root and listed:
        yield from _gathered(view, list(listed[-1].weights), 1, "dp_shard")


def _unit(view: View, weights: list[Weight], count: int, gathers: int, *, axis: str = "dp_shard") -> Iterator[Call]:
    """`count` equal FSDP units, each gathered `gathers` times and reduced; scalar weights are not sharded."""
    weights = [weight for weight in weights if weight.shape]
    if not weights or not count:
        return
    plan, size = view.plan, view.groups[axis].size
    trained = sum(padded(gathered(plan, weight), size) for weight in weights if weight.trained)
    yield from _gathered(view, weights, count * gathers, axis)
    if trained:
        times, reduce = count * view.reduces, view.types.reduce
        yield Call(axis, "reduce_scatter", "gradients", times, times * trained * reduce)
        if axis == "dp_shard":
            yield Call("dp_replicate", "all_reduce", "gradients", times, times * trained * reduce / size)


def _gathered(view: View, weights: list[Weight], times: int, axis: str) -> Iterator[Call]:
    numbers = sum(padded(gathered(view.plan, weight), view.groups[axis].size) for weight in weights if weight.shape)
    yield Call(axis, "all_gather", "weights", times, times * numbers * gathered_bytes(view.plan))


def _ddp(view: View) -> Iterator[Call]:
    """DistributedDataParallel: buckets from the last weight to the first."""
    if view.weights:
        sizes = [_message(view, view.rank) * view.types.param, *(w.count * view.types.param for w in view.weights)]
        yield Call("batch", "all_reduce", "gradients", _buckets(sizes[::-1], _bucket(view.plan)), sum(sizes))


def _averaged(view: View) -> Iterator[Call]:
    """Collectives of dtrain.strategy.ddp.average after the backward, used together with other axes."""
    sizes: dict[str, list[int]] = {"batch": [], "expert_shard": []}
    for block, _ in view.blocks:
        for axis, each in sizes.items():
            apart = axis == "expert_shard"
            mine = [one for one in block.weights if one.trained and (one.experts and view.plan.mesh.ep > 1) == apart]
            each += [math.prod(gathered(view.plan, weight)) * view.types.param for weight in mine] * block.count
    sizes["batch"].append(4 * _message(view, view.rank))
    for axis, each in sizes.items():
        if each:
            yield Call(axis, "all_reduce", "gradients", _buckets(each, _bucket(view.plan)), sum(each))


def _message(view: View, rank: int) -> int:
    """Numbers in the message of a rank with this pipeline rank."""
    other = View(view.plan, view.shapes, rank, view.every)
    return message(view.shapes, (block for block, _ in other.blocks))


def _bucket(plan: Plan) -> int:
    return int(float(plan.strategy.get("bucket_mb") or 25) * 2**20)


def _buckets(sizes: list[int], bucket: int) -> int:
    """Number of buckets, each closed as soon as it has `bucket` bytes."""
    count, filled = 0, 0
    for size in sizes:
        filled += size
        if filled >= bucket:
            count, filled = count + 1, 0
    return count + (filled > 0)


def _tensor(view: View) -> Iterator[Call]:
    """Tensor parallelism of Megatron (arXiv 1909.08053) and, with tensor.sequence=split, of arXiv 2205.05198, for each
    module in the model's `tp_plan`.
    """
    if view.plan.mesh.tp == 1:
        return
    for block, again in view.blocks:
        for split in block.splits:
            forwards = block.count * view.plan.batch.accumulate
            repeated = again * split.recompute * view.plan.batch.accumulate
            yield from _module(view, split, forwards, repeated, chunked=block.chunk is not None)
        yield from _replicated_weights(view, block)


def _module(view: View, split: Split, forwards: int, repeated: int, *, chunked: bool) -> Iterator[Call]:
    """Collectives of one module: `forwards` passes, of which `repeated` are recomputed in the backward. `chunked`: it
    is a head whose logits are never gathered.
    """
    sequence = view.plan.tensor["sequence"] == "split"
    product = view.types.compute
    call = partial(_activations, view, forwards)
    kind = split.style
    if kind.startswith("colwise") and not sequence and split.grad_in:
        yield call("all_reduce", split.inputs * view.stream)  # gradient of the input
    if kind in ("colwise_gather_output", "colwise_rep") and view.plan.tensor["loss"] == "whole" and not chunked:
        whole = -(-split.width // view.plan.mesh.tp) * view.plan.mesh.tp
        yield call("all_gather", split.outputs // split.width * whole * product)
    if kind.startswith("rowwise") or kind == "embedding_rowwise":
        each = split.outputs * (view.stream if kind == "embedding_rowwise" else product)
        whole_sum = split.summed or not sequence
        yield _activations(view, forwards + repeated, "all_reduce" if whole_sum else "reduce_scatter", each)
        if sequence and split.grad_out:
            yield call("all_gather", each)
        if split.twice:
            yield call("all_reduce", each)
    if kind == "sequence_parallel" and sequence:
        yield _activations(view, forwards + repeated, "all_gather", split.outputs * view.stream)
        if split.grad_out:
            yield call("reduce_scatter", split.outputs * view.stream)


def _activations(view: View, times: int, kind: str, each: float) -> Call:
    """`times` calls, each with `each` bytes per sample."""
    return Call("tp", kind, "activations", times, times * each * view.rows)


def _replicated_weights(view: View, block: Block) -> Iterator[Call]:
    """Norms that see a part of the sequence or of the heads compute partial gradients, which are summed."""
    styles = ["replicated_with_grad_allreduce"] + ["sequence_parallel"] * (view.plan.tensor["sequence"] == "split")
    for split, weight in itertools.product(block.splits, block.weights):
        if split.style in styles and weight.trained and weight.name.rpartition(".")[0] == split.name:
            times = block.count * view.reduces
            yield Call("tp", "all_reduce", "gradients", times, times * weight.count * gathered_bytes(view.plan))


def _loss(view: View) -> Iterator[Call]:
    """Loss of logits split over the vocabulary: per token, a maximum and then two sums in fp32."""
    last = max(view.stages) == view.plan.mesh.pp * view.plan.pipeline.stages - 1 or view.plan.mesh.pp == 1
    chunk = next((block.chunk for block, _ in view.blocks if block.chunk), None)
    if (view.plan.tensor["loss"] == "split" or (chunk and chunk.split)) and last:
        times, tokens = view.plan.batch.accumulate, view.rows * view.shapes.tokens
        calls = 2 * math.ceil(tokens / rows_of(view.plan, chunk)) if chunk else 2
        yield Call("tp", "all_reduce", "loss", calls * times, times * 12 * tokens)


def _context(view: View) -> Iterator[Call]:
    mesh, times = view.plan.mesh, view.plan.batch.accumulate
    if mesh.cp == 1:
        return
    for block, again in view.blocks:
        for one in block.attention:
            heads, queries = (-(-many // (mesh.tp if one.split else 1)) for many in (one.kv_heads, one.heads))
            row, width = view.rows * one.tokens, one.head + one.value
            forwards, backs = times * (block.count + again * one.grad_out), times * block.count * one.grad_out
            if view.plan.context["attention"] == "ulysses":
                each = row * (queries + math.lcm(heads, mesh.cp)) * width * one.bytes
                yield Call("cp", "all_to_all", "heads", 4 * (forwards + backs), (forwards + backs) * each)
                continue
            steps = (mesh.cp - 1) * (forwards + backs)  # keys and values, in the forward and in the backward
            size = steps * one.bytes + mesh.cp * backs * 4  # their gradients in fp32
            for kind in ("send", "recv"):
                yield Call("cp", kind, "keys and values", 2 * (steps + mesh.cp * backs), row * heads * width * size)


def _experts(view: View) -> Iterator[Call]:
    """Forward: counts and rows to the experts, rows back; backward: rows only. Once per step: load of the experts."""
    mesh, times = view.plan.mesh, view.plan.batch.accumulate
    for block, again in view.blocks:
        for one in block.experts:
            if mesh.ep > 1:
                forwards, rows = times * (block.count + again), view.rows * one.rows * one.width * one.bytes
                backwards = times * block.count
                size = forwards * (8 * one.count + 2 * rows) + backwards * 2 * rows
                yield Call("ep", "all_to_all", "rows", 3 * forwards + 2 * backwards, size)
    counted = sum(block.count * one.count for block, _ in view.blocks for one in block.experts)
    if counted:
        yield Call("batch", "all_reduce", "balance of experts", 1, 8 * counted)


def _pipeline(view: View) -> Iterator[Call]:
    """Transfers between stages on different ranks, forward and backward; split along the sequence with
    tensor.sequence=split.
    """
    mesh, times = view.plan.mesh, view.plan.batch.accumulate
    if mesh.pp == 1:
        return
    owners = view.plan.pipeline.owners(mesh.pp)
    part = mesh.tp if view.plan.tensor["sequence"] == "split" else 1
    for index in view.stages:
        for kind, before, source in (("send", index + 1, index), ("recv", index - 1, index - 1)):
            if 0 <= before < len(owners) and owners[before] != view.rank:
                each = view.every[source][-1].passes * view.rows * view.stream / part
                yield Call("pp", kind, "activations", times, times * each)
                yield Call("pp", "recv" if kind == "send" else "send", "gradients", times, times * each)


def _optimizer(view: View) -> Iterator[Call]:
    needs, size = fact(view.plan.optim, "needs"), view.groups["dp_shard"].size if view.holding.shards else 1
    if needs == "matrices":
        for weight in view.weights:
            yield from _muon(view, weight, size) if weight.hidden else ()
    if needs == "statistics":
        alike: dict[tuple[bool, bool], list[Weight]] = {}
        for weight in view.weights:
            moved = weight.experts and view.plan.mesh.ep > 1
            alike.setdefault((len(weight.shape) > 1, moved), []).append(weight)
        for (_, moved), weights in alike.items():
            yield from _adafactor(view, weights, ("expert_shard", "ep") if moved else ("dp_shard",))


def _adafactor(view: View, weights: Sequence[Weight], data: Sequence[str]) -> Iterator[Call]:
    """For weights on one mesh, over each axis that splits some of them: squared norms together with the sums along the
    split dim, sums of row means, squared norms of updates.
    """
    for axis in (*data, "tp"):
        count = numbers = means = 0
        for weight in weights:
            splits = {name: 0 for name in data if name == "ep" or view.holding.shards}
            if weight.tp is not None:
                splits["tp"] = weight.tp
            if axis not in splits or view.groups[axis].size == 1 or not weight.shape:
                continue
            local = list(weight.shape)
            for other, dim in splits.items():
                local[dim] = -(-local[dim] // view.groups[other].size)
            behind = len(local) - splits[axis]
            count += 1
            numbers += math.prod(local) // local[splits[axis]] if len(local) > 1 and behind <= 2 else 0
            means += math.prod(local[:-2]) if len(local) > 1 and behind == 2 else 0
        if count:
            yield Call(axis, "all_reduce", "optimizer", 2 + bool(means), 4 * (2 * count + numbers + means))


def _muon(view: View, weight: Weight, size: int) -> Iterator[Call]:
    """Assemble a matrix from its shards; if both axes split its rows, gather over the data axis first."""
    tp, bytes_ = view.plan.mesh.tp if weight.tp is not None else 1, view.types.param
    rows, columns = weight.shape
    if weight.tp == 0:
        inner, outer = -(-rows // tp), -(-rows // tp) * tp
        yield Call("dp_shard", "all_gather", "optimizer", int(size > 1), padded((inner, columns), size) * bytes_)
        yield Call("tp", "all_gather", "optimizer", 1, outer * columns * bytes_)
        return
    yield Call("tp", "all_gather", "optimizer", int(tp > 1), -(-rows // size) * -(-columns // tp) * tp * bytes_)
    yield Call("dp_shard", "all_gather", "optimizer", int(size > 1), padded((rows, columns), size) * bytes_)


def _loop(view: View) -> Iterator[Call]:
    """Gradient norm, beside the loss if spikes of it are detected and, where the strategy does not sum them, the
    messages about a step; buffers, and periodic agreements.
    """
    plan, mesh = view.plan, view.plan.mesh
    beside = plan.spike.get("sigma") is not None
    split = mesh.pp > 1 or mesh.ep > 1 or mesh.tp > 1 or (view.holding.shards and mesh.dp_shard * mesh.cp > 1)
    for floating, size in view.shapes.moving:
        yield Call("batch", "all_reduce" if floating else "broadcast", "buffers", 1, size)
    told = mesh.pp * max(_message(view, rank) for rank in range(mesh.pp)) if view.holding.shards else 0
    if split or beside:
        yield Call("world", "all_reduce", "gradient norm", 1, 4 * (split + beside + told * (mesh.batch > 1)))
    counted = not fact(plan.data, "dense") and fact(plan.data, "loading") == "step"
    if counted and not plan.data.get("workers"):
        yield Call(axis="batch", kind="all_reduce", what="targets that count", calls=1, bytes=8, when="data")
    names = 1 + len(fact(plan.objective, "metrics", ()))
    for axis in ("batch", "pp"):
        yield Call(
            axis=axis,
            kind="all_reduce",
            what="rows of the log",
            calls=1,
            bytes=4 * names * plan.log_every,
            when="flush",
        )
    yield Call(axis="world", kind="all_reduce", what="agreement on a stop", calls=1, bytes=STOP_BYTES, when="agreement")


PARTS = _data, _tensor, _loss, _context, _experts, _pipeline, _optimizer, _loop
