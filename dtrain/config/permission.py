"""Keys that a recipe from elsewhere may set: those that say what is trained.

A row of the schema, or the file of a word, says `open`; everything else is closed, as it may say where and how
processes start, what they run, or where bytes go.

To see a refusal: `dtrain plan recipe=<URL of a recipe with launcher.options>`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from dtrain.config import files
from dtrain.config.facts import about, allowed_of
from dtrain.config.schema import GROUPS, HOLD_DATA, LISTS, ROWS, WORDS, Config, default, of_scope
from dtrain.config.trust import MADE_OF
from dtrain.config.word import typed_at

PLACE_MARKS = ("/", "\\", "~", "::")
"""Marks of a path, a URL or a name on a hub, of which a plain name has none."""


def is_open(key: str) -> bool:
    """Whether a recipe from elsewhere may set a dotted key."""
    names = of_data(key.split("."))
    row = next((name for name in (".".join(names[:2]), names[0]) if name in ROWS), None)
    if row is not None:
        return "open" in ROWS[row].metadata["scope"].split()
    group, *rest = names
    if group not in of_scope("open") or group not in GROUPS:
        return False
    if group in LISTS:
        word, *rest = rest or [""]
        return not rest or (word in files.own(group) and _is_open_argument(rest[0], _stated(group, word), group))
    stated = _stated(group)
    inner = rest[1:] if is_passed_on(key) else ()
    return not rest or (_is_open_argument(rest[0], stated, group) and all(stated.get(name, True) for name in inner))


def is_row(key: str) -> bool:
    """Whether the schema has this key, or a word of dtrain takes it."""
    names = key.split(".")
    return bool({names[0], ".".join(names[:2])} & {*ROWS, *GROUPS})


def is_default(key: str, value: Any) -> bool:
    """Whether a closed key has the value that it has without any recipe, so that setting it changes nothing."""
    group, *rest = key.split(".")
    if key in ROWS:
        return bool(value == default(key))
    if group not in GROUPS:
        return False
    if not rest:
        return bool(value == WORDS[group])
    if rest == ["_target_"]:  # which chooses a word
        return False
    missing = object()
    return any(files.node(group, word).get(".".join(rest), missing) == value for word in files.own(group))


def is_choice_of_ours(group: str, value: Any) -> bool:
    """Whether a recipe from elsewhere may choose this word of a group, or these: any in MADE_OF, whose words make what
    is trained; in the other groups those of dtrain, but no tracker, which sends what a run writes to others.
    """
    words = value if isinstance(value, list) else [value]
    return group in MADE_OF or all(
        word in files.own(group) and not about(files.node(group, word)).get("sends") for word in words
    )


def joins(key: str, value: Any) -> bool:
    """Whether a key chooses, by its word or its class, data that a running cluster reads: it is the user's, and runs
    what it is given.
    """
    names = of_data(key.split("."))
    if names not in (["data"], ["data", "_target_"]):
        return False
    nodes = {word: files.node("data", word) for word in files.own("data")}
    return any(about(node).get("joins") and value in (word, node["_target_"]) for word, node in nodes.items())


def is_passed_on(key: str) -> bool:
    """Whether the value of an open key reaches code that dtrain does not know: a part of the user's own, or the config
    of a model of others.
    """
    group, *rest = of_data(key.split("."))
    if group not in MADE_OF or not rest or rest[-1] == "_target_":
        return False
    takers = [word for word in files.own(group) if rest[0] in files.node(group, word)]
    if not takers:
        return True
    inner = [name for name in rest[1:] if not name.isdecimal()]
    kinds = [str(allowed_of(files.node(group, word), rest[0])) for word in takers]
    return bool(inner) and (group == "model" or any("part" in kind.split() for kind in kinds))


def is_plain(value: str) -> bool:
    """Whether a text is a name: no path, URL or name on a hub."""
    return not any(mark in value for mark in PLACE_MARKS)


def code_of(config: Config) -> Iterator[tuple[str, Any, str]]:
    """(key, value, source) of each word in a file that is run as a command, such as launcher.options of ssh."""
    for key, source in config.sources.items():
        group, *rest = key.split(".")
        part = getattr(config, group, None) if rest and group in GROUPS and group not in LISTS else None
        if part and source != typed_at() and rest[0] in (about(part).get("code") or ()):
            value: Any = part
            for name in rest:
                value = value.get(name) if isinstance(value, Mapping) else None
            if value not in (None, "", [], {}):
                yield key, value, source


def _is_open_argument(name: str, stated: Mapping[str, bool], group: str) -> bool:
    """Of a word of dtrain as its file says; of a part of the user's own in MADE_OF, whose class is trusted by name."""
    return stated.get(name, group in MADE_OF) or (name == "_target_")


@cache
def _stated(group: str, word: str = "") -> Mapping[str, bool]:
    """Argument of a word of dtrain, or of all words of a group -> whether every word that takes it says `open`."""
    nodes = [files.node(group, each) for each in ([word] if word else files.own(group))]
    names = dict.fromkeys(name for node in nodes for name in node if name not in ("_target_", "_about_"))
    takers = {name: [about(node) for node in nodes if name in node] for name in names}
    return {name: all(name in (facts.get("open") or ()) for facts in takers[name]) for name in names}


def of_data(names: Sequence[str]) -> list[str]:
    """The names of a key; below a key that holds words of `data`, those of the key of data."""
    names = [*names]
    for holder in HOLD_DATA:
        above = holder.split(".")
        depth = len(above) + (holder != "predict.data")
        if names[: len(above)] == above and len(names) > depth:
            names = ["data", *names[depth:]]
    while names[:2] == ["data", "of"] and len(names) > 3:
        names = ["data", *names[3:]]
    while names[:2] == ["data", "data"]:
        names = names[1:]
    return names
