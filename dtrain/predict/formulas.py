"""The shapes of dtrain's own models, by arithmetic on their arguments: their forwards are recorded with
ActivationModel, without torch.

Tests compare them with the real models.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dtrain.config.facts import Part, about, fact
from dtrain.planned import Plan
from dtrain.predict.activations import ActivationModel, Value
from dtrain.predict.chunks import in_chunks
from dtrain.predict.shapes import (
    Attention,
    Block,
    Chunk,
    Experts,
    LayoutBytes,
    Shapes,
    Split,
    Types,
    Weight,
    runs,
    types_of,
)
from dtrain.predict.state_bytes import flowing, gathered_bytes
from dtrain.predict.stated import unstated

NEXT = "sequence_parallel"


@dataclass(frozen=True)
class Run:
    """Inputs of the formulas besides the model's arguments. `tokens` per sample; `context`: the way in which ranks that
    share a sequence, `ranks` of them, attend to all of it, or empty; `cast`: inputs are cast to another type; `rows`:
    bytes of a number in the rows of an embedding; `chunk`: that of the objective, whose backward computes logits
    `again`.
    """

    types: Types
    fused: bool
    tokens: int
    context: str
    ranks: int
    cast: bool
    task: str
    rows: int
    chunk: int | str = 0
    again: bool = False

    def tape(self, name: str) -> ActivationModel:
        return ActivationModel(name, self.types, fused=self.fused)


def shapes(plan: Plan) -> Shapes | None:
    """Shapes of the plan's model; None if it is not one of dtrain's, or if an argument or the sample length is only
    known from the data.
    """
    formula, facts = about(plan.model).get("arithmetic"), facts_of(plan.data)
    part = {name: facts.get(name, value) if value == "auto" else value for name, value in plan.model.items()}
    task = fact(plan.objective, "task")
    tokens = plan.data.get("sequence") if task == "next_token" else 1
    if unknown(plan) or formula is None or task is None or tokens is None:
        return None
    context = plan.context["attention"] if plan.mesh.cp > 1 else ""
    run = Run(
        types=flowing(plan),
        fused=plan.device == "cuda",
        tokens=tokens,
        context=context,
        ranks=plan.mesh.cp,
        cast=types_of(plan).param != 4,
        task=task,
        rows=gathered_bytes(plan),
        chunk=plan.objective.get("chunk", 0),
        again=again_of(plan),
    )
    return FORMULAS[formula](part, run)


def unknown(plan: Plan) -> str:
    """For what, or when, `shapes` knows nothing; empty if it does."""
    facts = facts_of(plan.data)
    open_ = [f"model.{name}" for name, value in plan.model.items() if value == "auto" and name not in facts]
    if plan.model.get("freeze"):
        return "for frozen parameters"  # what is kept for a backward depends on where it ends
    if fact(plan.adapter, "trains") == "adapter":
        return "for an adapter"
    if about(plan.model).get("arithmetic") is None:
        return "for a model that is not one of dtrain's"
    if open_:
        return f"before the data is read, which gives {' and '.join(open_)}"
    if fact(plan.objective, "task") is None or unstated(plan):
        return "for a part of your own that does not state what it does"
    if fact(plan.objective, "task") == "next_token" and plan.data.get("sequence") is None:
        return "before the data is read, which gives the tokens of a sample"
    return ""


def again_of(plan: Plan) -> bool:
    """Whether the backward of a chunked loss computes its logits again (dtrain.objective.chunked)."""
    return fact(plan.precision, "compute") == "fp16" or (plan.mesh.pp > 1 and plan.pipeline.waits)


def facts_of(data: Part) -> Mapping[str, Any]:
    """Values for arguments of a model that are `auto`, as far as the words of the data give them."""
    by_tokenizer = {"vocab": fact(data, "vocab_of", {}).get(data.get("tokenizer"))}
    names = ("vocab", "inputs", "outputs") if fact(data, "gives") == "any" else ("vocab",)
    stated = {name: fact(data, name, by_tokenizer.get(name)) for name in names}
    return {name: value for name, value in stated.items() if value is not None}


def gpt(part: Mapping[str, Any], run: Run) -> Shapes:
    C = part["width"]
    hidden = part["hidden"] or 64 * math.ceil(C * 8 / 3 / 64)
    feed_forward = partial(_feed_forward, name="feed_forward", width=C, hidden=hidden, run=run)
    return _transformer(part, run, feed_forward, sequence=True)


def moe(part: Mapping[str, Any], run: Run) -> Shapes:
    C, E = part["width"], part["experts"]
    hidden = part["hidden"] or 64 * math.ceil(C * 8 / 3 / (part["active"] + part["shared"]) / 64)
    mixture = partial(_mixture, part=part, hidden=hidden, run=run)
    base = _transformer(part, run, mixture, sequence=False)
    bias = 4 * E * part["layers"]
    return replace(base, buffers=base.buffers + bias + 8 * E * part["layers"], saved=bias)


def _transformer(
    part: Mapping[str, Any], run: Run, feed_forward: Callable[[ActivationModel, Value], Value], *, sequence: bool
) -> Shapes:
    """`sequence`: norms support sequence parallelism."""
    C, V, T = part["width"], part["vocab"], run.tokens
    rest = run.types.param
    style = NEXT if sequence else ""
    embed = run.tape("embed")
    chunked = in_chunks(run.chunk, V)
    embed.weights.append(Weight("embed.weight", (V, C), 0, product=part["tied"] and not chunked, embedding=True))
    embed.splits.append(Split("embed", "embedding_rowwise", T, T * C, C, grad_in=False, summed=True))
    x = embed.op([], Value(T * C, run.rows, "stream", trained=True), weight=embed.weights[0])
    x = embed.op([embed.cast(x, rest)], Value(T * C, rest, "stream"))
    blocks = [embed.block(x, listed=False)]

    tape = run.tape("blocks.0")
    x = tape.begin(Value(T * C, rest, "stream"))
    y = _attention(tape, tape.norm(x, "attention_norm", C, groups=T, style=style, out="whole"), part, run)
    x = tape.add(x, y)
    x = tape.add(x, feed_forward(tape, tape.norm(x, "feed_forward_norm", C, groups=T, style=style, out="whole")))
    blocks.append(tape.block(x, count=part["layers"]))

    last = run.tape("norm")
    y = last.norm(Value(T * C, rest, "stream"), "norm", C, groups=T, style=style, out="whole")
    blocks.append(last.block(y, listed=False))
    head = run.tape("head")
    x, returns = Value(T * C, rest, "whole"), LayoutBytes()
    chunk: Chunk | None = None
    if chunked:
        chunk = Chunk(rows=run.chunk, tokens=T, vocabulary=V, bytes=run.types.compute, numbers=V * C, split=True)
        loss = head.chunked(x, V, C, rows=T, again=run.again)
    else:
        logits = head.linear(x, "", C, V, rows=T, style="colwise_gather_output", hidden=False)
        loss, returns = head.tokens(logits, T), LayoutBytes(logits=logits.size)
    ties = tuple(head.weights) * part["tied"]
    if part["tied"]:
        head.weights.clear()
    blocks.append(replace(head.block(loss, listed=False), head=not part["tied"], chunk=chunk, ties=ties))
    return Shapes(
        blocks=tuple(blocks),
        tables=2 * 4 * T * (C // part["heads"]),
        sample=16 * T,
        tokens=T,
        inputs=8 * T,
        returns=returns,
    )


def _attention(tape: ActivationModel, x: Value, part: Mapping[str, Any], run: Run) -> Value:
    C, T, H = part["width"], run.tokens, part["heads"]
    K, D = part["kv_heads"] or H, C // H
    q, k, v = (
        tape.linear(x, f"attention.{name}", C, heads * D, rows=T, style="colwise", joined=True)
        for name, heads in (("q", H), ("k", K), ("v", K))
    )
    q, k = (tape.rotate(tape.norm(x, "", D, groups=heads * T)) for x, heads in ((q, H), (k, K)))
    shape = Attention(heads=H, kv_heads=K, head=D, value=D, tokens=T, bytes=run.types.compute)
    out = tape.attention(q, k, v, shape, context=run.context, ranks=run.ranks)
    return tape.linear(out, "attention.out", C, C, rows=T, style="rowwise")


def _feed_forward(tape: ActivationModel, x: Value, *, name: str, width: int, hidden: int, run: Run) -> Value:
    T = run.tokens
    gate = tape.linear(x, f"{name}.gate", width, hidden, rows=T, style="colwise", joined=True)
    up = tape.linear(x, f"{name}.up", width, hidden, rows=T, style="colwise", joined=True)
    y = tape.times(tape.pointwise(gate), up)
    return tape.linear(y, f"{name}.down", hidden, width, rows=T, style="rowwise")


def _mixture(tape: ActivationModel, x: Value, *, part: Mapping[str, Any], hidden: int, run: Run) -> Value:
    C, E, K = part["width"], part["experts"], part["active"]
    T, F, low = run.tokens, hidden, run.types.compute
    R, name = T * K, f"{tape.name}.feed_forward"
    tape.weights.append(Weight(f"{name}.router.weight", (E, C), product=run.types.param != 4, hidden=True))
    scores = Value(T * E, 4, "whole")
    tape.work, tape.backward_work = tape.work + T * C * E, tape.backward_work + 2 * T * C * E
    high = tape.cast(x, 4)
    tape.op([high], scores, high, scores, deferred_wgrad=True)
    chosen, sums = Value(R, 4, "whole"), Value(2 * T, 4, "whole")
    indices = Value(3 * R, 8, "whole")  # expert of each row, and the permutation and its inverse
    weight = tape.op([scores], Value(R, 4, "whole"), chosen, sums, indices)
    rows = tape.op([x], Value(R * C, x.bytes, "whole"))
    rows = tape.cast(rows, low)
    sides = [
        Weight(f"{name}.experts.{side}", shape, experts=True, product=True)
        for side, shape in {"gate": (E, F, C), "up": (E, F, C), "down": (E, C, F)}.items()
    ]
    tape.weights += sides
    tape.mixtures.append(Experts(count=E, active=K, width=C, hidden=F, rows=R, bytes=low))
    gate, up = (tape.product(rows, Value(R * F, low, "whole"), R * F * C, weight) for weight in sides[:2])
    y = tape.product(tape.times(tape.pointwise(gate), up), Value(R * C, low, "whole"), R * F * C, sides[2])
    y = tape.op([y], Value(R * C, low, "whole"))
    wide = tape.op([y, weight], Value(R * C, 4, "whole"), y, weight)
    out = tape.op([wide], Value(T * C, low, "stream"))
    if not part["shared"]:
        return out
    beside = _feed_forward(tape, x, name="feed_forward.shared", width=C, hidden=part["shared"] * F, run=run)
    return tape.add(out, beside)


def mlp(part: Mapping[str, Any], run: Run) -> Shapes:
    inputs = part["inputs"] if isinstance(part["inputs"], int) else math.prod(part["inputs"])
    sizes = [inputs, *[part["width"]] * part["layers"], part["outputs"]]
    x, blocks = Value(inputs, run.types.param, "whole", trained=False, sample=not run.cast), list[Block]()
    for index, (a, b) in enumerate(itertools.pairwise(sizes[:-1])):
        tape = run.tape(f"layers.{index}")
        style = "rowwise" if index % 2 else "colwise"
        product = tape.linear(tape.begin(x), "", a, b, rows=1, style=style, bias=True)
        tape.splits[-1] = replace(tape.splits[-1], twice=style == "rowwise")  # because of the backward of gelu
        y = tape.pointwise(product)
        blocks.append(tape.block(y))
        x = Value(y.numbers, y.bytes, y.layout)
    head = run.tape("head")
    style = "rowwise" if part["layers"] % 2 else "colwise_gather_output"
    out = head.linear(x, "", sizes[-2], sizes[-1], rows=1, style=style, bias=True, hidden=False)
    blocks.append(head.block(_loss(head, out, run), listed=False))
    return Shapes(
        blocks=runs(blocks),
        sample=4 * inputs + _target(part["outputs"], run),
        inputs=4 * inputs,
        returns=LayoutBytes(out.size),
    )


def cnn(part: Mapping[str, Any], run: Run) -> Shapes:
    channels, height, width = part["inputs"]
    stem = run.tape("stem")
    x = Value(channels * height * width, run.types.param, "whole", trained=False, sample=not run.cast)
    x = _conv(stem, x, name="", inputs=channels, outputs=part["width"], size=3, area=height * width)
    blocks = [stem.block(x, listed=False)]
    channels = part["width"]
    for number, (stage, block) in enumerate(itertools.product(range(part["stages"]), range(part["blocks"]))):
        wider, stride = part["width"] * 2**stage, 2 if stage and not block else 1
        height, width = -(-height // stride), -(-width // stride)
        tape = run.tape(f"blocks.{number}")
        x = tape.begin(Value(x.numbers, x.bytes, "whole"))
        y = _normed(tape, x, "norm1", channels)
        y = _conv(tape, y, name="conv1", inputs=channels, outputs=wider, size=3, area=height * width)
        short, last = x, list[Weight]()
        if channels != wider or stride > 1:
            short = _conv(tape, x, name="shortcut", inputs=channels, outputs=wider, size=1, area=height * width)
            last = [tape.weights.pop()]  # as in the model
        y = _normed(tape, y, "norm2", wider)
        y = _conv(tape, y, name="conv2", inputs=wider, outputs=wider, size=3, area=height * width)
        tape.weights += last
        blocks.append(tape.block(tape.add(short, y)))
        x, channels = Value(y.numbers, y.bytes, "whole"), wider
    head = run.tape("head")
    pooled = head.op([_normed(head, x, "norm", channels)], Value(channels, x.bytes, "whole"))
    out = head.linear(pooled, "linear", channels, part["outputs"], rows=1, bias=True, hidden=False)
    blocks.append(head.block(_loss(head, out, run), listed=False))
    size = 4 * math.prod(part["inputs"])
    return Shapes(
        blocks=runs(blocks),
        sample=size + _target(part["outputs"], run),
        inputs=size,
        returns=LayoutBytes(out.size),
    )


def _conv(tape: ActivationModel, x: Value, *, name: str, inputs: int, outputs: int, size: int, area: int) -> Value:
    whole = f"{tape.name}.{name}" if name else tape.name
    tape.weights.append(Weight(f"{whole}.weight", (outputs, inputs, size, size), product=True))
    out = Value(outputs * area, tape.types.compute, "whole")
    return tape.product(x, out, inputs * outputs * size**2 * area, tape.weights[-1])


def _normed(tape: ActivationModel, x: Value, name: str, channels: int) -> Value:
    """relu(group_norm(x))"""
    tape.weights += [Weight(f"{tape.name}.{name}.{kind}", (channels,)) for kind in ("weight", "bias")]
    high = tape.cast(x, 4) if tape.fused else x  # on a GPU, autocast runs it in fp32
    statistics = Value(2 * math.gcd(channels, 8), 4, "whole")
    y = tape.op([high], Value(x.numbers, high.bytes, "whole"), high, statistics, deferred_wgrad=True)
    return tape.pointwise(y, keeps="output")


def _loss(tape: ActivationModel, out: Value, run: Run) -> Value:
    if run.task == "classification":
        return tape.cross_entropy(out)
    high = tape.cast(out, 4)
    return tape.op([high], Value(0, 4, "whole"), high)


def _target(outputs: int, run: Run) -> int:
    return 8 if run.task == "classification" else 4 * outputs


FORMULAS: Mapping[str, Callable[[Mapping[str, Any], Run], Shapes]] = {"gpt": gpt, "moe": moe, "mlp": mlp, "cnn": cnn}
