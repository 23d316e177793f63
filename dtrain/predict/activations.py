"""A symbolic forward of one block that records, for each operator, the tensors saved for the backward, the
multiply-adds and the live memory.

The rules are those of torch's derivatives
(https://github.com/pytorch/pytorch/blob/main/tools/autograd/derivatives.yaml) and of autocast
(https://docs.pytorch.org/docs/stable/amp.html), for the CPU, where a norm is several operators, and for a GPU, where it
is one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dtrain.predict.shapes import Attention, Block, Experts, LayoutBytes, Making, Split, Types, Weight

STYLES: Mapping[str, tuple[str, int | None]] = {
    "colwise": ("inside", 0),
    "colwise_gather_output": ("logits", 0),
    "colwise_rep": ("logits", 0),
    "rowwise": ("stream", 1),
    "rowwise_split_input": ("stream", 1),
    "embedding_rowwise": ("stream", 0),
    "sequence_parallel": ("whole", None),
}
"""Style of a model's `tp_plan` -> layout of the module's output (a field of LayoutBytes), and the dim along which tp
splits the weight.
"""


@dataclass(eq=False)
class Value:
    """A tensor between two operators: `numbers` of one sample, `bytes` each; `layout` names a field of LayoutBytes.
    `trained`: it receives a gradient; `sample`: it is an input, in memory in any case.
    """

    numbers: float
    bytes: int
    layout: str
    trained: bool = True
    sample: bool = False

    @property
    def size(self) -> float:
        return self.numbers * self.bytes


@dataclass(frozen=True)
class Step:
    """One operator. `passed`: the gradient of `out` becomes that of the inputs without a copy; `temporary`: live in its
    backward alone; `weight`: of a product, whose gradient its backward makes.
    """

    inputs: tuple[Value, ...]
    out: Value
    saved: tuple[Value, ...]
    passed: bool = False
    temporary: tuple[Value, ...] = ()
    weight: Weight | None = None


class ActivationModel:
    """Records the forward of one block. `fused`: a norm is one operator, as on a GPU."""

    def __init__(self, name: str, types: Types, *, fused: bool) -> None:
        self.name, self.types, self.fused = name, types, fused
        self.weights: list[Weight] = []
        self.splits: list[Split] = []
        self.attentions: list[Attention] = []
        self.mixtures: list[Experts] = []
        self.work = self.backward_work = self.attention_work = self._tail = 0
        self._steps: list[Step] = []
        self._products: list[Value] = []
        self._deferred_wgrad: list[Value] = []
        self._summands: list[Value] = []
        self._first: Value | None = None
        self._high = LayoutBytes()

    def begin(self, x: Value) -> Value:
        """Start the block with its input `x`."""
        self._first = x
        return x

    def block(self, out: Value, *, count: int = 1, listed: bool = True) -> Block:
        first = [self._first] if self._first and (self._first.trained or not self._first.sample) else []
        saved = {
            "all": _sum(value for step in self._steps for value in step.saved),
            "products": _sum((*first, *self._products)),
            "summands": _sum(Value(value.numbers, value.bytes, "whole") for value in self._summands),
            "summed": _sum(self._summands),
            "inputs": _sum(first),
            "saved_input": _sum(value for step in self._steps for value in step.saved if value in first),
            "saved_output": _sum(value for step in self._steps for value in step.saved if value is out),
            "deferred_wgrad": _sum(self._deferred_wgrad),
            "ends": _sum(self._ends(out)),
        }
        peak_live, saved["transient"], making = self._peak_live(out)
        return Block(
            name=self.name,
            count=count,
            listed=listed,
            weights=tuple(self.weights),
            saved=saved,
            peak_live=peak_live,
            work=self.work,
            backward_work=self.backward_work,
            attention_work=self.attention_work,
            recompute_work=self.work + self.attention_work - self._tail,
            passes=round(out.numbers),
            splits=(*self.splits[:-1], *(replace(split, recompute=not self._tail) for split in self.splits[-1:])),
            attention=tuple(self.attentions),
            experts=tuple(self.mixtures),
            high=self._high,
            making=making,
            operators=len(self._steps) + sum(3 * each.count for each in self.mixtures),
        )

    # operators

    def op(
        self,
        inputs: Sequence[Value],
        out: Value,
        *saved: Value,
        passed: bool = False,
        deferred_wgrad: bool = False,
        temporary: Sequence[Value] = (),
        weight: Weight | None = None,
    ) -> Value:
        """Record one operator. `deferred_wgrad`: it has a weight, whose gradient is computed from that of `out`."""
        out.trained = any(value.trained for value in inputs) or out.trained
        self._deferred_wgrad += [out] * deferred_wgrad
        self._steps.append(
            Step(inputs=tuple(inputs), out=out, saved=saved, passed=passed, temporary=tuple(temporary), weight=weight)
        )
        self._tail = 0 if saved else self._tail
        return out

    def cast(self, x: Value, size: int) -> Value:
        return x if x.bytes == size else self.op([x], Value(x.numbers, size, x.layout))

    def linear(
        self,
        x: Value,
        name: str,
        inputs: int,
        outputs: int,
        *,
        rows: int,
        style: str = "",
        bias: bool = False,
        hidden: bool = True,
        joined: bool = False,
    ) -> Value:
        """Multiply `rows` rows by a weight [outputs, inputs]."""
        whole = f"{self.name}.{name}" if name else self.name
        layout, dim = STYLES.get(style, (x.layout, None))
        weight = Weight(f"{whole}.weight", (outputs, inputs), dim, product=True, hidden=hidden, joined=joined)
        self.weights.append(weight)
        if bias:
            self.weights.append(Weight(f"{whole}.bias", (outputs,), 0 if dim == 0 else None, product=True))
        if style:
            self.splits.append(Split(whole, style, rows * inputs, rows * outputs, outputs, grad_in=x.trained))
        out = Value(rows * outputs, self.types.compute, layout)
        self._summands += [out] * style.startswith("rowwise")
        return self.product(x, out, rows * inputs * outputs, weight)

    def product(self, x: Value, out: Value, work: int, weight: Weight) -> Value:
        """A matrix product with a weight; the input is saved in the compute type."""
        self.work += work
        self.backward_work += work * (2 if x.trained else 1)
        low = self.cast(x, self.types.compute)
        self._products.append(out)
        self.op([low], out, low, deferred_wgrad=True, weight=weight)
        self._tail = work
        return out

    def norm(self, x: Value, name: str, width: int, *, groups: int, style: str = "", out: str = "") -> Value:
        """RMS norm over `groups` of `width` numbers, with a weight if it has a name; `out`: layout of the result."""
        statistics = Value(groups, 4, x.layout)
        if name:
            whole, numbers = name if name == self.name else f"{self.name}.{name}", groups * width
            self.weights.append(Weight(f"{whole}.weight", (width,)))
            self.splits += [Split(whole, style, numbers, numbers, width)] if style else []
        result = Value(x.numbers, x.bytes, out or x.layout)
        if self.fused:
            return self.op([x], result, x, statistics, deferred_wgrad=bool(name))
        high = self.cast(x, 4)
        # in the backward of a mean of squares: the gradient of a square, the number again, its double
        temporary = [Value(x.numbers, 4, x.layout) for _ in range(3)]
        scaled = self.op([high], Value(x.numbers, 4, x.layout), high, statistics, temporary=temporary)
        if name:
            scaled = self.op([scaled], Value(x.numbers, 4, result.layout), scaled, deferred_wgrad=True)
        return self.op([scaled], result) if result.bytes < 4 or not name else scaled

    def rotate(self, x: Value) -> Value:
        return self.op([x], Value(x.numbers, self.types.compute, x.layout))

    def attention(self, q: Value, k: Value, v: Value, shape: Attention, *, context: str, ranks: int) -> Value:
        """Scaled dot-product attention of `ranks` that share a sequence. `context`: ulysses: the output is copied,
        because it came from other ranks; ring: keys, values and their gradients pass by in the backward
        (dtrain/parallel/ring.py).
        """
        self.attentions.append(shape)
        self.attention_work += 2 * shape.heads * shape.head * shape.tokens**2
        sums, out = Value(shape.heads * shape.tokens, 4, q.layout), Value(q.numbers, shape.bytes, q.layout)
        self._products += [out, sums]
        self.op([q, k, v], out, q, k, v, out, sums, temporary=_passing(q, k, v, ranks) if context == "ring" else ())
        return self.op([out], Value(out.numbers, out.bytes, out.layout)) if context == "ulysses" else out

    def add(self, a: Value, b: Value) -> Value:
        return self.op([a, b], Value(a.numbers, max(a.bytes, b.bytes), a.layout), passed=True)

    def times(self, a: Value, b: Value) -> Value:
        return self.op([a, b], Value(max(a.numbers, b.numbers), max(a.bytes, b.bytes), a.layout), a, b)

    def pointwise(self, x: Value, *, keeps: str = "input", layout: str = "") -> Value:
        """A pointwise function: silu and gelu save their input, relu and sigmoid their output."""
        out = Value(x.numbers, x.bytes, layout or x.layout)
        return self.op([x], out, x if keeps == "input" else out)

    def tokens(self, logits: Value, rows: int) -> Value:
        """Cross entropy of the next token. 16-bit logits are saved as they are, plus two numbers per row
        (dtrain.objective.vocabulary).
        """
        if logits.bytes > 2:
            return self.cross_entropy(logits)
        self._high = _tally([Value(logits.numbers, 4, logits.layout)])
        return self.op([logits], Value(0, 4, "whole"), logits, Value(2 * rows, 4, logits.layout))

    def cross_entropy(self, logits: Value) -> Value:
        """Cross entropy in fp32; the targets are part of the sample."""
        high = self.cast(logits, 4)
        softmax = Value(high.numbers, 4, logits.layout)
        self.op([high], softmax, softmax)
        return self.op([softmax], Value(0, 4, "whole"))

    def chunked(self, x: Value, vocabulary: int, width: int, *, rows: int, again: bool) -> Value:
        """A head and the cross entropy of its logits, a chunk at a time (dtrain.objective.chunked). Saved are the
        gradient of the input in the type of the products or, where the backward computes the chunks `again`, the input.
        """
        self.weights.append(Weight(f"{self.name}.weight", (vocabulary, width), 0, product=True))
        self.splits.append(
            Split(self.name, "colwise_gather_output", rows * width, rows * vocabulary, vocabulary, grad_in=x.trained)
        )
        work = rows * width * vocabulary
        self.work, self.backward_work = self.work + work, self.backward_work + (3 if again else 2) * work
        kept = Value(x.numbers, x.bytes if again else min(x.bytes, self.types.compute), "whole")
        return self.op([x], Value(0, 4, "whole"), kept, deferred_wgrad=True)

    def _ends(self, out: Value) -> Iterator[Value]:
        """Values saved after the last product, and products whose gradient is that of `out` without a copy."""
        deferred_wgrad = {id(value) for value in self._deferred_wgrad}
        users = Counter(id(value) for step in self._steps for value in step.inputs)
        last = max((index for index, step in enumerate(self._steps) if id(step.out) in deferred_wgrad), default=-1)
        before = {id(value) for step in self._steps[: last + 1] for value in step.saved}
        yield from (value for step in self._steps[last + 1 :] for value in step.saved if id(value) not in before)
        same = {id(out)}
        for step in reversed(self._steps):
            if step.passed and id(step.out) in same:
                same |= {id(value) for value in step.inputs if users[id(value)] == 1 and value.bytes == step.out.bytes}
        yield from (value for value in self._deferred_wgrad if id(value) in same)

    def _peak_live(self, out: Value) -> tuple[LayoutBytes, LayoutBytes, Making]:
        """Peak live memory of the backward, from the last step to the first: saved tensors, flowing gradients and what
        is temporary; the peak of what neither was saved nor waits for the gradient of a weight; and its peaks between
        one gradient of a weight and the next, each with the weights that have theirs by then.
        """
        holders = Counter(one for step in self._steps for one in {id(value) for value in step.saved})
        alive = {id(value): value for step in self._steps for value in step.saved}
        waiting = {id(value) for value in self._deferred_wgrad}
        flowing = {id(out): out}
        every, passing = list[list[Value]](), list[list[Value]]()
        made, parts = list[Weight](), dict[tuple[Weight, ...], list[list[Value]]]()
        for step in reversed(self._steps):
            inputs = [value for value in step.inputs if value.trained and id(value) not in flowing]
            if step.passed:
                flowing.pop(id(step.out), None)
                inputs = inputs[:1]
            flowing |= {id(value): value for value in inputs}
            every.append([*alive.values(), *flowing.values(), *step.temporary])
            made += [step.weight] if step.weight else []
            parts.setdefault(tuple(made), []).append(every[-1])
            passing.append([*(value for one, value in flowing.items() if one not in waiting), *step.temporary])
            flowing.pop(id(step.out), None)
            for one in {id(value) for value in step.saved}:
                holders[one] -= 1
                if not holders[one]:
                    alive.pop(one)
        return _largest(every), _largest(passing), tuple((_largest(some), weights) for weights, some in parts.items())


def _largest(moments: Sequence[Sequence[Value]]) -> LayoutBytes:
    return _tally(max(moments, key=lambda values: sum(value.size for value in values), default=()))


def _passing(q: Value, k: Value, v: Value, ranks: int) -> list[Value]:
    """In the backward of a ring, beside the gradients of q, k and v: their sums in fp32, those of keys and values of
    another rank, its keys and values (of two others, if there are), and the gradients of the block before and of this
    one, where a causal mask leaves half of the keys.
    """
    pairs, high = k.numbers + v.numbers, q.numbers + 2 * (k.numbers + v.numbers)
    low = pairs * (min(ranks, 3) - 1) + q.numbers + pairs / 2
    return [Value(high, 4, q.layout), Value(low, q.bytes, q.layout)]


def _sum(values: Iterable[Value]) -> LayoutBytes:
    """Total size; a value that occurs twice counts once."""
    return _tally({id(value): value for value in values}.values())


def _tally(values: Iterable[Value]) -> LayoutBytes:
    sizes = dict.fromkeys(("whole", "stream", "inside", "logits"), 0.0)
    for value in values:
        sizes[value.layout] += value.size * (not value.sample)
    return LayoutBytes(**sizes)
