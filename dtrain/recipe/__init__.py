"""Recipes: words in a YAML file. Reading one gives words; every run writes one: `dtrain plan recipe=<out>/config.yaml`.

A recipe may come from anywhere: `dtrain.recipe.locate` decides how far its place is trusted, `dtrain.recipe.policy`
which words it may then contain.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import yaml

from dtrain.config.constraints import kinds
from dtrain.config.files import folder
from dtrain.config.moved import current
from dtrain.config.permission import of_data
from dtrain.config.schema import ALLOWED, GROUPS, HOLD_DATA, LISTS, Config, Schema, of_scope
from dtrain.config.trust import MADE_OF
from dtrain.config.word import Word, text
from dtrain.errors import StoreError, WordsError
from dtrain.recipe.document import FLOAT, HIDDEN, INTEGER, KEY, OVERRIDE, Node, Slip, no_key, parse, scalar
from dtrain.recipe.locate import Place, check, fetch, find
from dtrain.recipe.policy import SPACE, is_idle, refused
from dtrain.secrets import HERE, masked
from dtrain.storage import store

__all__ = ["folder", "is_overridden", "of_run", "read", "write"]

NOT_WRITTEN = (*of_scope("typed"), "expect", "sweep")
"""Keys that are not written to config.yaml. Expectations of a recipe need not hold for a run with other words."""
OF_FIGURES = ("checkpoint.best", "checkpoint.best_is", "stop.metric", "stop.patience", "stop.least", "stop.best_is")
"""Keys that may name the figure of a hook, which nobody needs to read a run."""
DEEPEST, MOST = 8, 32
"""Limits: levels of recipes that build on each other, and recipes in total."""


def read(name: str, *, overridden: Collection[str] = ()) -> list[Word]:
    """The words of a recipe: a built-in one by its name, or one at a path or URL. Raises WordsError with every mistake.

    Keys that are `overridden` on the command line come from there; the recipe's values for them are not checked.
    """
    problems = list[str]()
    words = _read(find(name), [], [], problems, time.monotonic() + store.ANSWER_SECONDS)
    problems += [
        problem for word in words if not is_overridden(word.key, overridden) for problem in refused(word, word.place)
    ]
    if problems:
        raise WordsError(*problems)
    return words


def of_run(run: str, *, overridden: Collection[str] = ()) -> list[Word]:
    """The words of the run at URL `run`; of a remote run, without those that a remote recipe may not set.

    Raises WordsError if that would change its model or data: a person must type these words.
    """
    problems = list[str]()
    words = _read(find(f"{run.rstrip('/')}/config.yaml"), [], [], problems, time.monotonic() + store.ANSWER_SECONDS)
    kept, lacks_hook = list[Word](), False
    for word in words:
        wrong = list(refused(word, word.place))
        lacks_hook |= bool(wrong) and word.key.startswith("hook.")
        if not wrong:
            kept.append(word)
        elif (
            word.key.split(".")[0] in MADE_OF
            and word.key.split(".")[-1] != "cache"
            and not is_overridden(word.key, overridden)
        ):
            problems += wrong
    if problems:
        raise WordsError(*problems)
    return [word for word in kept if not (lacks_hook and word.key in OF_FIGURES)]


def is_overridden(key: str, overridden: Collection[str]) -> bool:
    """Whether the command line gives this key, or the word of its group."""
    key = key.removeprefix(SPACE)
    return key in overridden or key.split(".")[0] in overridden


def _read(place: Place, chain: Sequence[Place], seen: list[Place], problems: list[str], until: float) -> list[Word]:
    """The words of the recipes that a recipe builds on, then its own. Raises WordsError if it cannot be read.

    `until` is the deadline (monotonic time) for all of them together.
    """
    check(place, chain)
    seen.append(place)
    if len(chain) >= DEEPEST or len(seen) > MOST:
        raise WordsError(
            f"{chain[-1]}: at most {DEEPEST} recipes may build on each other, {MOST} in all. Merge some of them into "
            "one file."
        )
    left = until - time.monotonic()
    if place.trust == "remote" and left <= 0:
        raise WordsError(
            f"recipe={place}: was not read: the recipes before it took {store.ANSWER_SECONDS:g} s, the limit for all."
        )
    try:
        data = fetch(place, seconds=left)
        document = parse(data).value
    except StoreError as error:
        raise WordsError(f"recipe={place}: {error}") from error
    except Slip as slip:
        column = f":{slip.column}" if slip.column else ""
        raise WordsError(f"{place}:{slip.line}{column}: {slip}") from slip
    if not isinstance(document, dict):
        raise WordsError(f"{place}:1: not a recipe: it must be a mapping of words to values.")
    problems += _package(data, place)
    below = list[Word]()
    for name in _names(document.get("recipe"), place, problems):
        try:
            below += _read(find(name, place), [*chain, place], seen, problems, until)
        except WordsError as error:
            problems += [
                problem if str(place) in problem else f"{problem} ({place} builds on it)" for problem in error.problems
            ]
    own = [replace(word, place=place) for word in _words(document, place, problems)]
    return below + [word for word in own if not is_idle(word)]


def _package(data: bytes, place: Place) -> Iterable[str]:
    match = re.search(rb"^#\s*@package\s+(\S+)", data, re.MULTILINE)
    if match and match[1] != b"_global_":
        yield (
            f"{place}: # @package {match[1].decode(errors='replace')[:60]} is not supported. Remove the line, and "
            "write full keys such as model.width."
        )


def _names(node: Node | None, place: Place, problems: list[str]) -> Iterable[str]:
    """The names of the recipes that a recipe builds on."""
    names: list[Any] = []
    if node is not None:
        names = node.plain() if isinstance(node.value, list) else [node.value]
    for name in names:
        if isinstance(name, str) and name:
            yield name
        else:
            problems.append(
                f"{place}:{node.line if node else 1}: recipe names other recipes. Write recipe: base.yaml, or recipe: "
                "[a.yaml, b.yaml]."
            )


def _words(document: Mapping[str, Node], place: Place, problems: list[str]) -> Iterable[Word]:
    """The words of one document: choices first, then `_target_`s, then arguments, because a choice drops the arguments
    of the previous one.
    """
    chosen = list(_defaults(document.get("defaults"), place, problems))
    rest = list[Word]()
    for key, node in document.items():
        if key in GROUPS and isinstance(node.value, str | list):
            chosen.append(Word(key, node.plain(), _choice(node.plain()), f"{place}:{node.line}"))
        elif key in GROUPS and node.value is None:
            problems.append(f"{place}:{node.line}: {key} is empty. Remove it, or write {key}: <word>.")
        elif key not in ("defaults", "recipe") and node.value != {}:
            rest += _leaves(key, node, place, problems)
    sources: dict[str, str] = {}
    for word in (*chosen, *sorted(rest, key=_order)):
        if word.key in sources:
            problems.append(f"{word.source}: {word.key} is already set in {sources[word.key]}.")
        sources[word.key] = word.source
        yield word


def _order(word: Word) -> int:
    """A key that is swept comes after its own single value."""
    if word.key.startswith(SPACE):
        return 1001
    return word.key.count(".") if word.key.endswith("._target_") else 1000


def _defaults(node: Node | None, place: Place, problems: list[str]) -> Iterable[Word]:
    """The choices in a Hydra defaults list."""
    entries: list[Any] = []
    if node is not None and node.value is not None:
        entries = node.value if isinstance(node.value, list) else [node]
    for entry in entries:
        pairs = list(entry.value.items()) if isinstance(entry.value, dict) else []
        match = OVERRIDE.fullmatch(pairs[0][0]) if len(pairs) == 1 else None
        if match:
            choice = pairs[0][1].plain()
            yield Word(match[1], choice, _choice(choice), f"{place}:{entry.line}")
        elif entry.value != "_self_":
            problems.append(
                f"{place}:{entry.line}: defaults: {str(entry.plain())[:60]!r} is not understood. Write `- override "
                "/model: gpt`."
            )


def _leaves(key: str, node: Node, place: Place, problems: list[str]) -> Iterable[Word]:
    """A word for every value below a key."""
    if isinstance(node.value, dict) and node.value and not _is_one_value(key, node.plain()):
        for name, inner in node.value.items():
            yield from _leaves(f"{key}.{name}", inner, place, problems)
        return
    problems += [
        f"{place}:{node.line}: {key}: {name} is not an argument. A part has _target_ and its arguments."
        for name in _private(key, node)
    ]
    if not KEY.fullmatch(key):
        why = f"{key!r:.60} belongs in a defaults list." if "override /" in key else no_key(key)
        problems.append(f"{place}:{node.line}: {why}")
        return
    name = key.rpartition(".")[2]
    value = current({name: node.plain()})[name]
    as_written = INTEGER.fullmatch(node.raw) or FLOAT.fullmatch(node.raw)
    yield Word(key, value, node.raw if as_written else text(value), f"{place}:{node.line}")


def _is_one_value(key: str, mapping: Mapping[Any, Any]) -> bool:
    """Whether the mapping at a key is one value, as its names cannot be parts of a key: patterns of names, names with
    dots. Parts, and mappings of words, are several.
    """
    top, *rest = of_data(key.split("."))
    if top in GROUPS:
        named = len(rest) > (top in LISTS) and not (top == "data" and rest[0] == "of")
    else:
        named = key in ALLOWED and "mapping" in kinds(ALLOWED[key]) and key not in (*HOLD_DATA, SPACE.rstrip("."))
    return (
        named and not _holds_part(mapping) and any("." in name or not KEY.fullmatch(name) for name in map(str, mapping))
    )


def _holds_part(value: Any) -> bool:
    """Whether there is a part in a mapping, at any depth."""
    return isinstance(value, Mapping) and ("_target_" in value or any(map(_holds_part, value.values())))


def _private(key: str, node: Node) -> Iterable[str]:
    """Names in a key, and below it, that are reserved for Hydra or Python."""
    yield from (name for name in key.split(".") if name.startswith("_") and name != "_target_")
    below = node.value.items() if isinstance(node.value, dict) else []
    if isinstance(node.value, list):
        below = [("", item) for item in node.value]
    for name, inner in below:
        yield from _private(name, inner)


def _choice(word: Any) -> str:
    return "[" + ",".join(map(str, word)) + "]" if isinstance(word, list) else str(word)


def write(config: Config) -> str:
    """config.yaml: the requested config as a recipe, with the source of every value that is not a default."""
    lines = ["# @package _global_", "# the requested config; recipe=<this file> runs it again"]
    if config.trust:
        lines.append(f"# needs trust={text(list(config.trust))}")
    storage_options = [key for key in config.sources if key.split(".")[0] == "out_options"]
    if storage_options:
        lines.append(f"# needs {' '.join(f'{key}=<not written>' for key in storage_options)}")
    lines.append("defaults:")
    lines += [
        f"  - override /{group}: {_flow(word)}{_source(config, group)}"
        for group, word in config.choices.items()
        if word is not None
    ]
    for field in fields(Schema):
        if field.name not in NOT_WRITTEN:
            value = getattr(config, field.name)
            lines += _yaml_lines(field.name, vars(value) if is_dataclass(value) else value, config, "", field.name)
    return "\n".join(lines) + "\n"


class _AsTyped(str):
    """A value with an interpolation, as it was typed, so that a new run resolves it again."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML that `dtrain.recipe.document` reads back as the same values."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    try:
        plain = scalar(value) == value and KEY.fullmatch(value)
    except ValueError:
        plain = None
    if not isinstance(value, _AsTyped) and not HERE.fullmatch(value):
        value = value.replace("${", "\\${")  # a resolved value is not an interpolation
    quotes = '"' if "\n" in value else "'"
    style = None if plain else quotes
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", str(value), style=style)
    return node


_Dumper.add_representer(str, _text)
_Dumper.add_representer(_AsTyped, _text)


def _flow(value: Any) -> str:
    return _scalar_flow(value) if isinstance(value, str | int | None) else _any_flow(value)


@lru_cache(4096, typed=True)
def _scalar_flow(value: str | int | None) -> str:
    """The jobs of a sweep have most values in common."""
    return _any_flow(value)


def _any_flow(value: Any) -> str:
    def dumped(*, unicode: bool) -> str:
        return (
            yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=unicode, width=10**9)
            .removesuffix("\n")
            .removesuffix("\n...")
        )

    readable = dumped(unicode=True)
    return dumped(unicode=False) if HIDDEN.search(readable) else readable


def _yaml_lines(name: str, value: Any, config: Config, indent: str, key: str) -> Iterable[str]:
    if isinstance(value, dict) and not _is_one_value(key, value):
        inner = [
            line
            for part, item in value.items()
            if part != "_about_"
            for line in _yaml_lines(str(part), item, config, indent + "  ", f"{key}.{part}")
        ]
        if inner:
            yield f"{indent}{name}:"
            yield from inner
    else:
        yield f"{indent}{name}: {_flow(_as_asked(value, config, key))}{_source(config, key)}"


def _as_asked(value: Any, config: Config, key: str) -> Any:
    """The value at a key, with references to the environment as they were typed."""
    if isinstance(value, dict):
        return {name: _as_asked(item, config, f"{key}.{name}") for name, item in value.items()}
    return _as_typed(config.unresolved[key]) if key in config.unresolved else value


def _source(config: Config, key: str) -> str:
    return f"  # {masked(config.sources[key])}" if key in config.sources else ""


def _as_typed(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_typed(item) for item in value]
    return _AsTyped(value) if isinstance(value, str) else value
