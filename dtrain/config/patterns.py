"""Patterns of names, such as `blocks.*.attention.q`: which parameters or modules of a model they select.

A pattern selects a name that it fits, that ends with it after a dot, or that is inside of such a module: `q` selects
`blocks.0.attention.q` and its `weight`. `*` is any text.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from dtrain.errors import WordsError, nearest

MOST = 8
"""Names that an error lists."""
RATES = "optim.lr_of", "trained parameter"
"""`key` and `kind` of the patterns that have learning rates of their own."""


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
    heads = {name[:at] for name in short for at, letter in enumerate(name) if letter == "."}
    ends = {end for name in short for end in (name, *name.split("."))} | heads
    ends -= {"*"}
    hint = nearest(pattern, ends)
    if "Did you mean" in hint:
        return hint
    more = f" and {len(short) - MOST} more" * (len(short) > MOST)
    return f" They are {', '.join([*short][:MOST])}{more}."
