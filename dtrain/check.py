"""Judges words before anything is composed: one sentence per mistake, with its source and the words to type instead."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from types import UnionType
from typing import Any, get_args, get_type_hints

from dtrain.config import GROUPS, LISTS
from dtrain.errors import nearest
from dtrain.options import NO_PASSWORD, is_one, masked
from dtrain.words import Word, text

RANGE = re.compile(r"\d+:\d+")
"""From how many nodes to how many."""


@dataclass(frozen=True)
class Vocabulary:
    """Everything that can be said."""

    schema: type
    options: Mapping[str, Sequence[str]]
    """group -> its words"""
    choices: Mapping[str, Any]
    """group -> the word (or words) of this run"""
    targets: Sequence[str]
    """Keys whose `_target_` is the user's own: their arguments are not ours to judge."""
    load: Callable[[str, str], dict[str, Any]]
    """(group, word) -> its arguments as written in its file"""

    @cached_property
    def keys(self) -> dict[str, Any]:
        """dotted key -> type, for everything outside the groups."""
        return schema_keys(self.schema)

    def node(self, group: str, name: Any) -> dict[str, Any]:
        return self.load(group, name) if name in self.options[group] else {}

    def free(self, key: str) -> bool:
        """Whether `key` is an argument of a target of the user's own."""
        return any(key.startswith(f"{target}.") for target in self.targets)

    def added(self, key: str) -> bool:
        """Whether `key` is not among what Hydra composes: an argument of the user's own target, or of a word that `auto` may pick."""
        group = key.split(".")[0]
        return self.free(key) or (group in LISTS and group != key and self.choices[group] == "auto")

    def wants_text(self, key: str) -> bool:
        """Whether a number typed for `key` is meant as text."""
        if key in self.keys:
            return str in (self.keys[key], *get_args(self.keys[key]))
        group, *rest = key.split(".")
        default: Any = self.node(group, self.choices[group]) if group in GROUPS and group not in LISTS else None
        for name in rest:
            default = default.get(name) if isinstance(default, dict) else None
        return isinstance(default, str) and default not in ("auto", "???")

    def near(self, key: str) -> str:
        """A hint for a key that does not exist: by the name of an argument, then by likeness."""
        arguments = [f"{group}.{name}" for group in GROUPS if group not in LISTS for name in self.node(group, self.choices[group]) if name[0] != "_"]
        by_leaf = [name for name in arguments if name.split(".")[-1] == key]
        if by_leaf:
            return f" Did you mean {by_leaf[0]}?"
        return nearest(key, [*self.keys, *arguments] if "." in key else [*(name for name in self.keys if "." not in name), *GROUPS, "recipe"])


def judge(word: Word, known: Vocabulary) -> Iterable[str]:
    """One sentence per mistake in `word`."""
    said = masked(f"{word} ({word.source})")
    top, *rest = word.key.split(".")
    if is_one(word.key):
        return  # judged before, when the storage was told
    if said != f"{word} ({word.source})":
        yield f"{said}: {NO_PASSWORD}"
    elif top not in known.keys and top not in GROUPS:
        yield f"{said}: there is no word {word.key}.{known.near(word.key)}"
    elif word.sweep and top in LISTS and word.key == top:
        yield f"{said}: several of them are a list. Type {word.key}=[{word.text}]."
    elif word.sweep:
        yield f"{said}: several values are a sweep. Add -m, or quote: \"{word.key}='{word.text}'\"."
    elif word.key in GROUPS:
        yield from _judge_choice(word, said, known)
    elif top in GROUPS:
        yield from _judge_argument(word, said, known, top, rest)
    elif word.key not in known.keys:
        yield f"{said}: there is no word {word.key}.{known.near(word.key)}"
    elif isinstance(known.keys[word.key], dict):
        yield f"{said}: {word.key} holds other words. Type {', '.join(f'{word.key}.{name}=<value>' for name in known.keys[word.key])}."
    elif word.key == "nodes" and not _fits(word.value, int) and not RANGE.fullmatch(str(word.value)):
        yield f"{said}: nodes is a whole number, or from how many to how many. Type nodes=2, or nodes=1:2."
    elif not _fits(word.value, known.keys[word.key]):
        kind = _kind(known.keys[word.key])
        example = f"[{word.text}]" if kind == "a list" else f"<{kind}>"
        yield f"{said}: {word.key} is {kind}, not {word.value!r}. Type {word.key}={example}."


def _judge_choice(word: Word, said: str, known: Vocabulary) -> Iterable[str]:
    """A word of a group."""
    if isinstance(word.value, list) and word.key not in LISTS:
        yield f"{said}: {word.key} takes one word."
    for name in word.value if isinstance(word.value, list) else [word.value]:
        if name not in known.options[word.key]:
            yield f"{said}: there is no {word.key} {name}.{nearest(str(name), known.options[word.key])}"


def _judge_argument(word: Word, said: str, known: Vocabulary, group: str, rest: list[str]) -> Iterable[str]:
    """An argument of the word chosen for a group."""
    choice: Any = known.choices[group]
    names = choice if isinstance(choice, list) else [choice]
    if known.free(word.key) or any(name not in known.options[group] for name in names):
        return  # not ours to judge, or the choice itself is the mistake
    if group in LISTS:
        choice, *rest = rest
        if choice not in names and not (names == ["auto"] and choice in known.options[group]):
            both = ",".join([*(name for name in names if name != "auto"), choice])
            hint = f" Type {group}=[{both}] as well." if choice in known.options[group] else nearest(choice, known.options[group])
            yield f"{said}: {group} {choice} is not part of this run.{hint}"
            return
    default: Any = known.node(group, choice)
    path = group if group not in LISTS else f"{group}.{choice}"
    if word.value is None and len(rest) == 1 and rest[0] in (default.get("_about_") or {}).get("optional", []):
        return
    for name in rest:
        if not isinstance(default, dict):
            return  # below a value that the user gives whole
        if name not in default or name == "_about_":
            yield f"{said}: {group}={choice} has no {name}.{_instead(known, group, default, path, name)}"
            return
        default, path = default[name], f"{path}.{name}"
    if default not in (None, "auto", "???") and not isinstance(default, dict) and not _fits(word.value, type(default)):
        yield f"{said}: {word.key} is {_kind(type(default))}, not {word.value!r}. Its default is {text(default)}."


def _instead(known: Vocabulary, group: str, arguments: Mapping[str, Any], path: str, name: str) -> str:
    """The near argument, or else the word of the group that has one of this name."""
    near = nearest(f"{path}.{name}", [f"{path}.{argument}" for argument in arguments if argument[0] != "_"])
    others = [other for other in known.options[group] if name in known.node(group, other)]
    return f" {group}={others[0]} has it." if others and group not in LISTS else near


def schema_keys(schema: Any, prefix: str = "") -> dict[str, Any]:
    """dotted key -> type, for everything outside the groups; a nested dataclass maps to its own fields."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        if prefix or name not in GROUPS:
            inner = schema_keys(kind, f"{prefix}{name}.") if is_dataclass(kind) else {}
            keys[prefix + name] = {key.split(".")[-1]: key for key in inner} if inner else kind
            keys |= inner
    return keys


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any or (isinstance(value, str) and value.startswith("${")):
        return True
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, getattr(kind, "__origin__", kind))


def _kind(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null", list: "a list"}
    if isinstance(kind, UnionType):
        return " or ".join(_kind(each) for each in get_args(kind))
    return names.get(getattr(kind, "__origin__", kind), "a value")
