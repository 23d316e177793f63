"""Parameters of a model that patterns of names (dtrain/config/patterns.py) select: frozen ones, and learning rates."""

from collections.abc import Mapping, Sequence

from torch import nn

from dtrain.config.patterns import RATES, fits, select
from dtrain.errors import WordsError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Do not train the parameters that `patterns` select. Raises WordsError for a pattern without a parameter, and if
    none is left.
    """
    named = dict(model.named_parameters())
    for name in select(named, patterns, "model.freeze", "parameter"):
        named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise WordsError(f"model.freeze=[{','.join(patterns)}]: no parameter is left to train. Leave a pattern out.")


def rates(model: nn.Module, lr_of: Mapping[str, float]) -> dict[int, float]:
    """Id of a parameter -> its learning rate, by the first pattern of `lr_of` that selects it. A pattern may select
    none of these: they may be those of one stage of a pipeline.
    """
    named = dict(model.named_parameters())
    chosen = ((name, next((rate for each, rate in lr_of.items() if fits(name, each)), None)) for name in named)
    return {id(named[name]): float(rate) for name, rate in chosen if rate is not None}


def check_rates(model: nn.Module, lr_of: Mapping[str, float]) -> None:
    """Raises WordsError if a pattern of optim.lr_of selects no trained parameter of the whole model."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    select(trained, [*lr_of], *RATES)
