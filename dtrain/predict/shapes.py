"""The shapes of a model, on which all predictions build: its weights, and the saved activations and work of each block.
See them with `dtrain plan`.

For dtrain's own models they are computed from the arguments (formulas.py); any other model is built and run once on
tensors without memory (dtrain/tracing/).
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dtrain.config.facts import fact
from dtrain.errors import WordsError
from dtrain.planned import PipelineShape, Plan


@dataclass(frozen=True)
class Weight:
    """One parameter, unsharded. `tp`: the dim that the model's `tp_plan` splits, None if it is replicated; `product`:
    used in a matrix product, so autocast copies it; `hidden`: a matrix that muon orthogonalises; `bits`: of a number
    that is not held in the type of the precision; `joined`: a compiled block multiplies by it and others at once
    (dtrain.model.gpt.products); `decays`: as dtrain.optim.decay decides, None: a matrix does.
    """

    name: str = field(compare=False)
    shape: tuple[int, ...]
    tp: int | None = None
    experts: bool = False
    product: bool = False
    hidden: bool = False
    embedding: bool = False
    trained: bool = True
    bits: float | None = None
    joined: bool = False
    decays: bool | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def undecayed(self) -> int:
        """Its numbers, if it is trained and does not decay."""
        decays = len(self.shape) > 1 if self.decays is None else self.decays
        return self.count * (self.trained and not decays)


@dataclass(frozen=True)
class Split:
    """A module that the model's `tp_plan` names. `inputs` and `outputs`: unsharded elements of one sample; an output
    row has `width` of them.

    `grad_in`, `grad_out`: the input, the output receives a gradient; `recompute`: a recomputed forward runs it again;
    `summed`: its output is all-reduced even with sequence parallelism; `twice`: its output gradient is all-reduced too.
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
    """One scaled dot-product attention over `tokens`; `head`: width of a head in q and k, `value`: in v, `bytes`: of an
    element.

    `split`: tensor parallelism splits its heads; `grad_out`: its output receives a gradient.
    """

    heads: int
    kv_heads: int
    head: int
    value: int
    tokens: int
    bytes: int
    split: bool = True
    grad_out: bool = True


def in_tiles(plan: Plan, one: Attention) -> bool:
    """Whether a ring computes it by products in fp32 over tiles of scores, because torch has no fused kernel for it
    (dtrain/parallel/kernels.py): on a GPU the heads of all fill whole 16 bytes, on the CPU they have one width.
    """
    if plan.mesh.cp == 1 or plan.context["attention"] != "ring":
        return False
    if plan.device == "cpu":
        return one.head != one.value
    return any(width * one.bytes % 16 for width in (one.head, one.value))


@dataclass(frozen=True)
class Experts:
    """One mixture of `count` experts, of which each token uses `active`: a sample sends them `rows` rows of `width`
    elements of `bytes`.
    """

    count: int
    active: int
    width: int
    hidden: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Chunk:
    """Logits of a head whose loss computes them for a few of the `tokens` of a sample at a time: `vocabulary` each, by
    products of `bytes` with a weight of `numbers`. `rows`: `chunk` of the objective (predict/chunks.py). `split`:
    tensor parallelism splits the vocabulary; `trained`: the weight has a gradient, summed in fp32.
    """

    rows: int | str
    tokens: int
    vocabulary: int
    bytes: int
    numbers: int
    split: bool
    trained: bool = True


@dataclass(frozen=True)
class LayoutBytes:
    """Bytes of one sample, by their layout over the tp ranks: `whole`: replicated; `stream`: split with
    tensor.sequence=split; `inside`: always split; `logits`: split with tensor.loss=split.
    """

    whole: float = 0
    stream: float = 0
    inside: float = 0
    logits: float = 0

    def of(self, plan: Plan) -> float:
        """Bytes of one sample on one rank."""
        tp, tensor = plan.mesh.tp, plan.tensor
        stream = self.stream / (tp if tensor.get("sequence") == "split" else 1)
        logits = self.logits / (tp if tensor.get("loss") == "split" else 1)
        return (self.whole + stream + self.inside / tp + logits) / plan.mesh.cp


Making = tuple[tuple[LayoutBytes, tuple[Weight, ...]], ...]
"""(peak live memory of a backward between one gradient of a weight and the next, weights that have theirs by then)"""


@dataclass(frozen=True)
class Block:
    """`count` equal modules in a row; all figures are for one of them and one sample.

    `listed`: it is one of dtrain.model.blocks, which are sharded, recomputed and compiled separately; otherwise it
    belongs to the root, except the `head`, which is sharded separately. `saved`: for the backward in the plan's
    precision, in total (`all`), with remat=selective (`products`) and with remat=full (`inputs`); of `all`, the block's
    input (`saved_input`) and output (`saved_output`); products that tensor parallelism sums (`summed`), and a rank's
    parts of these sums (`summands`); `deferred_wgrad`: gradients that a backward of the inputs leaves
    for that of the weights; `ends`: the part of both that is not needed if no block follows; `transient`: what else
    lives in it at its peak, 0 if not known. `peak_live`: peak live memory of the backward; `moments`
    of it, where a trace saw them: (bytes alive beyond what blocks before it saved; numbers of complete gradients of
    weights, beyond those of blocks behind it; numbers of gradients of weights on their way); `making`: its parts, where
    formulas give them. `ties`: weights of another block that it uses too; `high`: logits that a loss casts to fp32, a
    few rows at a time (dtrain.objective.vocabulary).

    `widened`: bytes of weights of norms that autocast copied to fp32; `uses`: how often one forward runs it;
    `grad_out`: it has a backward; `stays`: it is the last one in the model's lists but not the last to run; `chunk`: of
    a head whose logits exist a few tokens at a time. `work`, `backward_work`: multiply-adds of matrix products in
    forward and backward; `attention_work`: those inside attention, of the full square, as in torch.utils.flop_counter;
    `recompute_work`: the part of `work` and `attention_work` that a recomputed forward runs, which stops as soon as the
    backward has all it needs. `passes`: elements of the output.
    `operators`: of a forward.
    """

    name: str = field(compare=False)
    count: int = field(compare=False)
    listed: bool
    weights: tuple[Weight, ...]
    saved: Mapping[str, LayoutBytes]
    peak_live: LayoutBytes
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
    chunk: Chunk | None = None
    widened: int = 0
    moments: tuple[tuple[float, float, float], ...] = ()
    high: LayoutBytes = LayoutBytes()
    ties: tuple[Weight, ...] = ()
    making: Making = ()
    operators: int = field(default=0, compare=False)

    @property
    def dispatched(self) -> int:
        """Operators of a forward; two for each weight where they were not counted."""
        return self.operators or 2 * len(self.weights)

    @property
    def unit(self) -> bool:
        """Whether it is gathered and reduced separately from the root."""
        return self.listed or self.head

    @property
    def parameters(self) -> int:
        """Number of parameters of one module."""
        return sum(weight.count for weight in self.weights)

    @property
    def trained(self) -> int:
        """Number of those that have a gradient."""
        return sum(weight.count for weight in self.weights if weight.trained)


@dataclass(frozen=True)
class Shapes:
    """`blocks` in execution order. In bytes: `buffers` of the model, of which a checkpoint holds `saved` and a training
    forward changes `moving` (pairs of is_floating and bytes, one per type); `tables` shared by all blocks; `sample`, of
    which `inputs` are model inputs; and the output that the model `returns` for it. `unknown`: why activations and work
    are not known, or empty. `teacher`: the blocks of the model that the objective compares with, if it is another one.
    `saved_buffers`: their number. `refused`: a sentence about the data that would stop the run.
    """

    blocks: tuple[Block, ...]
    buffers: int = 0
    saved: int = 0
    tables: int = 0
    sample: int = 0
    tokens: int = 1
    inputs: int = 0
    returns: LayoutBytes = LayoutBytes()
    moving: tuple[tuple[bool, int], ...] = ()
    unknown: str = ""
    teacher: tuple[Block, ...] = ()
    saved_buffers: int = 0
    refused: str = ""

    @property
    def parameters(self) -> int:
        """Number of parameters of the model; tied ones count once, in the first block that has them."""
        return sum(block.parameters * block.count for block in self.blocks)

    @property
    def undecayed(self) -> int:
        """Number of trained parameters that do not decay."""
        return sum(weight.undecayed * block.count for block in self.blocks for weight in block.weights)

    @cached_property
    def listed(self) -> int:
        return sum(block.count for block in self.blocks if block.listed)

    @cached_property
    def cut(self) -> dict[tuple[int, str | tuple[int, ...]], list[tuple[Block, ...]]]:
        """Number of stages and how they are split -> their blocks, as far as `stages_of` was asked."""
        return {}


def trained_names(shapes: Shapes) -> list[str]:
    """The names of the trained parameters of a formula, whose blocks that are alike have neighbouring numbers."""
    names = list[str]()
    for block in shapes.blocks:
        group, _, first = block.name.rpartition(".")
        for number in range(block.count):
            own = f"{group}.{int(first) + number}" if block.count > 1 else block.name
            names += [own + weight.name.removeprefix(block.name) for weight in block.weights if weight.trained]
    return names


@dataclass(frozen=True)
class Types:
    """Bytes per element: `param` of stored weights, `compute` in matrix products, `reduce` of gradients on the wire."""

    param: int
    compute: int
    reduce: int

    @property
    def autocast(self) -> bool:
        return self.compute != self.param


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Type, as the facts of a precision name it -> bytes per element."""


def types_of(plan: Plan) -> Types:
    return Types(*(BYTES[fact(plan.precision, name)] for name in ("param", "compute", "reduce")))


def stages_of(plan: Plan, shapes: Shapes) -> list[tuple[Block, ...]]:
    """The blocks of each pipeline stage, as dtrain.parallel.stages assigns them; one stage without a pipeline. Stages
    of the same blocks are one object. Raises WordsError if there are fewer blocks than stages.
    """
    if plan.mesh.pp == 1:
        return [shapes.blocks]
    key = plan.mesh.pp * plan.pipeline.stages, plan.pipeline.split
    if key not in shapes.cut:
        shapes.cut[key] = _cut(shapes, key[0], plan.pipeline)
    return shapes.cut[key]


def _cut(shapes: Shapes, count: int, pipeline: PipelineShape) -> list[tuple[Block, ...]]:
    single = [one for block in shapes.blocks for one in [replace(block, count=1)] * block.count]
    inside = [index for index, block in enumerate(single) if block.listed]
    if len(inside) < count:
        raise WordsError(f"mesh.pp: the model has {len(inside)} blocks, fewer than the {count} stages of the pipeline.")
    first, last = inside[0], inside[-1] + 1
    groups = [[block] for block in single[first:last]]
    groups[0], groups[-1] = single[:first] + groups[0], groups[-1] + single[last:]
    weights = ([weight for block in group for weight in block.weights] for group in groups)
    costs = [sum(weight.count for weight in some if not weight.embedding) for some in weights]
    ends = itertools.accumulate(pipeline.sizes(costs, count), initial=0)
    known = dict[tuple[int, ...], tuple[Block, ...]]()
    stages = list[tuple[Block, ...]]()
    for a, b in itertools.pairwise(ends):
        stage = [block for group in groups[a:b] for block in group]
        key = tuple(map(id, stage))
        known[key] = known.get(key) or runs(stage)
        stages.append(known[key])
    return stages


def runs(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Merge neighbours that differ only in their names."""
    merged = [(block, sum(each.count for each in alike)) for block, alike in itertools.groupby(blocks)]
    return tuple(replace(block, count=count) for block, count in merged)
