"""Which parameters decay: weights that multiply or are looked up. Norms, biases and other vectors do not, whatever
their dims. The kind of the module that owns a parameter decides; the shape does where the module is the user's own.
"""

import re
from collections.abc import Iterable

from torch import nn

MATRICES = (
    nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase,
    nn.MultiheadAttention,
)  # fmt: skip
"""Modules whose weights decay even if all dims but one are 1, such as the head of a single output."""
NORM = re.compile(r"norm(?!ed|ali[sz]ed)", re.IGNORECASE)
"""In the name of a class of norms: RMSNorm, LayerNormalization; not in NormalizedLinear."""


def decayed(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that decay, each once, in the order of `parameters`; frozen ones are among them.

    A parameter of one dim does not decay, nor one with the word `bias` in its name, nor one of a norm: a module without
    children whose class has Norm in its name. One of `MATRICES` does. Any other does if two of its dims exceed 1, so
    scales [1, 1, C] and gates [1, 1] do not.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return [each for name, each in model.named_parameters() if _decays(name, each, owners[id(each)])]


def _decays(name: str, parameter: nn.Parameter, owners: Iterable[nn.Module]) -> bool:
    if parameter.ndim < 2 or "bias" in name.rpartition(".")[2].split("_"):
        return False
    if any(isinstance(owner, MATRICES) for owner in owners):
        return True
    return not any(map(_is_norm, owners)) and sum(size > 1 for size in parameter.shape) > 1


def _is_norm(module: nn.Module) -> bool:
    return bool(NORM.search(type(module).__name__)) and not any(module.children())
