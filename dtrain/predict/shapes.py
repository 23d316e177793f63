"""The shapes of a model, for all predictions: its weights, what each block keeps for the backward, and what it
computes. See it with `dtrain plan`.

Of the models of this package it is arithmetic on their arguments (known.py); any other is built and run once on tensors
without memory (dtrain/tracing/).
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dtrain.config.facts import Part, fact
from dtrain.errors import WordsError
from dtrain.planned import BatchShape, MeshShape, PipelineShape


class Decided(Protocol):
    """The fields of a Plan that predictions read; `strategy=auto` asks about layouts that are no Plan yet."""

    @property
    def device(self) -> str: ...
    @property
    def mesh(self) -> MeshShape: ...
    @property
    def pipeline(self) -> PipelineShape: ...
    @property
    def tensor(self) -> Mapping[str, Any]: ...
    @property
    def context(self) -> Mapping[str, Any]: ...
    @property
    def batch(self) -> BatchShape: ...
    @property
    def ema(self) -> float | None: ...
    @property
    def strategy(self) -> Part: ...
    @property
    def precision(self) -> Part: ...
    @property
    def remat(self) -> Part: ...
    @property
    def compile(self) -> Part: ...
    @property
    def model(self) -> Part: ...
    @property
    def data(self) -> Part: ...
    @property
    def objective(self) -> Part: ...
    @property
    def optim(self) -> Part: ...
    @property
    def checkpoint(self) -> Part: ...


@dataclass(frozen=True)
class Weight:
    """One parameter, whole. `tp`: the dim that tensor parallelism splits by the model's table, None where it stays
    whole; `product`: a matrix product takes it, so that autocast copies it; `hidden`: a matrix that muon turns.
    """

    name: str = field(compare=False)
    shape: tuple[int, ...]
    tp: int | None = None
    experts: bool = False
    product: bool = False
    hidden: bool = False
    embedding: bool = False
    trained: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Split:
    """A module that the model's `tp_plan` names. `inputs` and `outputs`: numbers of one sample, whole, in rows of
    `width` that come out.

    A gradient flows to what goes in (`grad_in`), to what comes out (`grad_out`); a second forward comes by
    (`recompute`). `summed`: what comes out is needed whole at once; `twice`: its gradient is summed once more.
    """

    name: str = field(compare=False)
    style: str
    inputs: int
    outputs: int
    width: int
    grad_in: bool = True
    grad_out: bool = True
    recompute: bool = True
    summed: bool = False
    twice: bool = False


@dataclass(frozen=True)
class Attention:
    """One scaled dot product over `tokens`; `head` is the width of a head, `value` that of one in v, `bytes` those of a
    number of q, k and v.

    `split`: tensor parallelism shares out its heads; `grad_out`: a gradient flows through it.
    """

    heads: int
    kv_heads: int
    head: int
    value: int
    tokens: int
    bytes: int
    split: bool = True
    grad_out: bool = True


@dataclass(frozen=True)
class Experts:
    """One mixture: `rows` of one sample, each `width` numbers of `bytes`, go to `count` experts; a token to `active` of
    them.
    """

    count: int
    active: int
    width: int
    hidden: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Kept:
    """Bytes of one sample, by what tensor parallelism makes of them: `whole` on each rank; `stream`: a part on each
    where tensor.sequence=split; `inside`: always a part on each; `logits`: a part on each where tensor.loss=split.
    """

    whole: float = 0
    stream: float = 0
    inside: float = 0
    logits: float = 0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(
            self.whole + other.whole, self.stream + other.stream, self.inside + other.inside, self.logits + other.logits
        )

    def of(self, plan: Decided) -> float:
        """Bytes of one sample on one rank."""
        tp, tensor = plan.mesh.tp, plan.tensor
        stream = self.stream / (tp if tensor.get("sequence") == "split" else 1)
        logits = self.logits / (tp if tensor.get("loss") == "split" else 1)
        return (self.whole + stream + self.inside / tp + logits) / plan.mesh.cp


@dataclass(frozen=True)
class Block:
    """`count` equal modules, one after the other; all figures are of one of them and of one sample.

    `listed`: one of dtrain.model.blocks, sharded, recomputed and compiled by itself; else it belongs to the root, but
    for the `head`, which is sharded by itself. `kept` for the backward, in the precision of the plan: `all`, with
    remat=selective (`products`), with remat=full (`inputs`); of `all` what it was handed (`taken`) and hands on
    (`given`); `deferred_wgrad`: gradients that a backward of the inputs alone leaves for that of the weights, and
    `ends`, what it needs neither of `all` nor of these where nothing comes behind the block. `peak_live`: the most
    alive while its backward runs. One forward runs it so many times (`uses`); `grad_out`: its backward runs; `stays`:
    it is the last of the model's lists, though not the last to run. `work`: multiply-adds of matrix products in the
    forward, `backward_work` in the backward; `attention_work`: those inside attention, of the whole square, as
    torch.utils.flop_counter counts; `recompute_work`: what of both a second forward computes, which stops where all is
    there that the backward needs. `passes`: numbers handed to the next.
    """

    name: str = field(compare=False)
    count: int = field(compare=False)
    listed: bool
    weights: tuple[Weight, ...]
    kept: Mapping[str, Kept]
    peak_live: Kept
    work: int
    backward_work: int
    attention_work: int
    recompute_work: int
    passes: int
    splits: tuple[Split, ...] = ()
    attention: tuple[Attention, ...] = ()
    experts: tuple[Experts, ...] = ()
    uses: int = 1
    grad_out: bool = True
    stays: bool = False
    head: bool = False

    @property
    def unit(self) -> bool:
        """Whether it is gathered and reduced by itself, and not with the root."""
        return self.listed or self.head

    @property
    def parameters(self) -> int:
        """Of one of them."""
        return sum(weight.count for weight in self.weights)


@dataclass(frozen=True)
class Shapes:
    """`blocks` in the order they run. In bytes: `buffers` of the model, of which a checkpoint holds `saved` and a
    training forward changes `moving` (whether they are floating, bytes; one of each type); `tables` that all blocks
    share and keep; `sample`, of which `inputs`, and what the model `returns` for it. `unknown` says why activations and
    work are not known; empty where they are.
    """

    blocks: tuple[Block, ...]
    buffers: int
    saved: int
    tables: int
    sample: int
    tokens: int
    inputs: int = 0
    returns: Kept = Kept()
    moving: tuple[tuple[bool, int], ...] = ()
    unknown: str = ""

    @property
    def parameters(self) -> int:
        """Of the whole model; tied ones stand in the first block that has them, and count once."""
        return sum(block.parameters * block.count for block in self.blocks)

    @property
    def listed(self) -> int:
        return sum(block.count for block in self.blocks if block.listed)


@dataclass(frozen=True)
class Types:
    """Bytes of a number: `param` at rest, `compute` in matrix products, `reduce` of gradients on the wire."""

    param: int
    compute: int
    reduce: int

    @property
    def autocast(self) -> bool:
        return self.compute != self.param


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of a number of a type, as the facts of a precision name it."""


def types_of(plan: Decided) -> Types:
    return Types(*(BYTES[fact(plan.precision, name)] for name in ("param", "compute", "reduce")))


def stages_of(plan: Decided, shapes: Shapes) -> list[tuple[Block, ...]]:
    """The blocks of each stage of the pipeline, as dtrain.parallel.stages cuts them; one stage where there is no
    pipeline. Raises WordsError where there are too few.
    """
    count = plan.mesh.pp * plan.pipeline.stages
    if plan.mesh.pp == 1:
        return [shapes.blocks]
    single = [one for block in shapes.blocks for one in [replace(block, count=1)] * block.count]
    inside = [index for index, block in enumerate(single) if block.listed]
    if len(inside) < count:
        raise WordsError(f"mesh.pp: the model has {len(inside)} blocks, fewer than the {count} stages of the pipeline.")
    first, last = inside[0], inside[-1] + 1
    groups = [[block] for block in single[first:last]]
    groups[0], groups[-1] = single[:first] + groups[0], groups[-1] + single[last:]
    costs = [
        sum(weight.count for block in group for weight in block.weights if not weight.embedding) for group in groups
    ]
    ends = [0]
    for size in plan.pipeline.sizes(costs, count):
        ends.append(ends[-1] + size)
    return [runs([block for group in groups[a:b] for block in group]) for a, b in itertools.pairwise(ends)]


def runs(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Neighbours that differ in their names alone, as one."""
    found: list[Block] = []
    for block in blocks:
        if found and found[-1] == block:
            found[-1] = replace(found[-1], count=found[-1].count + block.count)
        else:
            found.append(block)
    return tuple(found)
