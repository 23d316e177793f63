"""Cuts a model into the stages of a pipeline: which modules each holds. Without communication.

A stage is the whole model, in which modules of other stages return their input. So parameters keep their names, and a
model needs no code but the table `pipeline`: the names of its modules in the order they run. A Sequential needs no
table; a Hugging Face model has one in `_pp_plan`. The elements of lists in the table are the blocks, which are divided
among the stages. Every stage runs the part of the forward outside of those modules, so that part must not change the
hidden states; a Pipeline checks that.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import islice

from torch import nn

from dtrain.errors import WordsError
from dtrain.model import PassThrough, tables, unwrapped
from dtrain.parallel.huggingface import untied
from dtrain.planned import PipelineShape


def cut(model: nn.Module, stages: int, split: str | Sequence[int]) -> list[list[str]]:
    """The names of the modules of each stage. `split`: `blocks` (equal numbers), `cost` (equal weights), or the number
    of blocks of each stage.

    Modules before the first block go with it, modules after the last block with that one. Raises WordsError for a model
    that cannot be cut.
    """
    names, blocks = table_of(model)
    if not blocks:
        raise WordsError(
            f"mesh.pp: the table of {type(model).__name__} ({', '.join(names)}) names no list of blocks to divide "
            f"among {stages} stages. Give it a table `pipeline` that names one, or leave out mesh.pp."
        )
    _check(model, names)
    if len(blocks) < stages:
        raise WordsError(
            f"mesh.pp: {type(model).__name__} has {len(blocks)} blocks, fewer than the {stages} stages of the pipeline."
        )
    first, last = names.index(blocks[0]), names.index(blocks[-1]) + 1
    groups = [[name] for name in names[first:last]]
    groups[0], groups[-1] = names[:first] + groups[0], groups[-1] + names[last:]
    rest, sizes = iter(groups), _sizes([_cost(model, group) for group in groups], split, stages)
    return [[name for group in islice(rest, size) for name in group] for size in sizes]


def stage_of(model: nn.Module, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """Name of each module -> the number of its stage; without dropout, which changes no hidden state in evaluation."""
    nothing = nn.Identity | nn.modules.dropout._DropoutNd
    named = ((name, number) for number, names in enumerate(stages) for name in names)
    return {name: number for name, number in named if not isinstance(model.get_submodule(name), nothing)}


def keep(model: nn.Module, names: Sequence[str], table: Sequence[str]) -> None:
    """Replace the modules of `table` that are not in `names` by PassThrough, in place."""
    for name in set(table) - set(names):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PassThrough())


def view(model: nn.Module, table: Sequence[str], path: str = "") -> nn.Module:
    """A copy of the modules above those of `table`, which are shared: it can be cut without cutting the original."""
    again = copy(model)
    again._modules = dict(model._modules)
    for name, child in model._modules.items():
        inner = f"{path}{name}."
        if child is not None and any(entry.startswith(inner) for entry in table):
            again._modules[name] = view(child, table, inner)
    return again


def emptied(model: nn.Module) -> nn.Module:
    """`model` without the modules of its table: the part that every stage runs."""
    table, _ = table_of(model)
    empty = view(model, table)
    keep(empty, (), table)
    return empty


def table_of(model: nn.Module) -> tuple[list[str], list[str]]:
    """(the modules that may be on another stage, in the order they run; the blocks among them)."""
    prefix, table = next(tables(model, "pipeline", "_pp_plan"), ("", ()))
    if isinstance(table, Mapping):  # modules are registered in the order they run
        inner_names = (name.removeprefix(prefix) for name, _ in model.named_modules() if name.startswith(prefix))
        table = [name for name in inner_names if name in table]
    listed = [f"{prefix}{name}" for name in table]
    if not listed and isinstance(model, nn.Sequential):
        names = [name for name, _ in model.named_children()]
        return names, names
    if not listed:
        raise WordsError(
            f"mesh.pp: {type(unwrapped(model)).__name__} does not say where it may be cut. Give the class a table such "
            "as pipeline = ('embed', 'blocks', 'norm', 'head'): its modules in the order they run."
        )
    names, blocks = list[str](), list[str]()
    for name in listed:
        module, inner = model.get_submodule(name), list[str]()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            inner = [f"{name}.{child}" for child, _ in module.named_children()]
        names += inner or [name]
        blocks += inner
    return names, blocks


def _check(model: nn.Module, names: Sequence[str]) -> None:
    """Raises WordsError unless every parameter is in exactly one module of the table."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((module for module in names if name.startswith(f"{module}.")), None)
        if owner is None:
            raise WordsError(
                f"mesh.pp: {name} is in no module of the table `pipeline` of {type(model).__name__}, so it has no "
                "stage."
            )
        owners.setdefault(id(parameter), []).append(name)
    tied = next((both for both in owners.values() if len(both) > 1), None)
    if tied:
        raise WordsError(
            f"mesh.pp: {' and '.join(tied)} are one weight, and may be on two stages. Build the model untied "
            f"({untied(model)}), or leave out mesh.pp."
        )


def _cost(model: nn.Module, names: Sequence[str]) -> int:
    """About the multiplications per token: the number of weights, without embeddings, which are only looked up."""
    modules = [
        inner for name in names for inner in model.get_submodule(name).modules() if not isinstance(inner, nn.Embedding)
    ]
    return sum(parameter.numel() for module in modules for parameter in module.parameters(recurse=False))


def _sizes(costs: Sequence[int], split: str | Sequence[int], stages: int) -> list[int]:
    if not isinstance(split, str) and (len(split) != stages or sum(split) != len(costs) or min(split) < 1):
        even = PipelineShape().sizes(costs, stages)
        raise WordsError(
            f"pipeline.split={list(split)}: {stages} numbers are needed whose sum is {len(costs)} blocks. Type "
            f"pipeline.split={even}."
        )
    return PipelineShape(split=split if isinstance(split, str) else tuple(split)).sizes(costs, stages)
