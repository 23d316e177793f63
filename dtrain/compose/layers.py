"""Mappings of patterns, of which the first that fits counts: the names of a later layer, such as the command line, come
before the names of the recipes below it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.config.word import Word, spelling, text
from dtrain.errors import nearest
from dtrain.secrets import screen

PATTERNS = ("optim.lr_of", "init_names")
"""Keys of such mappings."""
REMOVABLE = ("optim.lr_of",)
"""Keys in whose mapping null removes a pattern; to others it is a value."""

DEFAULT = "default"
"""Source of what the file of a word says."""


def source_file(word: Word) -> str:
    """The source of a word, without its line."""
    return re.sub(r":\d+$", "", word.source)


def joined(words: Sequence[Word], tree: Mapping[str, Any], problems: list[str]) -> tuple[list[Word], dict[str, str]]:
    """(the words, with one for each mapping of patterns; key of each pattern -> its source). `tree`: the values of
    files, which are the lowest layer. Nulls that remove nothing are added to `problems`.
    """
    words, sources = [*words], dict[str, str]()
    for key in PATTERNS:
        parts = [word for word in words if _is_part(word, key)]
        if not parts:
            continue
        *_, last = words = [word for word in words if word not in parts] + [replace(parts[-1], key=key)]
        if isinstance(default := _at(tree, key), Mapping):
            parts = [Word(key, default, text(default), DEFAULT), *parts]
        given = entries(parts, key)
        left = {name: word for name, word in given.items() if key not in REMOVABLE or word.value is not None}
        problems += [problem for name in given.keys() - left for problem in _idle(given[name], key, parts)]
        if given or isinstance(last.value, Mapping):
            value = {name: word.value for name, word in left.items()} or None
            words[-1] = replace(last, value=value, text=text(value))
        named = {f"{key}.{name}": word.source for name, word in left.items() if word.source != DEFAULT}
        sources |= {key: last.source} | named
    return words, sources


def entries(words: Iterable[Word], key: str) -> dict[str, Word]:
    """Pattern -> a word with its own value, of all that the words give at and below `key`: the later layers first."""
    layers: list[tuple[str, dict[str, Word]]] = []
    for word in words:
        if not _is_part(word, key):
            continue
        given = {word.key.removeprefix(f"{key}."): word.value}
        if word.key == key:
            if not isinstance(word.value, Mapping):
                layers = []  # null, or the URL of a file, replaces all names
                continue
            given = dict(word.value)
        layer = source_file(word)
        if not layers or layers[-1][0] != layer:
            layers.append((layer, {}))
        layers[-1][1].update({name: replace(word, key=f"{key}.{name}", value=each) for name, each in given.items()})
    merged = dict[str, Word]()
    for _, named in reversed(layers):
        merged |= {name: word for name, word in named.items() if name not in merged}
    return merged


def parted(word: Word) -> str:
    """The sentence about a pattern with dots that was given as parts of a key; empty if there is none."""
    for key in PATTERNS:
        name = word.key.removeprefix(f"{key}.")
        if name != word.key and "." in name:
            instead = screen.typed(f"{key}={spelling({name: word.value})}")
            return f"{key} is a mapping of patterns, and {name} is one of them. Type {instead}."
    return ""


def as_typed(key: str, value: str) -> str:
    """The word that gives `key` a value as it is spelled: a pattern with dots stands in a mapping."""
    above = next((each for each in PATTERNS if key.startswith(f"{each}.")), "")
    return f"{above}={{{key.removeprefix(f'{above}.')}:{value}}}" if above else f"{key}={value}"


def is_pattern(key: str) -> bool:
    """Whether a key is that of one pattern."""
    return any(key.startswith(f"{each}.") for each in PATTERNS)


def _is_part(word: Word, key: str) -> bool:
    return word.key == key or word.key.startswith(f"{key}.")


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _idle(null: Word, key: str, parts: Sequence[Word]) -> Iterable[str]:
    """Why a null removes no pattern."""
    values = [each for word in parts for each in entries([word], key).values() if each.value is not None]
    if all(each.key != null.key for each in values):
        name, others = null.key.removeprefix(f"{key}."), {each.key.removeprefix(f"{key}.") for each in values}
        hint = nearest(name, others) if others else " Leave it out."
        yield f"{key}: {name} is null ({null.source}), which removes a pattern, and there is none of this name.{hint}"
