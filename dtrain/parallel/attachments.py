"""Attachments of parameters: whether they are trained, and the attributes, hooks, classes and references elsewhere that
a user's code gave them.

Splitting a parameter, or allocating one that was built without memory, puts a new one in its place. The new parameter
gets the attributes and `requires_grad` of the old one. A model with anything else on such a parameter is refused.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.model.listed import check_listed

HOLDERS = {CellType: "a closure"}
"""Type of object that refers to a parameter -> its name for a user; other types have their own."""


@dataclass(frozen=True)
class _Original:
    """A parameter as it was before it was split."""

    reference: "weakref.ref[nn.Parameter]"
    is_trained: bool
    attributes: dict[str, Any]
    problem: str | None
    """An attachment that a new parameter cannot have."""

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "_Original":
        reference, is_trained = weakref.ref(parameter), parameter.requires_grad
        return cls(reference, is_trained, dict(vars(parameter)), _problem(parameter))


class Attachments:
    """Create it before the parameters of `model` are split."""

    def __init__(self, model: nn.Module) -> None:
        self._originals = {name: _Original.of(parameter) for name, parameter in model.named_parameters()}
        self._shared = _shared(model)

    def restore(self, model: nn.Module) -> None:
        """Copy what can be copied to the parameters that are new."""
        for _, parameter, original in self._replaced(model):
            parameter.requires_grad_(original.is_trained)
            for name, value in original.attributes.items():
                vars(parameter).setdefault(name, value)

    def finish(self, model: nn.Module, key: str, act: str, advice: str) -> None:
        """Restore, once all parameters are new. Raises WordsError if one lacks what the old one had; `act`, which `key`
        asks for, has replaced it.
        """
        check_listed(model)  # some keep a list of what was replaced
        self.restore(model)
        replaced = list(self._replaced(model))
        problems = ((name, original.problem) for name, _, original in replaced if original.problem)
        names = [name for name, *_ in replaced]
        sharing = ((name, f"shares memory with {self._shared[name]}") for name in names if name in self._shared)
        name, problem = next(problems, None) or next(sharing, None) or self._stale(names) or ("", "")
        if problem:
            raise WordsError(f"{key}: {name} {problem}, and {act} replaces the parameter. {advice}")

    def _replaced(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, _Original]]:
        for name, parameter in model.named_parameters():
            original = self._originals.get(name)
            if original and original.reference() is not parameter:
                yield name, parameter, original

    def _stale(self, names: Sequence[str]) -> tuple[str, str] | None:
        """(name, problem) of an old parameter to which some object still refers."""
        if not any(self._originals[name].reference() is not None for name in names):
            return None
        gc.collect()
        # a walrus in the comprehension would make a cell of this frame, which looks like a closure of the user's
        originals = ((name, self._originals[name].reference()) for name in names)
        alive = {name: parameter for name, parameter in originals if parameter is not None}
        owners = {id(each): name for name, parameter in alive.items() for each in _handles(parameter)}
        handles = [each for parameter in alive.values() for each in _handles(parameter)]
        for holder in gc.get_referrers(*handles):
            if holder is alive or holder is handles or isinstance(holder, FrameType):
                continue
            name = next(owners[id(each)] for each in gc.get_referents(holder) if id(each) in owners)
            kind = HOLDERS.get(type(holder), f"a {type(holder).__name__}")
            return name, f"is also in {kind} of yours"
        return None


def _shared(model: nn.Module) -> dict[str, str]:
    """Parameter -> another parameter, or a buffer, in the same memory."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    spans = sorted(
        (each.data_ptr(), each.data_ptr() + _extent(each), name)
        for name, each in tensors.items()
        if type(each) in (nn.Parameter, Tensor) and each.layout == torch.strided and not each.is_meta and each.numel()
    )
    shared, (end, last) = dict[str, str](), (0, "")
    for begin, until, name in spans:
        if begin < end:
            shared |= {name: last, last: name}
        if until > end:
            end, last = until, name
    return shared


def _extent(tensor: Tensor) -> int:
    """Bytes from its first number to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _problem(parameter: nn.Parameter) -> str | None:
    if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return "has a hook"
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}"
    tensors = (name for name, value in vars(parameter).items() if isinstance(value, Tensor) and value.ndim)
    return next((f"has the tensor {name} as an attribute" for name in tensors), None)


def _handles(parameter: nn.Parameter) -> list[Any]:
    """The objects by which code may hold a parameter: itself, and the node that accumulates its gradient."""
    if not parameter.requires_grad:
        return [parameter]
    return [parameter, torch.autograd.graph.get_gradient_edge(parameter).node]
