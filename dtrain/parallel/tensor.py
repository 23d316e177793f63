"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): the matrices of a model split over the axis tp as its plan table
says.

A model carries `tp_plan`, or a Hugging Face model `_tp_plan`: a mapping of module names, in which `*` is any one part,
to styles. What the table does not name, and the experts of a Hugging Face model, stay whole on every rank. With
`sequence=split` (arXiv 2205.05198) what lies between the split matrices, norms and residuals, is split along the
sequence; with `loss=split` the logits stay split over the vocabulary.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dtrain.errors import WordsError
from dtrain.model import tables, unwrapped
from dtrain.parallel import huggingface

GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles of a matrix whose outputs every rank gets whole."""


def apply(model: nn.Module, mesh: DeviceMesh, *, sequence: str, loss: str) -> None:
    """Split the modules that the model's table names, in place. Raises WordsError as `styles` does, and for a weight
    that would be split in two ways.
    """
    chosen, tied = styles(model, mesh.size(), sequence=sequence, loss=loss), _tied(model)
    parallelize_module(model, mesh, chosen)
    for (first, name), *others in tied:
        for module, other in others:
            weight, copy = getattr(first, name), getattr(module, other)
            if getattr(weight, "placements", None) != getattr(copy, "placements", None):
                raise WordsError(
                    f"mesh.tp={mesh.size()}: {type(first).__name__} and {type(module).__name__} are one weight, which "
                    "tp_plan splits in two ways. "
                    f"Build the model untied ({huggingface.untied(model)}), or leave mesh.tp out."
                )
            setattr(module, other, weight)
    Outside(model, loss).watch()


class Outside(TorchFunctionMode):
    """A split weight that its parent uses itself, with a whole tensor, is refused by its name in the first forward.
    Code that is compiled is not watched.
    """

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self._loss = loss
        self._model, self._kind, self._open = (
            model,
            type(unwrapped(model)).__name__,
            False,
        )  # FSDP2 makes a class of its own of it

    def watch(self) -> None:
        def begin(*_: Any) -> None:
            first.remove()
            self._open = all(module._compiled_call_impl is None for module in self._model.modules())
            if self._open:
                self.__enter__()  # type: ignore[no-untyped-call]

        def end(*_: Any) -> None:
            if self._open:
                self._open = False
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        first = self._model.register_forward_pre_hook(begin)
        self._model.register_forward_hook(end, always_call=True)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **kwargs or {})
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            given = {id(each) for each in tree_leaves((args, kwargs))}
            split = (
                (name, parameter)
                for name, parameter in self._model.named_parameters()
                if isinstance(parameter, DTensor)
            )
            named = next((name for name, parameter in split if id(parameter) in given), None)
            if named is None and self._loss == "split":
                raise WordsError(
                    f"tensor.loss=split: {self._kind} goes on computing with what its tp_plan gathers, which this "
                    "leaves split. Leave it out."
                ) from error
            raise WordsError(
                f"mesh.tp: {named or 'what is made of a weight'} is split, and {self._kind} uses it outside of its "
                "own module, with a tensor that is whole. "
                "Call the module instead, leave it out of tp_plan, or leave mesh.tp out."
            ) from error


def styles(model: nn.Module, degree: int, *, sequence: str, loss: str) -> dict[str, ParallelStyle]:
    """How each module that the model's table names is split; `sequence` and `loss` are `whole` or `split`. Raises
    WordsError for a model or a style that cannot be split.
    """
    table = plan_of(model)
    if not table:
        raise WordsError(
            f"mesh.tp={degree}: {type(unwrapped(model)).__name__} has no tensor-parallel plan. "
            "Give the class a table such as tp_plan = {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or "
            "leave mesh.tp out."
        )
    if sequence == "split" and "sequence_parallel" not in table.values():
        raise WordsError(
            f"tensor.sequence=split: the tp_plan of {type(model).__name__} does not say which modules are "
            "sequence_parallel. Leave it out."
        )
    built = _styles(sequence == "split", loss == "split", huggingface.rotated(model))
    heads = {
        pattern for pattern, style in table.items() if style in GATHERED and "*" not in pattern
    }  # blocks take apart what they gather
    chosen: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = next(
            (
                "colwise_logits" if pattern in heads else style
                for pattern, style in table.items()
                if matches(name, pattern)
            ),
            None,
        )
        for inner, part in _parts(name, module, style).items() if style else ():
            if part not in built:
                raise WordsError(
                    f"mesh.tp={degree}: {inner} asks for the style {part}. Built are {', '.join(sorted(built))}. "
                    "Leave mesh.tp out."
                )
            make = built[part]
            if make is not None:
                chosen[inner] = make()
    if not chosen:
        raise WordsError(
            f"mesh.tp={degree}: no module of {type(model).__name__} is named by its tp_plan ({', '.join(table)})."
        )
    huggingface.check_heads(model, [name for name, style in chosen.items() if type(style) is ColwiseParallel], degree)
    return chosen


def _parts(name: str, module: nn.Module, style: str) -> dict[str, str]:
    """The modules with parameters that a style is for: `module` itself, or what an adapter of peft has put in its
    place.

    Of LoRA (arXiv 2106.09685) W + B A, B gives what W gives, and A takes what W takes.
    """
    if hasattr(module, "base_layer"):
        if not hasattr(module, "lora_A") or len(getattr(module, "lora_magnitude_vector", ())):
            raise WordsError(
                f"mesh.tp: {name} is adapted by {type(module).__name__}, of which only LoRA is split, without DoRA. "
                "Leave mesh.tp out."
            )
        inner = {"lora_B": style} if style.startswith("colwise") else {}
        if style == "rowwise":
            inner = {"lora_A": style}
        parts = {
            f"{name}.{each}.{key}": part
            for each, part in inner.items()
            for key, _ in getattr(module, each).named_children()
        }
        return {f"{name}.base_layer": style, **parts}
    saved = getattr(module, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict) and hasattr(module, "original_module"):
        return {f"{name}.{inner}": style for inner in ("original_module", *(f"modules_to_save.{key}" for key in saved))}
    return {name: style} if any(True for _ in module.parameters(recurse=False)) else {}


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each weight stands that stands in several modules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [both for both in places.values() if len(both) > 1]


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The table of a model, or of the model that it wraps, by names from the root; empty when there is none."""
    found: dict[str, str] = {}
    for prefix, table in tables(model, "tp_plan", "_tp_plan"):
        found |= {f"{prefix}{name}": style for name, style in table.items()}
    return found


def _styles(sequence: bool, loss: bool, rotated: int) -> dict[str, Callable[[], ParallelStyle] | None]:
    """style -> how to split; None: nothing to do on this mesh. The names are those of Hugging Face's plans."""
    between = Shard(1) if sequence else Replicate()
    return {
        **dict.fromkeys(GATHERED, lambda: ColwiseParallel(output_layouts=Replicate())),
        "colwise_logits": lambda: ColwiseParallel(
            output_layouts=Shard(-1) if loss else Replicate(), use_local_output=not loss
        ),
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=between),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "sequence_parallel": (lambda: Gathering(sequence_dim=1)) if sequence else None,
        "replicated_with_grad_allreduce": lambda: PerHead(sequence_dim=2, use_local_output=True),
        "mla_kv_a_proj": lambda: SharedKey(rotated),
        # whole on every rank, which computes what all others compute: the attention around them is split
        "moe_tp_experts": None,
        "moe_identity_expert": None,
        "replicate": None,
    }


class Gathering(SequenceParallel):
    """A norm over a split sequence whose output is whole: gathered once for all the matrices behind it."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Tensor, device_mesh: DeviceMesh) -> Tensor:
        assert isinstance(outputs, DTensor)
        return outputs.redistribute(placements=[Replicate()])


class SharedKey(ParallelStyle):
    """A whole projection of which the last `rotated` outputs are a key that the split heads share (DeepSeek-V2, arXiv
    2405.04434): each rank's heads give it a part of its gradient. What comes before them goes through a split matrix,
    which adds its own gradients up.
    """

    def __init__(self, rotated: int) -> None:
        self._rotated = rotated

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def summed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            before, key = out.split([out.shape[-1] - self._rotated, self._rotated], -1)
            return torch.cat(
                [
                    before,
                    DTensor.from_local(key, device_mesh, [Replicate()], run_check=False).to_local(
                        grad_placements=[Partial()]
                    ),
                ],
                -1,
            )

        module.register_forward_hook(summed)
        return module


class PerHead(SequenceParallel):
    """A norm inside each head, [B, T, H, D] with H split: its weight is whole, its gradient is summed over tp."""

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        if inputs[0].ndim != 4:
            raise WordsError(
                f"mesh.tp: {type(mod).__name__} normalises all heads together ({list(inputs[0].shape)}), which tensor "
                "parallelism splits."
            )
        return SequenceParallel._prepare_input_fn(sequence_sharding, mod, inputs, device_mesh)


def matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
