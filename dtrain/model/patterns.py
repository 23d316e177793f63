"""Patterns of names, such as `blocks.*.attention.q`: which parameters or modules of a model they select.

A pattern selects a name that it fits, that ends with it after a dot, or that is inside of such a module: `q` selects
`blocks.0.attention.q` and its `weight`. `*` is any text.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from dtrain.errors import WordsError, nearest

MOST = 8
"""Names that an error lists."""


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern selects the name."""
    parts = name.split(".")
    heads = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(head, pattern) or fnmatchcase(head, f"*.{pattern}") for head in heads)


def select(names: Collection[str], patterns: Sequence[str], key: str, kind: str) -> dict[str, str]:
    """Name -> the first of `patterns` that selects it, in the order of `names`. `key` holds the patterns and `kind`
    says what the names are of, for the WordsError that a pattern without a name raises.
    """
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            raise WordsError(f"{key}: no {kind} of the model fits {pattern}.{near(pattern, names)}")
    chosen = ((name, next((each for each in patterns if fits(name, each)), None)) for name in names)
    return {name: pattern for name, pattern in chosen if pattern is not None}


def near(pattern: str, names: Iterable[str]) -> str:
    """A hint: the names that differ in their numbers alone count once."""
    short = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names)
    ends = {end for name in short for end in (name, *name.split("."))} - {"*"}
    hint = nearest(pattern, ends)
    if "Did you mean" in hint:
        return hint
    more = f" and {len(short) - MOST} more" * (len(short) > MOST)
    return f" They are {', '.join([*short][:MOST])}{more}."


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
    select(trained, [*lr_of], "optim.lr_of", "trained parameter")
