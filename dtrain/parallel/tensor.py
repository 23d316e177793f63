"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): the matrices of a model are split over the axis tp by its table.

The table is `tp_plan` of the model, or `_tp_plan` of a Hugging Face model: names of modules, in which `*` is any one
part, -> styles. Modules without a style, and the experts of a Hugging Face model, stay whole on every rank. With
`sequence=split` (arXiv 2205.05198) the norms and residuals between the split matrices are split along the sequence;
with `loss=split` the logits stay split over the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

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
from dtrain.objective.head import Deferred
from dtrain.parallel import huggingface

GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles of a matrix whose outputs are gathered on every rank."""


@dataclass(frozen=True)
class Split:
    """How a style has split a module: the keys of its hooks there. `parts`: what the module is given or returns is this
    rank's part of the heads or of the width. `sequence`: what lies between such modules is a part of the sequence.
    """

    before: frozenset[int]
    after: frozenset[int]
    parts: bool
    sequence: bool


SPLIT: WeakKeyDictionary[nn.Module, Split] = WeakKeyDictionary()
"""The modules that `apply` has split."""


def apply(model: nn.Module, mesh: DeviceMesh, *, sequence: str, loss: str) -> None:
    """Split the modules of the model's table in place. Raises WordsError as `styles` does, and for a weight that would
    be split in two ways.
    """
    chosen, tied = styles(model, mesh.size(), sequence=sequence, loss=loss), _tied(model)
    hooks = {name: _hooks(model.get_submodule(name)) for name in chosen}
    parallelize_module(model, mesh, chosen)
    for name, (before, after) in hooks.items():
        module = model.get_submodule(name)
        now = _hooks(module)
        SPLIT[module] = Split(now[0] - before, now[1] - after, _parted(chosen[name]), sequence == "split")
    for (first, name), *others in tied:
        for module, other in others:
            weight, copy = getattr(first, name), getattr(module, other)
            if getattr(weight, "placements", None) != getattr(copy, "placements", None):
                raise WordsError(
                    f"mesh.tp={mesh.size()}: {type(first).__name__} and {type(module).__name__} are one weight, which "
                    f"tp_plan splits in two ways. Build the model untied ({huggingface.untied(model)}), or leave out "
                    "mesh.tp."
                )
            setattr(module, other, weight)
    Outside(model, sequence=sequence, loss=loss).watch()


class Outside(TorchFunctionMode):
    """In the first forward, refuses a split weight by its name if a parent uses it itself, with a whole tensor.
    Compiled code is not watched.
    """

    def __init__(self, model: nn.Module, *, sequence: str, loss: str) -> None:
        super().__init__()
        # the name of the class now: FSDP2 will replace it by a subclass
        self._model, self._kind, self._open = model, type(unwrapped(model)).__name__, False
        self._sequence, self._loss = sequence, loss

    def watch(self) -> None:
        def begin(*_: Any) -> None:
            if torch.is_grad_enabled():
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
            split = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)}
            name = next((name for name, parameter in self._model.named_parameters() if id(parameter) in split), None)
            gathered = all(place.is_replicate() for each in split.values() for place in each.placements)
            if name is None and self._sequence == "split" and gathered:
                raise WordsError(
                    f"tensor.sequence=split: {self._kind} uses the output of a sequence_parallel module outside of the "
                    "matrices that tp_plan splits, with a whole tensor. Split what reads it there too, or leave out "
                    "tensor.sequence."
                ) from error
            if name is None and self._loss == "split":
                raise WordsError(
                    f"tensor.loss=split: {self._kind} computes with the outputs that its tp_plan gathers, but this key "
                    "leaves them split. Leave out tensor.loss."
                ) from error
            raise WordsError(
                f"mesh.tp: {name or 'a result of a weight'} is split, but {self._kind} uses it outside of its own "
                "module, with a whole tensor. Call the module instead, leave it out of tp_plan, or leave out mesh.tp."
            ) from error


def styles(model: nn.Module, degree: int, *, sequence: str, loss: str) -> dict[str, ParallelStyle]:
    """The style of each module of the model's table; `sequence` and `loss` are `whole` or `split`. Raises WordsError
    for a model or a style that cannot be split.
    """
    table = dict(plan_of(model))
    if not table:
        raise WordsError(
            f"mesh.tp={degree}: {type(unwrapped(model)).__name__} has no tensor-parallel plan. Give the class a table "
            "such as tp_plan = {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}, or leave out mesh.tp."
        )
    if sequence == "split" and "sequence_parallel" not in table.values():
        raise WordsError(
            f"tensor.sequence=split: the tp_plan of {type(model).__name__} does not say which modules are "
            "sequence_parallel. Leave it out."
        )
    built = _styles(sequence == "split", loss == "split", huggingface.shared_key_width(model))
    for pattern, style in table.items():
        if style in GATHERED and "*" not in pattern:  # the head; blocks need their gathered outputs
            table[pattern] = "colwise_logits"
    chosen: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in table.items() if matches(name, pattern)), "")
        for inner in _parts(name, module, style) if style else ():
            if style not in built:
                raise WordsError(
                    f"mesh.tp={degree}: {inner} has the style {style}. Allowed: {', '.join(sorted(built))}. Leave out "
                    "mesh.tp."
                )
            make = built[style]
            if make is not None:
                chosen[inner] = make()
    if not chosen:
        raise WordsError(
            f"mesh.tp={degree}: the tp_plan of {type(model).__name__} names none of its modules ({', '.join(table)})."
        )
    huggingface.check_heads(model, [name for name, style in chosen.items() if type(style) is ColwiseParallel], degree)
    return chosen


def _parts(name: str, module: nn.Module, style: str) -> list[str]:
    """The modules with the parameters of a style: `module` itself, or those that an adapter of peft put in its place.

    Of LoRA (arXiv 2106.09685) W + B A, B is split by its outputs as W, and A by its inputs as W.
    """
    if hasattr(module, "base_layer"):
        if not hasattr(module, "lora_A") or len(getattr(module, "lora_magnitude_vector", ())):
            raise WordsError(
                f"mesh.tp: {name} is adapted by {type(module).__name__}; only LoRA without DoRA can be split. Leave "
                "out mesh.tp."
            )
        parts = [f"{name}.base_layer"]
        if style == "rowwise" or style.startswith("colwise"):
            adapter = "lora_A" if style == "rowwise" else "lora_B"
            parts += [f"{name}.{adapter}.{key}" for key, _ in getattr(module, adapter).named_children()]
        return parts
    saved = getattr(module, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict) and hasattr(module, "original_module"):
        return [f"{name}.original_module", *(f"{name}.modules_to_save.{key}" for key in saved)]
    return [name] if any(True for _ in module.parameters(recurse=False)) else []


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each weight that is in several modules."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [both for both in places.values() if len(both) > 1]


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """The table of a model, or of the model that it wraps, by names from the root; empty if there is none."""
    all_tables = tables(model, "tp_plan", "_tp_plan")
    return {f"{prefix}{name}": style for prefix, table in all_tables for name, style in table.items()}


def _hooks(module: nn.Module) -> tuple[frozenset[int], frozenset[int]]:
    return frozenset(module._forward_pre_hooks), frozenset(module._forward_hooks)


def _parted(style: ParallelStyle) -> bool:
    """Whether a module of this style is given or returns a part of the heads or of the width."""
    if type(style) is ColwiseParallel:
        return style.output_layouts == (Shard(-1),)
    if type(style) is RowwiseParallel:
        return style.input_layouts == (Shard(-1),)
    return isinstance(style, PerHead | SharedKey)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """A context in which the styles of the split modules in `model` do nothing, for weights that are whole."""
    kept = list[tuple[dict[int, Any], int, Any]]()
    for module in model.modules():
        if split := SPLIT.get(module):
            kept += [(module._forward_pre_hooks, key, module._forward_pre_hooks[key]) for key in split.before]
            kept += [(module._forward_hooks, key, module._forward_hooks[key]) for key in split.after]
    for hooks, key, _ in kept:
        hooks[key] = lambda *_: None
    try:
        yield
    finally:
        for hooks, key, hook in kept:
            hooks[key] = hook


def _styles(sequence: bool, loss: bool, shared_key: int) -> dict[str, Callable[[], ParallelStyle] | None]:
    """Style -> how to split; None: nothing to do on this mesh. The names are those of Hugging Face's plans."""
    between = Shard(1) if sequence else Replicate()
    logits = Shard(-1) if loss else Replicate()
    whole_input = ("rowwise_split_input", "rowwise_rep", "embedding_rowwise")
    return {
        **dict.fromkeys(GATHERED, lambda: ColwiseParallel(output_layouts=Replicate())),
        **dict.fromkeys(whole_input, lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=between)),
        "colwise_logits": lambda: Logits(output_layouts=logits, use_local_output=not loss),
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=between),
        "sequence_parallel": (lambda: Gathering(sequence_dim=1)) if sequence else None,
        "replicated_with_grad_allreduce": lambda: PerHead(sequence_dim=2, use_local_output=True),
        "mla_kv_a_proj": lambda: SharedKey(shared_key),
        # whole, and computed by every rank: only the attention around them is split
        **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "replicate")),
    }


class Logits(ColwiseParallel):
    """The head, which may put its product off: then its outputs are gathered when they are computed."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        rest = partial(ColwiseParallel._prepare_output_fn, output_layouts, use_local_output, mod)
        if isinstance(outputs, Deferred):
            outputs.finish = lambda whole: rest(whole, device_mesh)
            return outputs
        return rest(outputs, device_mesh)


class Gathering(SequenceParallel):
    """A norm over a split sequence; its output is gathered once for all the matrices that read it."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Tensor, device_mesh: DeviceMesh) -> Tensor:
        assert isinstance(outputs, DTensor)
        return outputs.redistribute(placements=[Replicate()])


class SharedKey(ParallelStyle):
    """A whole projection whose last `width` outputs are a key that the split heads share (DeepSeek-V2, arXiv
    2405.04434): each rank's heads contribute a part of its gradient. The other outputs go through a split matrix, which
    sums its own gradients.
    """

    def __init__(self, width: int) -> None:
        self._width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def summed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            before, key = out.split([out.shape[-1] - self._width, self._width], -1)
            shared = DTensor.from_local(key, device_mesh, [Replicate()], run_check=False)
            return torch.cat([before, shared.to_local(grad_placements=[Partial()])], -1)

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
