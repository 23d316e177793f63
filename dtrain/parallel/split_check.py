"""Checks a split over the sequence before the first step: compares a forward of split sequences with one of whole
sequences, module by module.

Only attention sees the whole sequence (context.py). A convolution, a carried state, a mean over tokens, or positions
counted from 0 would see a part and silently compute other numbers. So each rank runs a few tokens whole, and then its
part of them; every module gets the inputs of the whole run, so that only its own computation can differ, and the error
names it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.errors import WordsError, first_line
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import like, local
from dtrain.model import evaluating, own_class
from dtrain.objective import answer
from dtrain.parallel.context import Context, length_of
from dtrain.parallel.pipeline import Pipeline
from dtrain.precision import Precision

TOKENS, CHUNK, ROWS = 256, 16, 2
"""Tokens in the check, tokens per chunk if that is more, and samples; of the first batch."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The rounding of one module, relative to its largest value."""
FP8 = 0.2

Forward = Callable[[Any, Context | None], Any]
"""(batch, context) -> outputs of the model"""
Key = tuple[int, int]
"""(id of a module, number of its call)"""
Verdict = Literal["same", "differs", "suspect", "unknown"]
"""`suspect`: it differs but has no dim of tokens, so it may not matter."""


def check_split(
    model: nn.Module, batch: Any, context: Context, forward: Forward, *, mesh: Mesh, precision: Precision
) -> None:
    """Runs once per context, on all ranks of the mesh. Raises WordsError with the name of a module that cannot be
    split.
    """
    if context.checked:
        return
    short, length = _shortened(batch, context.size)
    part, tolerance = context.split(short), _tolerance(precision, mesh.device)
    with _quiet(model):
        try:
            whole = _Whole(model, lambda: forward(short, None))
        except Exception as error:
            forward(batch, None)  # raises an error that does not depend on the length
            raise _refusal(context, f"the model fails on a part of a sequence: {first_line(error)}") from error
        compare = Comparison(context, length, tolerance)

        def problems_without(random: frozenset[Key]) -> list[str]:
            problem = _Part(model, whole, compare, random).differs(lambda: forward(part, context))
            return [one for one in mesh.gather(problem) if one]

        problems = problems_without(frozenset())
        if problems:  # maybe of modules whose results are random
            problems = problems_without(whole.unlike(_Whole(model, lambda: forward(short, None)), tolerance))
    if problems:
        raise _refusal(context, f"{problems[0]} computes other values for a part of a sequence than for the whole")
    context.checked = True


def _refusal(context: Context, problem: str) -> WordsError:
    return WordsError(
        f"mesh.cp={context.size}: {problem}. It depends on other tokens (a convolution, a state, a mean, its own "
        "positions), but only F.scaled_dot_product_attention and position_ids cross the parts. Type mesh.cp=1."
    )


def _shortened(batch: Any, size: int) -> tuple[Any, int]:
    """(the first tokens of the first samples, enough to cross every border between chunks; their number)."""
    T = length_of(batch["inputs"], size)
    length = min(T, 2 * size * max(CHUNK, TOKENS // (2 * size)))

    def cut(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: cut(value) for name, value in part.items()}
        if not isinstance(part, Tensor) or not part.ndim:
            return part
        return part[:ROWS, :length] if part.ndim >= 2 and part.shape[1] == T else part[:ROWS]

    return cut(batch), length


class _Whole:
    """Inputs and outputs of every module in one forward of whole sequences, on the CPU."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self.inputs: dict[Key, list[Tensor | None]] = {}
        self.outputs: dict[Key, list[Tensor | None]] = {}
        counts, running = Counter[int](), list[Key]()

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            running.append((id(module), counts[id(module)]))
            counts[id(module)] += 1
            self.inputs[running[-1]] = _kept((args, kwargs))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs[running.pop()] = _kept(output)

        with _hooked(model, before, after):
            self.answer = answer(run()).cpu()

    def unlike(self, other: "_Whole", tolerance: float) -> frozenset[Key]:
        """The calls with other results in a second forward of the same inputs."""
        keys = set[Key]()
        for key, values in self.outputs.items():
            for a, b in zip(values, other.outputs.get(key, ()), strict=False):
                if a is not None and b is not None and _distance(a, b, a) > tolerance:
                    keys.add(key)
        return frozenset(keys)


@dataclass(frozen=True)
class Comparison:
    """Compares tensors of `length` tokens with those of this rank's part of the tokens."""

    context: Context
    length: int
    tolerance: float

    def __call__(self, whole: Tensor, part: Tensor) -> tuple[Verdict, Tensor]:
        """(verdict, the slice of the whole that corresponds to `part` if that can be determined, else `part`)."""
        here, size = local(part), self.context.size
        if whole.dtype != here.dtype or whole.ndim != here.ndim:
            return "unknown", part
        dim, *more = [dim for dim in range(here.ndim) if whole.shape[dim] != here.shape[dim]] or [-1]
        if more:
            return "unknown", part
        if dim < 0:
            return ("same" if self._near(whole, here, whole) else "suspect"), part
        many, few, tokens = whole.shape[dim], here.shape[dim], self.length // size
        if many == few * size and many % self.length == 0:  # [... B x T ...] or [... T x B ...]
            ways = [(whole.unflatten(dim, (-1, self.length)), dim + 1), (whole.unflatten(dim, (self.length, -1)), dim)]
            mine = [self.context.cut(x, at).flatten(dim, dim + 1) for x, at in ways]
            near = next((x for x in mine if self._near(x, here, whole)), None)
            value = mine[0] if near is None else near
            return ("differs" if near is None else "same"), like(value.to(here.device), part)
        if many - few == self.length - tokens and few >= tokens:  # more entries after the tokens
            cut = self.context.cut(whole.narrow(dim, 0, self.length), dim)
            return ("same" if self._near(cut, here.narrow(dim, 0, tokens), whole) else "suspect"), part
        return "unknown", part

    def _near(self, a: Tensor, b: Tensor, reference: Tensor) -> bool:
        return _distance(a, b, reference) <= self.tolerance


@dataclass
class _Frame:
    """A module that is running: whether it got the inputs of the whole run, and the first inner module that differs."""

    name: str
    agreed: bool = True
    key: Key = (0, 0)
    suspect: str | None = None


@dataclass
class _Part:
    """A forward of this rank's part, compared with the whole. Results of `random` calls are not compared."""

    model: nn.Module
    whole: _Whole
    compare: Comparison
    random: frozenset[Key] = frozenset()
    problem: str | None = None
    _frames: list[_Frame] = field(default_factory=lambda: [_Frame("the model")])

    def differs(self, run: Callable[[], Any]) -> str | None:
        """The first module whose own computation differs, or None."""
        names = {
            id(module): f"{name or 'the model'} ({own_class(module).__name__})" for name, module in _modules(self.model)
        }
        counts: Counter[int] = Counter()

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            key = (id(module), counts[id(module)])
            counts[id(module)] += 1
            self._frames.append(_Frame(names[id(module)], self._agrees(key, args, kwargs), key))

        with _hooked(self.model, before, lambda module, args, output: self._judge(self._frames.pop(), output)):
            try:
                logits = answer(run())
            except WordsError:
                raise
            except Exception as error:
                problem = f"{self._frames[-1].name} fails on a part of a sequence: {first_line(error)}"
                raise _refusal(self.compare.context, problem) from error
        verdict, _ = self.compare(self.whole.answer, logits)
        if verdict in ("differs", "suspect"):
            self.problem = self.problem or self._frames[0].suspect or self._frames[0].name
        return self.problem

    def _agrees(self, key: Key, args: Any, kwargs: Any) -> bool:
        whole, part = self.whole.inputs.get(key, []), tree_leaves((args, kwargs))
        if len(whole) != len(part):
            return True
        pairs = [(a, b) for a, b in zip(whole, part, strict=True) if a is not None and isinstance(b, Tensor)]
        numbers = [pair for pair in pairs if pair[0].is_floating_point()] or pairs
        return all(self.compare(a, b)[0] in ("same", "unknown") for a, b in numbers)

    def _judge(self, frame: _Frame, output: Any) -> Any:
        """Compare the output of a module; the forward continues with the output of the whole run."""
        leaves, spec = tree_flatten(output)
        whole = self.whole.outputs.get(frame.key, [])
        if len(whole) != len(leaves):
            whole = [None] * len(leaves)
        compared = [
            self.compare(a, b) if a is not None and isinstance(b, Tensor) else ("unknown", b)
            for a, b in zip(whole, leaves, strict=True)
        ]
        verdicts = {verdict for verdict, _ in compared} if frame.key not in self.random else {"same"}
        outer, odd = self._frames[-1], verdicts & {"differs", "suspect"}
        if "differs" in verdicts and frame.agreed:
            self.problem = self.problem or frame.suspect or frame.name
        elif odd or "same" not in verdicts:
            own = frame.name if frame.agreed else outer.name  # its result will show whether this matters
            outer.suspect = outer.suspect or frame.suspect or (own if odd else None)
        if not frame.agreed or not any(isinstance(leaf, Tensor) for leaf in leaves):
            return output
        return tree_unflatten([value for _, value in compared], spec)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name in the model, module), without wrappers."""
    roots = [model.module if isinstance(model, DistributedDataParallel) else model]
    if isinstance(model, Pipeline):
        roots = [stage.model for stage in model.stages.values()]
    return list({id(module): (name, module) for root in roots for name, module in root.named_modules()}.values())


@contextmanager
def _hooked(model: nn.Module, before: Callable[..., None], after: Callable[..., Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for _, module in _modules(model):
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """`evaluating` without compilers; afterwards all buffers and generators of the model are as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [value for module in model.modules() for value in vars(module).values()]
    generators = [(value, value.get_state()) for value in attributes if isinstance(value, torch.Generator)]
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)
            for generator, state in generators:
                generator.set_state(state)


def _kept(tree: Any) -> list[Tensor | None]:
    return [
        local(leaf).detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(tree)
    ]


def _distance(a: Tensor, b: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest value of the reference; inf if rounding cannot explain it."""
    b = b.detach().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    wide = torch.promote_types(a.dtype, torch.float32)
    most = (a.to(wide) - b.to(wide)).abs().masked_fill(same, 0.0).max()
    return float("inf") if most.isnan() else (most / reference.to(wide).abs().nan_to_num(0.0, 0.0, 0.0).max()).item()


def _tolerance(precision: Precision, device: torch.device) -> float:
    """On a GPU fp32 products may be rounded to TF32, whose precision is that of fp16."""
    if precision.convert is not None:
        return FP8
    least = TOLERANCES[torch.float16] if device.type == "cuda" else 0.0
    return max(least, TOLERANCES.get(precision.param, 3e-2), TOLERANCES.get(precision.compute, 3e-2))
