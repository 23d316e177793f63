"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): the matrices of a model split over the axis tp as its plan table says.

A model carries `tp_plan`, or a Hugging Face model `_tp_plan`: a mapping of module names, in which `*` is any one part, to styles. What
the table does not name stays whole on every rank. With `sequence=split` (arXiv 2205.05198) what lies between the split matrices, norms and
residuals, is split along the sequence; with `loss=split` the logits stay split over the vocabulary.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module

from dtrain.errors import WordsError


def apply(model: nn.Module, mesh: DeviceMesh, *, sequence: str, loss: str) -> None:
    """Split the modules that the model's table names, in place; `sequence` and `loss` are `whole` or `split`. Raises WordsError for a model or a style that cannot be split."""
    table = plan_of(model)
    if not table:
        raise WordsError(
            f"mesh.tp={mesh.size()}: {type(model).__name__} has no tensor-parallel plan. "
            "Give the class a table such as tp_plan = {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or leave mesh.tp out."
        )
    if sequence == "split" and "sequence_parallel" not in table.values():
        raise WordsError(
            f"tensor.sequence=split: the tp_plan of {type(model).__name__} does not say which modules are sequence_parallel. Leave it out."
        )
    styles = _styles(sequence == "split", loss == "split")
    chosen: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in table.items() if matches(name, pattern)), None)
        if style is None or not any(True for _ in module.parameters(recurse=False)):
            continue
        if style not in styles:
            raise WordsError(f"mesh.tp={mesh.size()}: {name} asks for the style {style}. Built are {', '.join(sorted(styles))}.")
        make = styles[style]
        if make is not None:
            chosen[name] = make()
    if not chosen:
        raise WordsError(f"mesh.tp={mesh.size()}: no module of {type(model).__name__} is named by its tp_plan ({', '.join(table)}).")
    tied = _tied(model)
    parallelize_module(model, mesh, chosen)
    for (first, name), *others in tied:
        for module, other in others:
            weight, copy = getattr(first, name), getattr(module, other)
            if getattr(weight, "placements", None) != getattr(copy, "placements", None):
                raise WordsError(
                    f"mesh.tp={mesh.size()}: {type(first).__name__} and {type(module).__name__} are one weight, which tp_plan splits twice."
                )
            setattr(module, other, weight)


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each weight stands that stands in several modules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [both for both in places.values() if len(both) > 1]


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The table of a model; empty when it has none."""
    found: Mapping[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return found


def _styles(sequence: bool, loss: bool) -> dict[str, Callable[[], ParallelStyle] | None]:
    """style -> how to split; None: nothing to do on this mesh. The names are those of Hugging Face's plans."""
    between = Shard(1) if sequence else Replicate()
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False) if loss else ColwiseParallel(output_layouts=Replicate())
    return {
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "colwise_gather_output": lambda: logits,
        "colwise_rep": lambda: logits,
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "sequence_parallel": (lambda: Gathering(sequence_dim=1)) if sequence else None,
        "replicated_with_grad_allreduce": lambda: PerHead(sequence_dim=2, use_local_output=True),
        "replicate": None,
    }


class Gathering(SequenceParallel):
    """A norm over a split sequence whose output is whole: gathered once for all the matrices behind it."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Tensor, device_mesh: DeviceMesh) -> Tensor:
        assert isinstance(outputs, DTensor)
        return outputs.redistribute(placements=[Replicate()])


class PerHead(SequenceParallel):
    """A norm inside each head, [B, T, H, D] with H split: its weight is whole, its gradient is summed over tp."""

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        if inputs[0].ndim != 4:
            raise WordsError(
                f"mesh.tp: {type(mod).__name__} normalises all heads together ({list(inputs[0].shape)}), which tensor parallelism splits."
            )
        return SequenceParallel._prepare_input_fn(sequence_sharding, mod, inputs, device_mesh)


def matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
