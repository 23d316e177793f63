"""Checks a split over the sequence before the first step: a forward of the parts is compared with one of the whole,
module by module.

Attention alone sees the whole sequence (context.py). A convolution, a carried state, a mean over tokens, or positions
counted from 0 would see a part and silently train on other numbers. Each rank therefore runs a few tokens whole, and
its part of them split; every module gets the inputs of the whole run, so that only its own computation can differ, and
it is named.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.errors import WordsError, first_line
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local
from dtrain.objective import answer
from dtrain.parallel.context import Context, length_of
from dtrain.parallel.pipeline import Pipeline, Stage
from dtrain.precision import Precision

TOKENS, CHUNK, ROWS = 256, 16, 2
"""The number of tokens of the first batch in the check, or per 2 x cp chunk if that is more, and of samples."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""The rounding of one module, relative to its largest value."""
FP8 = 0.2

Forward = Callable[[Any, Context | None], Any]
"""(batch, context) -> what the model returns for it."""
Key = tuple[int, int]
"""The id of a module, and which of its calls."""
Verdict = Literal["same", "differs", "suspect", "unknown"]
"""`suspect`: it differs but does not follow the sequence, so that it may not matter."""


def check_split(
    model: nn.Module, batch: Any, context: Context, forward: Forward, *, mesh: Mesh, precision: Precision
) -> None:
    """Run once for each context, on all ranks of the mesh. Raises WordsError with the name of the module that cannot be
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
            forward(batch, None)  # raises what is no matter of the length
            raise _refused(context, f"the model fails on a part of a sequence: {first_line(error)}") from error
        compare = Comparison(context, length, tolerance)
        problem = _Part(model, whole, compare).differs(lambda: forward(part, context))
        problems = [one for one in mesh.gather(problem) if one]
        if problems:  # or is it random, and differs from itself?
            random = whole.unlike(_Whole(model, lambda: forward(short, None)), tolerance)
            problem = _Part(model, whole, compare, random).differs(lambda: forward(part, context))
            problems = [one for one in mesh.gather(problem) if one]
    if problems:
        raise _refused(context, f"{problems[0]} gives something else for a part of a sequence than for the whole")
    context.checked = True


def _refused(context: Context, problem: str) -> WordsError:
    return WordsError(
        f"mesh.cp={context.size}: {problem}. It looks along the sequence (a convolution, a state, a mean, positions "
        "of its own), and only "
        "F.scaled_dot_product_attention and position_ids reach across the parts. Type mesh.cp=1."
    )


def _shortened(batch: Any, size: int) -> tuple[Any, int]:
    """The first tokens of the first samples, enough to cross every border between chunks, and their number."""
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
        pairs = ((key, zip(values, other.outputs.get(key, ()), strict=False)) for key, values in self.outputs.items())
        return frozenset(
            key
            for key, both in pairs
            if any(a is not None and b is not None and _far(a, b, a) > tolerance for a, b in both)
        )


@dataclass(frozen=True)
class Comparison:
    """Of tensors for `length` tokens with those for the part of them that is this rank's."""

    context: Context
    length: int
    tolerance: float

    def __call__(self, whole: Tensor, part: Tensor) -> tuple[Verdict, Tensor]:
        """The slice of the whole that corresponds to `part`, if that can be determined; else `part`."""
        here, size = local(part), self.context.size
        dims = (
            [dim for dim in range(here.ndim) if whole.shape[dim] != here.shape[dim]]
            if whole.ndim == here.ndim
            else [0, 0]
        )
        if whole.dtype != here.dtype or len(dims) > 1:
            return "unknown", part
        if not dims:
            return ("same" if self._near(whole, here, whole) else "suspect"), part
        many, few, dim = whole.shape[dims[0]], here.shape[dims[0]], dims[0]
        if many == few * size and many % self.length == 0:  # [... B x T ...] or [... T x B ...]
            ways = [(whole.unflatten(dim, (-1, self.length)), dim + 1), (whole.unflatten(dim, (self.length, -1)), dim)]
            mine = [self.context.cut(x, at).flatten(dim, dim + 1) for x, at in ways]
            right = next((x for x in mine if self._near(x, here, whole)), None)
            return ("differs", _like(mine[0], part)) if right is None else ("same", _like(right, part))
        if many - few == self.length - self.length // size and few >= self.length // size:  # with a margin behind
            mine = [self.context.cut(whole.narrow(dim, 0, self.length), dim)]
            return ("same" if self._near(mine[0], here.narrow(dim, 0, self.length // size), whole) else "suspect"), part
        return "unknown", part

    def _near(self, a: Tensor, b: Tensor, reference: Tensor) -> bool:
        return _far(a, b, reference) <= self.tolerance


@dataclass
class _Frame:
    """A running module: whether it got the inputs of the whole run, and the first inner module that differs."""

    name: str
    agreed: bool = True
    key: Key = (0, 0)
    suspect: str | None = None


@dataclass
class _Part:
    """One forward of this rank's part, compared with the whole. Results of `random` calls are not compared."""

    model: nn.Module
    whole: _Whole
    compare: Comparison
    random: frozenset[Key] = frozenset()
    problem: str | None = None
    _frames: list[_Frame] = field(default_factory=lambda: [_Frame("the model")])

    def differs(self, run: Callable[[], Any]) -> str | None:
        """The first module whose own work differs."""
        names = {
            id(module): f"{name or 'the model'} ({type(module).__name__.removeprefix('FSDP')})"
            for name, module in _modules(self.model)
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
                raise _refused(self.compare.context, problem) from error
        verdict, _ = self.compare(self.whole.answer, logits)
        if verdict in ("differs", "suspect"):
            self.problem = self.problem or self._frames[0].suspect or self._frames[0].name
        return self.problem

    def _agrees(self, key: Key, args: Any, kwargs: Any) -> bool:
        had, given = self.whole.inputs.get(key, []), tree_leaves((args, kwargs))
        pairs = (
            [(a, b) for a, b in zip(had, given, strict=False) if a is not None and isinstance(b, Tensor)]
            if len(had) == len(given)
            else []
        )
        numbers = [pair for pair in pairs if pair[0].is_floating_point()] or pairs
        return all(self.compare(a, b)[0] in ("same", "unknown") for a, b in numbers)

    def _judge(self, frame: _Frame, output: Any) -> Any:
        """Compare the output of a module, and go on with that of the whole run."""
        leaves, spec = tree_flatten(output)
        had = self.whole.outputs.get(frame.key, [])
        had = had if len(had) == len(leaves) else [None] * len(leaves)
        found = [
            self.compare(a, b) if a is not None and isinstance(b, Tensor) else ("unknown", b)
            for a, b in zip(had, leaves, strict=True)
        ]
        verdicts = {verdict for verdict, _ in found} if frame.key not in self.random else {"same"}
        outer = self._frames[-1]
        if "differs" in verdicts and frame.agreed:
            self.problem = self.problem or frame.suspect or frame.name
        elif verdicts & {"differs", "suspect"} or "same" not in verdicts:
            own = frame.name if frame.agreed else outer.name  # whose result will tell whether it matters
            outer.suspect = outer.suspect or frame.suspect or (own if verdicts & {"differs", "suspect"} else None)
        if not frame.agreed or not any(isinstance(leaf, Tensor) for leaf in leaves):
            return output
        return tree_unflatten([value for _, value in found], spec)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of the model, by their own names, whatever is wrapped around it."""
    if isinstance(model, Pipeline):
        roots = [stage.model for stage in model.stages.values() if isinstance(stage, Stage)]
    else:
        roots = [model.module if isinstance(model, DistributedDataParallel) else model]
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
    """Evaluation without gradients and compilers that leaves modes, buffers and generators of the model as they are."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    generators = [
        (value, value.get_state())
        for module, _ in modes
        for value in vars(module).values()
        if isinstance(value, torch.Generator)
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, value in buffers:
                buffer.copy_(value)
            for generator, state in generators:
                generator.set_state(state)


def _kept(tree: Any) -> list[Tensor | None]:
    return [
        local(leaf).detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(tree)
    ]


def _far(a: Tensor, b: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest value of the reference; inf where it is none of rounding."""
    b = b.detach().to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    wide = torch.promote_types(a.dtype, torch.float32)
    apart = (a.to(wide) - b.to(wide)).abs().masked_fill(same, 0.0).max()
    return float("inf") if apart.isnan() else (apart / reference.to(wide).abs().nan_to_num(0.0, 0.0, 0.0).max()).item()


def _like(value: Tensor, part: Tensor) -> Tensor:
    value = value.to(local(part).device)
    if not isinstance(part, DTensor):
        return value
    return DTensor.from_local(
        value, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
    )


def _tolerance(precision: Precision, device: torch.device) -> float:
    """On a GPU products in fp32 may be rounded as TF32 is, which has the digits of fp16."""
    if precision.convert is not None:
        return FP8
    least = TOLERANCES[torch.float16] if device.type == "cuda" else 0.0
    return max(least, TOLERANCES.get(precision.param, 3e-2), TOLERANCES.get(precision.compute, 3e-2))
