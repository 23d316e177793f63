"""Checks that hidden states flow through the modules of a table as its stages have them: one stage after the other, and
no module is given what a state before its stage was.

On a stage the modules of the others return their input. So a model whose forward runs the blocks in another order than
the table, twice, or with the embeddings beside the hidden states (`block(x, x0)`) would silently compute other numbers.
A forward in which all of them return their input shows it, at no cost.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Run = Callable[[Tensor], Tensor]
Calls = list[tuple[str, list[Tensor]]]
"""(name of a module, the tensors that it is given), in the order of the calls."""


def flaw(empty: nn.Module, run: Run, x: Tensor, stages: Mapping[str, int]) -> str | None:
    """The first thing that a model does outside of the modules of its table, and that its stages would do otherwise.

    `run(x)`: the forward of `empty`, the model in which each module of the table returns its input. `stages`: name of a
    module -> the number of its stage.
    """
    out, calls = _traced(empty, run, x, stages)
    if out.shape != x.shape or not torch.equal(out, x):
        return "changes hidden states outside of the modules of its table, and every stage would do so again"
    numbers = [stages[name] for name, _ in calls]
    for i in range(1, len(calls)):
        if numbers[i] < numbers[i - 1]:
            return (
                f"runs {calls[i][0]} of stage {numbers[i]} after {calls[i - 1][0]} of stage {numbers[i - 1]}, but the "
                "modules of its table run once, in the order of the table"
            )
    if not x.is_floating_point() or not any(len(given) > 1 for _, given in calls):
        return None
    for stage in sorted(set(numbers) - {numbers[0]}):
        first = numbers.index(stage)
        _, moved = _traced(empty, run, torch.zeros_like(x), stages, back=(first - 1, x))
        if [name for name, _ in moved] != [name for name, _ in calls]:
            return None
        for i in (i for i, number in enumerate(numbers) if number == stage):
            name, given = calls[i]
            if _same(given, moved[i][1]):
                continue
            if _same(given, _traced(empty, run, x, stages)[1][i][1]):  # else it is random
                return (
                    f"gives {name} of stage {stage} something that depends on hidden states before that stage, or on "
                    "its first input, which only the first stage has"
                )
    return None


def _traced(
    empty: nn.Module, run: Run, x: Tensor, stages: Mapping[str, int], back: tuple[int, Tensor] | None = None
) -> tuple[Tensor, Calls]:
    """The output and the calls of a forward; `back`: the call of this number returns this tensor."""
    calls: Calls = []

    def before(name: str, args: Any, kwargs: Any) -> None:
        calls.append((name, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]))

    def after() -> Tensor | None:
        return back[1] if back and len(calls) - 1 == back[0] else None

    with ExitStack() as stack:
        for name in stages:
            module = empty.get_submodule(name)
            hook = module.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(lambda *_: after()).remove)
        return run(x), calls


def _same(here: list[Tensor], there: list[Tensor]) -> bool:
    pairs = zip(here, there, strict=False)
    return len(here) == len(there) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
