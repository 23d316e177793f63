"""QLoRA (arXiv 2305.14314): LoRA beside weights in 4 bits."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dtrain.adapter import Adapter, LowRank, adapt
from dtrain.adapter.lora import Lora
from dtrain.adapter.packed import Packed
from dtrain.model import blocks
from dtrain.model.adapted import adapter_of, mark


def build(*, targets: Sequence[str] | None, rank: int, alpha: float, dropout: float, double: bool) -> Adapter:
    """`targets`: patterns of names of linear layers, None: all of the blocks; `double`: the scales are in 8 bits."""
    return partial(_adapt, targets=targets, rank=rank, alpha=alpha, dropout=dropout, double=double)


@final
class QLora(LowRank, Packed):
    added: ClassVar[Sequence[str]] = ("lora_A", "lora_B")

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        out = self.product(input)
        return out if self.off else out + self.scaling * self.change(input)


def _adapt(
    model: nn.Module, *, targets: Sequence[str] | None, rank: int, alpha: float, dropout: float, double: bool
) -> None:
    """Every linear layer of the blocks is packed; a head that has an adapter stays whole, as in transformers."""
    adapt(model, Lora, word="qlora", targets=targets, rank=rank, alpha=alpha, dropout=dropout)
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    kinds: dict[type[nn.Module], type[Packed]] = {nn.Linear: Packed, Lora: QLora}
    packed = list[str]()
    for name, module in model.named_modules():
        if id(module) in inside and type(module) in kinds:
            module.__class__ = kinds[type(module)]
            assert isinstance(module, Packed)
            module.nested = double
            packed.append(f"{name}.weight")
            if not module.weight.is_meta and not isinstance(module.weight.data, FakeTensor):  # of a trace
                module.pack(module.weight)
    mark(model, {**(adapter_of(model) or {}), "double": double, "packed": packed})
