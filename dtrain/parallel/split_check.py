"""Checks a split over the sequence before the first step: compares a forward of split sequences with one of whole
sequences, module by module.

Only attention sees the whole sequence (context.py). A convolution, a carried state, a mean over tokens, or positions
counted from 0 would see a part and silently compute other numbers. So each rank runs a few tokens whole, and then its
part of them; every module gets the inputs of the whole run, so that only its own computation can differ, and the error
names it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtrain.errors import WordsError, first_line
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import like, local
from dtrain.model import own_class
from dtrain.objective import answer
from dtrain.parallel.checks import distance, first_rows, hooked, modules, quiet, tolerance_of
from dtrain.parallel.context import Context, length_of
from dtrain.precision import Precision

TOKENS, CHUNK = 256, 16
"""Tokens in the check, and tokens per chunk if that is more; of the first batch."""

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
    part, tolerance = context.split(short), tolerance_of(precision, mesh.device)
    with quiet(model):
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
    return first_rows(batch, T, length), length


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

        with hooked(model, before, after):
            self.answer = answer(run()).cpu()

    def unlike(self, other: "_Whole", tolerance: float) -> frozenset[Key]:
        """The calls with other results in a second forward of the same inputs."""
        keys = set[Key]()
        for key, values in self.outputs.items():
            for a, b in zip(values, other.outputs.get(key, ()), strict=False):
                if a is not None and b is not None and distance(a, b, a) > tolerance:
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
        return distance(a, b, reference) <= self.tolerance


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
            id(module): f"{name or 'the model'} ({own_class(module).__name__})" for name, module in modules(self.model)
        }
        counts: Counter[int] = Counter()

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            key = (id(module), counts[id(module)])
            counts[id(module)] += 1
            self._frames.append(_Frame(names[id(module)], self._agrees(key, args, kwargs), key))

        with hooked(self.model, before, lambda module, args, output: self._judge(self._frames.pop(), output)):
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


def _kept(tree: Any) -> list[Tensor | None]:
    return [
        local(leaf).detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(tree)
    ]
