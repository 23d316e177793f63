"""Adapters: a few parameters beside the weights of a model, which stay as they are. Every word builds an Adapter.

A layer with an adapter is still an `nn.Linear` whose `weight` and `bias` have their names: what splits, shards and
saves a model takes it as one.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.patterns import fits, near
from dtrain.errors import WordsError
from dtrain.mesh.sharding import like, local, region, whole
from dtrain.model import blocks
from dtrain.model.adapted import mark

Adapter = Callable[[nn.Module], None]
"""Adds its parameters to a model in place, and has nothing else trained."""


class LowRank(nn.Linear):
    """A linear layer with the product of two thin matrices: `lora_A` [rank, in] and `lora_B` [out, rank]."""

    added: ClassVar[Sequence[str]]
    off: bool
    scaling: float
    """alpha / rank"""
    dropout: float
    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor: ...

    def change(self, input: Tensor) -> Tensor:
        """B A x, without the input's numbers that are dropped while it trains."""
        if self.training and self.dropout:  # the local piece: ranks that hold the same one draw the same
            input = like(F.dropout(local(input), self.dropout), input)
        return F.linear(F.linear(input, self.lora_A), self.lora_B)

    def init_added(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """A as the weight of an `nn.Linear` begins, everything else zero, so the layer computes what it did."""
        if name == "lora_A":
            bound = weight.shape[1] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
        else:
            weight.zero_()

    def begin(self) -> None:
        """Derive from `weight` what begins as a function of it; every rank that holds a part of the layer calls it."""


def adapt(
    model: nn.Module,
    kind: type[LowRank],
    *,
    word: str,
    targets: Sequence[str] | None,
    rank: int,
    alpha: float,
    dropout: float,
) -> None:
    """Turn the linear layers that `targets` select (None: all of the blocks) into those of a `kind`, and freeze all
    other parameters. Raises WordsError for a pattern that selects none.
    """
    chosen = _linears(model, targets, word)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for linear in chosen:
        _become(linear, kind, rank=rank, scaling=alpha / rank, dropout=dropout)
    mark(model, {"kind": word, "rank": rank, "alpha": alpha, "dropout": dropout})


def merged(weight: Tensor, tensors: Mapping[str, Tensor], scaling: float) -> Tensor:
    """The weight [out, in] of a plain layer that computes the same, in the order of operations of peft 0.21:
    `tensors` are lora_A, lora_B and, of DoRA, magnitude.
    """
    change = tensors["lora_B"].to(_wide(weight)) @ tensors["lora_A"].to(_wide(weight)) * scaling
    change = change.to(weight.dtype)
    if "magnitude" not in tensors:
        return weight + change
    length = nonzero(torch.linalg.norm(weight + change, dim=1).to(weight.dtype))
    factor: Tensor = (tensors["magnitude"] / length).view(-1, 1)
    return factor * (weight + change)


def row_lengths(weight: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of the L2 norms of the rows of `weight`, as `parameter` [out] is sharded: from the whole matrix,
    so they are the same bit for bit on every mesh.
    """
    lengths: Tensor = torch.linalg.norm(whole(local(weight.detach()), weight), dim=1)
    return lengths[region(parameter)]


def nonzero(length: Tensor) -> Tensor:
    """Lengths to divide by: a row of zeros stays one."""
    return length.clamp(min=torch.finfo(length.dtype).tiny)


def _wide(weight: Tensor) -> torch.dtype:
    """In which a product is computed: 16-bit ones are slow and coarse on a CPU."""
    return torch.float32 if weight.device.type == "cpu" and weight.dtype.itemsize == 2 else weight.dtype


def _become(linear: nn.Module, kind: type[LowRank], *, rank: int, scaling: float, dropout: float) -> None:
    """Change the class of a layer: its parameters and hooks stay, and so does every reference to it."""
    assert isinstance(linear, nn.Linear)
    weight = linear.weight
    sizes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
    for name in kind.added:
        setattr(linear, name, nn.Parameter(weight.new_zeros(sizes.get(name, (linear.out_features,)))))
    linear.__class__ = kind
    vars(linear).update(scaling=scaling, dropout=dropout, off=False)  # no module: styles of torch look into those


def _linears(model: nn.Module, targets: Sequence[str] | None, word: str) -> list[nn.Module]:
    """The layers to adapt, in the order of the model. Raises WordsError."""
    all_linears: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if name and type(module) is nn.Linear
    }
    if targets is None:
        inside = {id(module) for block in blocks(model) for module in block.modules()}
        chosen = [module for module in all_linears.values() if id(module) in inside]
        if not chosen:
            raise WordsError(
                f"adapter={word}: the blocks of the model have no linear layer.{near('', all_linears)} Type "
                "adapter.targets=[<patterns of names>]."
                if all_linears
                else f"adapter={word}: the model has no linear layer. Type adapter=none."
            )
        return chosen
    for pattern in targets:
        if not any(fits(name, pattern) for name in all_linears):
            raise WordsError(
                f"adapter.targets: no linear layer of the model fits {pattern}.{near(pattern, all_linears)}"
            )
    return [module for name, module in all_linears.items() if any(fits(name, each) for each in targets)]


def scaling_of(adapter: Mapping[str, Any]) -> float:
    """alpha / rank, from the facts of an adapter in a checkpoint."""
    return float(adapter["alpha"]) / int(adapter["rank"])
