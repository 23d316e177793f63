"""A head of its own on a pretrained model of transformers: tensors that no weights fill, which begin from the seed."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

STD = 0.02
"""Of a matrix, where the configuration says nothing (`initializer_range`)."""


def base_of(model: nn.Module) -> str:
    """How the names of all but the head begin in a model of transformers, such as `vit.`; empty if it has no head."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    return f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""


def begin_anew(model: nn.Module) -> None:
    """Note that the head is new. The model has one."""
    vars(model)["_new_head"] = base_of(model)


def is_new(model: nn.Module) -> bool:
    """Whether the head is new."""
    return bool(new_base(model))


def new_base(model: nn.Module) -> str:
    """How the names of all but a new head begin; empty if the head is not new."""
    return str(vars(model).get("_new_head", ""))


def new(model: nn.Module, names: Collection[str]) -> set[str]:
    """Those of these names that are of a new head."""
    base = new_base(model)
    return {name for name in names if not name.startswith(base)} if base else set()


def pooler(model: nn.Module, names: Collection[str]) -> set[str]:
    """Those of these names that lie between the base and a new head: weights of another task, such as those of a
    masked language model, may lack them, and then they begin as the head does.
    """
    base = new_base(model)
    return {name for name in names if is_pooler(name, base)} if base else set()


def is_pooler(name: str, base: str) -> bool:
    return name.startswith(f"{base}pooler.")


def init(name: str, std: float, weight: Tensor, generator: torch.Generator) -> None:
    """Initialise a parameter (whole, on the CPU) in place."""
    if weight.ndim > 1:
        weight.normal_(0, std, generator=generator)
    else:
        weight.fill_(float(not name.endswith("bias")))


def std_of(model: nn.Module) -> float:
    """The standard deviation of the matrices of a new head."""
    return float(getattr(getattr(model, "config", None), "initializer_range", None) or STD)
