"""A model cut into the stages of a pipeline: which modules each holds. Nothing here talks to other ranks.

A stage is the whole model in which the modules of other stages pass their input on. So names stay whole, and a model
needs no other code than the table `pipeline`: the names of its modules in the order they run. A Sequential needs no
table, a Hugging Face model has one in `_pp_plan`. The elements of lists in the table are the blocks that are shared
out. What a forward does outside of those modules every stage does again, so it must leave alone what flows: a Pipeline
sees to it.
"""

from collections.abc import Mapping, Sequence
from copy import copy

from torch import nn

from dtrain.errors import WordsError
from dtrain.model import PassThrough, tables, unwrapped
from dtrain.parallel.huggingface import untied
from dtrain.planned import PipelineShape


def cut(model: nn.Module, stages: int, split: str | Sequence[int]) -> list[list[str]]:
    """The names of the modules of each stage. `split`: `blocks` (evenly many), `cost` (evenly heavy), or how many
    blocks each stage gets.

    What runs before the first block goes with it, what runs after the last with that. Raises WordsError for a model
    that cannot be cut.
    """
    names, inside = table_of(model)
    if not inside:
        raise WordsError(
            f"mesh.pp: the table of {type(model).__name__} ({', '.join(names)}) names no list of blocks to share out "
            f"over {stages} stages. "
            "Give it a table `pipeline` that names one, or leave mesh.pp out."
        )
    _check(model, names)
    if len(inside) < stages:
        raise WordsError(
            f"mesh.pp: {type(model).__name__} has {len(inside)} blocks, fewer than the {stages} stages of the pipeline."
        )
    first, last = names.index(inside[0]), names.index(inside[-1]) + 1
    groups = [[name] for name in names[first:last]]
    groups[0], groups[-1] = names[:first] + groups[0], groups[-1] + names[last:]
    sizes = _sizes([_cost(model, group) for group in groups], split, stages)
    ends = [sum(sizes[: index + 1]) for index in range(stages)]
    return [
        [name for group in groups[end - size : end] for name in group] for end, size in zip(ends, sizes, strict=True)
    ]


def keep(model: nn.Module, names: Sequence[str], table: Sequence[str]) -> None:
    """Replace the modules of `table` that are not in `names` by PassThrough, in place."""
    for name in set(table) - set(names):
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, PassThrough())


def view(model: nn.Module, table: Sequence[str], path: str = "") -> nn.Module:
    """A second tree of modules above those of `table`, which are shared: it can be cut without cutting the first."""
    again = copy(model)
    again._modules = {
        name: view(child, table, f"{path}{name}.")
        if child is not None and any(entry.startswith(f"{path}{name}.") for entry in table)
        else child
        for name, child in model._modules.items()
    }
    return again


def emptied(model: nn.Module) -> nn.Module:
    """`model` with no module of its table left: what it still does, every stage does."""
    table, _ = table_of(model)
    empty = view(model, table)
    keep(empty, (), table)
    return empty


def table_of(model: nn.Module) -> tuple[list[str], list[str]]:
    """(every module that can stand on another stage in the order they run, those of them that are blocks)."""
    prefix, table = next(tables(model, "pipeline", "_pp_plan"), ("", ()))
    inside = [
        name.removeprefix(prefix) for name, _ in model.named_modules() if name.startswith(prefix)
    ]  # they are registered in the order they run
    listed = [f"{prefix}{name}" for name in (inside if isinstance(table, Mapping) else table) if name in table]
    if not listed and isinstance(model, nn.Sequential):
        names = [name for name, _ in model.named_children()]
        return names, names
    if not listed:
        raise WordsError(
            f"mesh.pp: {type(unwrapped(model)).__name__} does not say where it may be cut. "
            "Give the class a table such as pipeline = ('embed', 'blocks', 'norm', 'head'): its modules in the order "
            "they run."
        )
    names, blocks = [], []
    for name in listed:
        module = model.get_submodule(name)
        inner = (
            [f"{name}.{child}" for child, _ in module.named_children()]
            if isinstance(module, nn.ModuleList | nn.Sequential)
            else []
        )
        names += inner or [name]
        blocks += inner
    return names, blocks


def _check(model: nn.Module, names: Sequence[str]) -> None:
    """Every parameter stands in one module of the table, and in one alone."""
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
            f"mesh.pp: {' and '.join(tied)} are one weight, and may stand on two stages. Build the model untied "
            f"({untied(model)}), or leave mesh.pp out."
        )


def _cost(model: nn.Module, names: Sequence[str]) -> int:
    """Multiplications per token or so: the weights, but those of embeddings, which are only looked up."""
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
