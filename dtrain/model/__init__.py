"""What is trained: any `nn.Module`. What a model may add about itself is a table, not a base class."""

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.build import build, locate
from dtrain.errors import WordsError
from dtrain.plan import Part


@runtime_checkable
class InitByName(Protocol):
    """A model that can fill any of its parameters knowing only its name; it is built without memory and filled shard by shard.

    A model that cannot is built whole on every rank from the same seed, which costs the memory of one full copy.
    """

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill `weight` (any shape, on the CPU) in place, drawing from `generator` alone."""
        ...


@runtime_checkable
class Balanced(Protocol):
    """A module that moves something of its own after each step, outside of any gradient."""

    def balance(self, sum_over_batch: Callable[[Tensor], Tensor]) -> None:
        """`sum_over_batch` adds up a tensor over the ranks that saw other tokens of the step."""
        ...


def balanced(model: nn.Module) -> list[Balanced]:
    return [module for module in model.modules() if isinstance(module, Balanced)]


class Absent(nn.Module):
    """In the place of a module that another stage holds: gives back its first input."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


def construct(part: Part, *, facts: Mapping[str, Any], seed: int) -> nn.Module:
    """The model of the plan; arguments that say `auto` are taken from the `facts` of the data.

    On the meta device when it can be filled by name, else on the CPU, seeded.
    """
    unknown = [name for name, value in part.items() if value == "auto" and name not in facts]
    if unknown:
        raise WordsError(
            f"model.{unknown[0]}=auto: the data does not say. Type model.{unknown[0]}=<value>, or data.outputs=<number> for data=dataset."
        )
    part = {name: facts[name] if value == "auto" else value for name, value in part.items()}
    target = locate(str(part["_target_"]))
    if inspect.isclass(target) and issubclass(target, InitByName):
        with torch.device("meta"):
            model = _module(build(part))
        if not any(buffer.is_meta for buffer in model.buffers()):  # whose values only their own constructor knows
            return model
    torch.manual_seed(seed)
    return _module(build(part))


def configuration(model: nn.Module) -> dict[str, Any] | None:
    """config.json of a model of transformers, with which others load its weights; None: it is none."""
    if "transformers" not in sys.modules or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return None
    kind = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))  # FSDP2 makes a class of its own of it
    config: dict[str, Any] = json.loads(json.dumps(model.config.to_dict(), default=str))
    return {key: value for key, value in config.items() if not key.startswith("_")} | {"architectures": [kind.__name__]}


def caveats(model: nn.Module) -> list[str]:
    """What a person should know about a model that is trained on several ranks or microbatches."""
    modules = list(model.modules())
    norms = sorted({type(module).__name__ for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)})
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in modules)
    return [
        *(f"{name} sees one microbatch of one rank: its losses depend on the mesh. GroupNorm or LayerNorm do not." for name in norms),
        *(["dropout draws other masks on another mesh: losses differ there; a restart on the same mesh draws the same."] if drops else []),
    ]


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost elements of every ModuleList and Sequential that have parameters and can be called: what is sharded, recomputed, compiled."""
    for child in module.children():
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(module, nn.ModuleList | nn.Sequential) and called and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def _module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise WordsError(f"model: {type(model).__name__} is not a torch.nn.Module.")
    return model
