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
NORMS = nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase
"""Modules whose `weight` does not decay, whatever a subclass is called or adds."""
SCALES = frozenset({"g", "gain", "gamma", "scale"})
"""Words in names of what a subclass of `MATRICES` adds, and of `weight_g` of torch.nn.utils.weight_norm."""
NORM = re.compile(r"norm(?!ed|ali[sz]ed)", re.IGNORECASE)
"""In the name of a class of norms: RMSNorm, LayerNormalization; not in NormalizedLinear."""


def decayed(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that decay, each once, in the order of `parameters`; frozen ones are among them.

    A parameter of one dim does not decay, nor one with the word `bias` in its name, nor one of a norm: the `weight` of
    `NORMS`, and what a module owns whose class has Norm in its name and whose children have no parameters. One of
    `MATRICES` does unless its name has a word of `SCALES`. Any other does if two of its dims exceed 1, so scales
    [1, 1, C] and gates [1, 1] do not.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return [each for name, each in model.named_parameters() if _decays(name, each, owners[id(each)])]


def _decays(name: str, parameter: nn.Parameter, owners: Iterable[nn.Module]) -> bool:
    words = name.rpartition(".")[2].split("_")
    if parameter.ndim < 2 or "bias" in words:
        return False
    if any(isinstance(owner, MATRICES) for owner in owners) and SCALES.isdisjoint(words):
        return True
    is_of_norm = any(_is_norm(owner) or (isinstance(owner, NORMS) and words == ["weight"]) for owner in owners)
    return not is_of_norm and sum(size > 1 for size in parameter.shape) > 1


def _is_norm(module: nn.Module) -> bool:
    return bool(NORM.search(type(module).__name__)) and not any(
        True for child in module.children() for _ in child.parameters()
    )
