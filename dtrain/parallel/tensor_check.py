"""Checks a split of matrices before the first step: calls the modules around them on this rank's part, and with whole
weights.

What a `colwise` module returns is this rank's part of the heads or of the width. A module that takes it for all of them
(`x.view(B, T, heads, -1)`, a norm, a softmax or a mean over it, `chunk(3, -1)` of a fused projection) silently computes
other numbers; and a whole weight that is used on such a part has a part of its gradient, which nobody adds to the
others. So in one forward of a few samples the innermost module around them that is given whole tensors and returns
whole ones is called twice more, as it is and with the weights of that module alone gathered: outputs and gradients must
be the same.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dtrain.errors import WordsError, first_line
from dtrain.mesh import Mesh
from dtrain.model import own_class, seeds, unwrapped
from dtrain.parallel import tensor
from dtrain.parallel.checks import distance, first_rows, hooked, modules, quiet, roots, tolerance_of
from dtrain.parallel.ranks import Ranks
from dtrain.parallel.replay import Call, State
from dtrain.precision import Precision

TOKENS = 16
"""Tokens of a sample in the check, or two for each rank of tp."""
ALIKE = 2
"""Of modules of one class with the same weights, so many are compared."""
GRADIENT = 10
"""How much more a forward with its backward may round than a forward."""

PATIENCE = 10
"""Seconds in which the other ranks must fail too, for a failure to be looked into."""

_checked: WeakSet[nn.Module] = WeakSet()


def check_tensors(
    model: nn.Module, batch: Any, forward: Callable[[Any], Any], *, mesh: Mesh, precision: Precision
) -> None:
    """Runs once per model, on all ranks of the mesh; not for dtrain's own models, nor in fp8. Raises WordsError with
    the name of a module that computes something else from a part. What cannot be compared passes.
    """
    if mesh.shape.tp == 1 or model in _checked or precision.convert is not None or _is_ours(model):
        return
    problem, letters = None, list[str]()
    with quiet(model):
        for attempt, some in enumerate(_few(batch, mesh)):
            watch = _Watch(model, mesh, precision)
            try:
                with hooked(model, watch.before, watch.after, first=True):
                    forward(some)
            except WordsError:
                raise
            except Exception as error:
                letters.append(_letter(attempt, mesh.rank))
                if mesh.shape.pp > 1 or not _all_fail(mesh, attempt, watch.place()):  # the others wait in collectives
                    raise
                with precision.autocast(mesh.device):
                    problem = watch.failed(error)
            else:
                problem = watch.problem
                break
            if problem:
                break
    problems = [one for one in mesh.gather(problem) if one]
    mesh.kv_delete(*letters)
    if problems:
        raise WordsError(f"mesh.tp={mesh.shape.tp}: {problems[0]}")
    _checked.add(model)


def _is_ours(model: nn.Module) -> bool:
    """Whether it is one of dtrain's models, which the tests compare on every mesh."""
    return all(own_class(unwrapped(root)).__module__.startswith("dtrain.") for root in roots(model))


def _all_fail(mesh: Mesh, attempt: int, place: str) -> bool:
    """Whether the other ranks fail in the same module, within PATIENCE seconds."""
    deadline, keys = time.monotonic() + PATIENCE, [_letter(attempt, rank) for rank in range(mesh.world)]
    mesh.kv_set(keys[mesh.rank], place)
    while (places := mesh.kv_get(keys)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return set(places) == {place}


def _letter(attempt: int, rank: int) -> str:
    return f"tensor_check/failed/{attempt}/{rank}"


def _few(batch: Any, mesh: Mesh) -> list[Any]:
    """The first tokens of the first samples; and, for a model that takes no others, these samples whole."""
    inputs = batch["inputs"]
    lengths = [
        part.shape[1]
        for part in (inputs.values() if isinstance(inputs, Mapping) else [inputs])
        if isinstance(part, Tensor) and part.ndim >= 2 and not part.is_floating_point()
    ]
    length = mesh.shape.tp * max(2, -(-TOKENS // mesh.shape.tp))
    rows = first_rows(batch)
    if mesh.shape.pp > 1 or not lengths or lengths[0] <= length:
        return [rows]
    return [first_rows(batch, lengths[0], length), rows]


@dataclass
class _Outcome:
    """The first floating tensor that a module returns, the gradients of its trained weights and of its first floating
    input, by name, and whether it drew random numbers.
    """

    out: Tensor
    gradients: dict[str, Tensor]
    drawn: bool


@dataclass
class _Frame:
    """A module that is running. `kind`: the same for modules that compute alike. `flows`: its inputs may need a
    gradient. `parts`: a module that it has called is given or returns parts. `call`: of a module around split ones.
    """

    module: nn.Module
    kind: Any = None
    flows: bool = False
    parts: bool = False
    call: Call | None = None


class _Silent(Exception):
    """This module cannot be compared."""


class _Watch:
    """A forward of the split model. `problem`: the first module whose numbers are others than with whole weights."""

    def __init__(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        self.problem: str | None = None
        self._device = mesh.device
        self._low = precision.compute.itemsize < 4 or precision.param.itemsize < 4
        self._rounding = tolerance_of(precision, mesh.device)
        self._full = tolerance_of(Precision(), mesh.device)
        self._names = {id(module): name for name, module in modules(model)}
        self._roots = roots(model)
        self._around = {
            id(module)
            for _, module in modules(model)
            if any(_parted(inner) for inner in module.modules() if inner is not module)
        }
        splits = [tensor.SPLIT[module] for _, module in modules(model) if module in tensor.SPLIT]
        self._ranks = Ranks(mesh, sequence=any(each.sequence for each in splits))
        self._frames = list[_Frame]()
        self._trained = mesh.coordinate["pp"] > 0
        self._busy = False
        self._seen, self._parted = Counter[Any](), dict[Any, bool]()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._busy:
            return
        frame = _Frame(module, flows=self._trained)
        if id(module) in self._around:
            frame.kind = _kind(module)
            frame.call = Call.of(module, args, kwargs) if self._seen[frame.kind] < ALIKE else None
        self._trained |= any(weight is not None and weight.requires_grad for weight in module._parameters.values())
        self._frames.append(frame)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._busy:
            return
        frame = self._frames.pop()
        parts = _parted(module) if module in tensor.SPLIT else frame.parts and self._returns_parts(frame)
        if parts and self._frames:
            self._frames[-1].parts = True

    def place(self) -> str:
        """The innermost module that runs now."""
        return self._named(self._frames[-1].module) if self._frames else "none"

    def failed(self, error: Exception) -> str | None:
        """The innermost module that fails on a part and not with whole weights."""
        for frame in reversed(self._frames):
            if frame.call and self._fails(frame.call):
                name, inner = self._named(frame.module), _split_in(frame.module)
                reason = first_line(error).rstrip(".")
                return f"{name} fails on this rank's part of {inner}: {reason}. {_ADVICE} Or leave out mesh.tp."
        return None

    def _fails(self, call: Call) -> bool:
        """Whether it runs with whole weights, having failed on a part."""
        self._busy = True
        try:
            given = self._gathered(call)
            return given is not None and self._agreed(partial(self._run, call, given, whole=True)) is not None
        except Exception:
            return False
        finally:
            self._busy = False

    def _returns_parts(self, frame: _Frame) -> bool:
        if frame.call is None:
            return self._parted.get(frame.kind, False)
        self._seen[frame.kind] += 1
        self._busy, now = True, State(frame.module)
        try:
            self._parted[frame.kind] = self._compare(frame, frame.call)
        except Exception:  # a failure of the comparison is none of the model
            self._parted[frame.kind] = False
        finally:
            now.put_back()
            self._busy = False
        return self._parted[frame.kind]

    def _compare(self, frame: _Frame, call: Call) -> bool:
        """Whether its inputs or outputs are parts, so that only an outer module can be compared."""
        given = self._gathered(call)
        if given is None:
            return True
        whole, part, wide = self._outcomes(call, given, flows=frame.flows)
        mine = self._ranks.mine(whole.out, part.out)
        outermost = frame.module in self._roots
        if mine is None:
            if outermost:
                self._tell(
                    frame,
                    f"returns {list(part.out.shape)}, which is a part of {list(whole.out.shape)}",
                    "The last of the modules that split a width is to be rowwise or colwise_gather_output in tp_plan.",
                )
            return not outermost
        tolerance = self._full if wide or not self._low else self._rounding
        off = self._ranks.worst([distance(mine, part.out, whole.out)])[0]
        if off > tolerance:
            if whole.drawn or part.drawn:
                return False
            summed = whole.out.shape == part.out.shape and self._ranks.adds_up(whole.out, part.out, tolerance)
            if summed and not outermost:
                return True
            what = "computes other values from this rank's part than from the whole"
            self._tell(frame, f"{what} (by {off:.1g} of the largest)", _ADVICE)
        elif (wide or not self._low) and not whole.drawn:
            self._compare_gradients(frame, whole.gradients, part.gradients, GRADIENT * tolerance)
        return False

    def _compare_gradients(
        self, frame: _Frame, whole: dict[str, Tensor], part: dict[str, Tensor], tolerance: float
    ) -> None:
        """A gradient of a weight that is nearly zero is compared with those of the others: it is all rounding."""
        largest = max((float(value.abs().max()) for name, value in whole.items() if name != _INPUT), default=0.0)
        offs = list[float]()
        for name, a in whole.items():
            b = part[name] if name in part else torch.zeros_like(a)
            mine = self._ranks.mine(a, b)
            floor = 0.0 if name == _INPUT else 0.1 * largest
            reference = max(float(a.abs().max()), floor)
            offs.append(0.0 if mine is None or not reference else float((mine - b).abs().max()) / reference)
        wrong = [name for name, off in zip(whole, self._ranks.worst(offs), strict=True) if not off <= tolerance]
        if not wrong:
            return
        name = next((name for name in wrong if name != _INPUT), _INPUT)
        inner = _split_in(frame.module)
        if name == _INPUT:
            self._tell(
                frame,
                f"uses its input beside {inner}, with this rank's part of them, so the gradient of the input is a part "
                "of a sum that nobody adds",
                "Split whatever reads the input there, by colwise in tp_plan.",
            )
            return
        path = self._names.get(id(frame.module), "")
        self._tell(
            frame,
            f"uses the whole {f'{path}.{name}' if path else name} with this rank's part of {inner}, so the gradient of "
            "that weight is a part of a sum that nobody adds",
            "In tp_plan give a norm inside of the heads, [B, T, heads, width], the style "
            "replicated_with_grad_allreduce, and split other modules too.",
        )

    def _tell(self, frame: _Frame, problem: str, advice: str) -> None:
        self.problem = self.problem or f"{self._named(frame.module)} {problem}. {advice} Or leave out mesh.tp."

    def _named(self, module: nn.Module) -> str:
        return f"{self._names.get(id(module)) or 'the model'} ({own_class(module).__name__})"

    def _outcomes(self, call: Call, given: list[Any], *, flows: bool) -> tuple[_Outcome, _Outcome, bool]:
        """(with whole weights, as it is, whether in fp32). Raises _Silent."""
        for wide in (True, False) if self._low else (False,):
            how: dict[str, Any] = {"wide": wide, "flows": flows}
            whole = self._agreed(partial(self._run, call, given, whole=True, **how))
            if whole is None:
                continue
            part = self._agreed(partial(self._run, call, call.leaves, shape=whole.out.shape, **how))
            if part is not None:
                return whole, part, wide
        raise _Silent

    def _agreed(self, run: Callable[[], _Outcome]) -> _Outcome | None:
        """None if it fails on any rank: models of others fail in many ways, in fp32 for one."""
        try:
            outcome = run()
        except Exception:
            outcome = None
        return None if self._ranks.worst([float(outcome is None)])[0] else outcome

    def _run(
        self,
        call: Call,
        leaves: list[Any],
        *,
        whole: bool = False,
        wide: bool = False,
        flows: bool = False,
        shape: torch.Size | None = None,
    ) -> _Outcome:
        """A call of the module and its backward. `shape`: that of its output from whole weights."""
        leaves = call.copies(leaves, wide=wide)
        call.state.put_back()
        seeds.reseed(0, 0, 0)
        with ExitStack() as stack:
            if whole:
                stack.enter_context(tensor.whole(call.module))
            weights = stack.enter_context(call.weights(whole=whole, wide=wide))
            if wide:
                stack.enter_context(torch.autocast(self._device.type, enabled=False))
            stack.enter_context(torch.enable_grad())
            trained: dict[str, Tensor] = {name: each for name, each in weights.items() if each.requires_grad}
            first = call.first()
            if flows and first is not None:
                trained[_INPUT] = leaves[first].requires_grad_()
                leaves[first] = trained[_INPUT].clone()  # which the module may change in place
            out = call.run(leaves)
            if out is None:
                raise _Silent
            drawn = bool(seeds.drawn(0, 0, 0)) or call.state.drew()
            gradients = self._gradients(out, trained, shape or out.shape)
        return _Outcome(out.detach(), gradients, drawn)

    def _gradients(self, out: Tensor, trained: dict[str, Tensor], shape: torch.Size) -> dict[str, Tensor]:
        seed = torch.randn(shape, generator=seeds.generator(0, "gradient of a module")).to(out)
        mine = self._ranks.mine(seed, out)
        if mine is None or not trained or not out.requires_grad:
            return {}
        found = torch.autograd.grad(out, list(trained.values()), mine, allow_unused=True)
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for name, value in zip(trained, found, strict=True)
            if value is not None
        }

    def _gathered(self, call: Call) -> list[Any] | None:
        """Its arguments, whole; None if some are parts of the heads or of the width. Raises _Silent."""
        if any(isinstance(module, FSDPModule) for module in call.module.modules() if module is not call.module):
            raise _Silent  # whose weights are there in their own forwards alone
        leaves = [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in call.leaves]
        if not all(leaf is None or isinstance(leaf, _PLAIN) for leaf in leaves):
            raise _Silent
        whole = self._ranks.whole([leaf for leaf in leaves if isinstance(leaf, Tensor)], self._rounding)
        if whole is None:
            return None
        rest = iter(whole)
        return [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


_INPUT = "its input"
_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size)
_ADVICE = (
    "Take the number of heads from the tensor (x.view(B, T, -1, head_width)), and mix nothing over what is split "
    "(norms, softmax, mean, chunk of a fused projection)."
)


def _parted(module: nn.Module) -> bool:
    """Whether it is split and given or returns a part of the heads or of the width."""
    split = tensor.SPLIT.get(module)
    return split is not None and split.parts


def _kind(module: nn.Module) -> Any:
    """The same for modules of one class whose weights have the same names and shapes, split alike."""
    weights = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
    return own_class(module), weights, _split_in(module, most=1 << 10)


def _split_in(module: nn.Module, *, most: int = 4) -> str:
    """The names of the modules in it that are given or return parts."""
    names = [name for name, inner in module.named_modules() if _parted(inner)]
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")
