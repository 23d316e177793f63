"""Valid words as one tree, as Hydra composes it: the defaults, then the choices in their places, then the values in
order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from dtrain.compose import layers
from dtrain.compose.check import NAMELESS, Vocabulary
from dtrain.compose.here import Own, folders, own_words, place, strangers, trusted
from dtrain.compose.provenance import leaves
from dtrain.config import files
from dtrain.config.constraints import is_of_texts, wants_text
from dtrain.config.facts import about
from dtrain.config.grammar import Unread, texts
from dtrain.config.schema import GROUPS, LISTS, NAMED, WORDS, Config, Schema
from dtrain.config.schema import defaults as schema_defaults
from dtrain.config.word import Word, quote, text
from dtrain.errors import WordsError
from dtrain.storage import options


def vocabulary_of(searchpath: Sequence[str], words: Sequence[Word]) -> Vocabulary:
    """The vocabulary, given the words so far: options of every group, the choices made, targets of the user's own."""
    options, node, own = files.groups(), files.node, Own({}, {})
    if searchpath:
        from dtrain.compose.hydra import Shelf

        shelf = Shelf(searchpath)
        node = shelf.node
        own = own_words(folders(searchpath))
        options = {
            group: [word for word in words if (group, word) not in own.refused or word in options[group]]
            for group, words in shelf.words.items()
        }
    choices = dict(WORDS) | {word.key: word.value for word in words if word.key in GROUPS}
    targets = tuple(
        word.key.removesuffix("._target_")
        for word in words
        if word.key.endswith("._target_")
        and word.key not in NAMELESS
        and word.value != _own_target(word.key, choices, options, node)
    )
    return Vocabulary(
        options=options,
        choices=choices,
        targets=targets,
        load=node,
        foreign=bool(searchpath),
        refused=own.refused,
        files=own.files,
        strangers=strangers(words),
        trusted=trusted(words),
    )


def _own_target(
    key: str, choices: Mapping[str, Any], options: Mapping[str, Sequence[str]], node: Callable[[str, str], files.Node]
) -> Any:
    """The default of `key` in conf/."""
    group, *rest = key.split(".")
    if group not in GROUPS or (group in LISTS and len(rest) < 2):
        return None
    word, rest = (rest[0], rest[1:]) if group in LISTS else (choices[group], rest)
    value: Any = node(group, word) if isinstance(word, str) and word in options[group] else {}
    for name in rest:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def config_of(words: Sequence[Word], vocabulary: Vocabulary, problems: list[str]) -> Config:
    """The composition of valid words; mistakes in their references are added to `problems`."""
    sources = {word.key: word.source for word in words}
    words = [_as_meant(word, vocabulary) for word in words if not options.is_one(word.key)]
    replaced = [group for group in GROUPS if group in vocabulary.targets]
    if vocabulary.foreign:
        from dtrain.compose.hydra import composed

        chosen = [_of_files(word, vocabulary) for word in words if word.key in GROUPS]
        tree = composed(chosen, replaced, vocabulary.files)
        if wrong := [*_misshapen(tree, replaced, vocabulary)]:
            raise WordsError(*wrong)
    else:
        tree = _composed(replaced, vocabulary)
    words, patterns = layers.joined(words, tree, problems)
    tree = _with_values(tree, words)
    filed = [*_filed(tree, words, vocabulary)] if vocabulary.foreign else []
    late = [word for word in words if "${" in word.text] + filed
    if late:
        from dtrain.compose.hydra import resolved

        words_of = {group: word for group, word in vocabulary.choices.items() if group not in replaced}
        problems += resolved(tree, late, vocabulary.allowed, words_of)
    types = _types()
    config = Config(**{key: types[key](**value) if is_dataclass(types[key]) else value for key, value in tree.items()})
    named = {word.key for word in words}
    for group in replaced:  # if its word was given too, a target of the user's own keeps the facts of that word
        facts = about(vocabulary.node(group, vocabulary.choices[group])) if group in named else {}
        getattr(config, group)["_about_"] = {name: value for name, value in facts.items() if name != "arithmetic"}
    config.choices = {group: None if group in replaced else vocabulary.choices[group] for group in GROUPS}
    config.sources = sources | patterns
    config.numbers = {word.key: word.text for word in words if type(word.value) in (int, float)}
    config.unresolved = {word.key: word.value for word in filed if "${oc.env" in word.text}
    config.options = {
        group: {name: vocabulary.node(group, name) for name in vocabulary.options[group]}
        for group in GROUPS
        if vocabulary.choices[group] == "auto"
    }
    for key, group in NAMED.items():
        word = tree[group][key.split(".")[1]]
        config.options[group] = {word: vocabulary.node(group, word)} if word in vocabulary.options[group] else {}
    return config


def _misshapen(tree: files.Node, replaced: Sequence[str], vocabulary: Vocabulary) -> Iterator[str]:
    """Mistakes in the files of the chosen words."""
    for group in GROUPS:
        choice = vocabulary.choices[group]
        for name in choice if isinstance(choice, list) else [choice]:
            if name == "auto" or name not in vocabulary.options[group] or group in replaced:
                continue
            if group in LISTS and name not in tree[group]:
                yield f"{group}={name}: its file has to begin with this line: # @package {group}.{name}"
            elif "_target_" not in (tree[group][name] if group in LISTS else tree[group]):
                yield f"{group}={name}: its file says no class. Write _target_: <package.Class> into it."


def _as_meant(word: Word, vocabulary: Vocabulary) -> Word:
    """A number typed for a text becomes that text, and what is no plain list becomes one where texts are listed."""
    allowed, value = vocabulary.allowed(word.key), word.value
    if isinstance(value, str) and "${" not in value and allowed is not None and is_of_texts(allowed):
        with suppress(Unread):
            return replace(word, value=(items := texts(value)), text=text(items))
        return word
    if (
        allowed is None
        or isinstance(value, bool)
        or not isinstance(value, int | float)
        or not wants_text(value, allowed)
    ):
        return word
    return replace(word, value=word.text, text=quote(word.text))


def _composed(replaced: Sequence[str], vocabulary: Vocabulary) -> files.Node:
    """The tree as Hydra composes it: the defaults, then the choices in their places."""
    tree = schema_defaults()
    for group in GROUPS:
        choice = vocabulary.choices[group]
        names = [
            name
            for name in (choice if isinstance(choice, list) else [choice])
            if name != "auto" and name in vocabulary.options[group]
        ]
        nodes = {name: vocabulary.node(group, name) for name in names} if group not in replaced else {}
        tree[group] = nodes if group in LISTS else next(iter(nodes.values()), {})
    return tree


def _with_values(tree: files.Node, words: Sequence[Word]) -> files.Node:
    """The tree, and in it the values of the words in their order, as Hydra's `++key=value`."""
    for word in words:
        if word.key not in GROUPS:
            *path, name = word.key.split(".")
            holder = tree
            for part in path:
                if not isinstance(holder.get(part), dict):
                    holder[part] = {}
                holder = holder[part]
            value = files.copied(word.value)
            holder[name] = value if word.key in layers.PATTERNS else _merged(holder.get(name), value)
    return {key: _converted(key, value) for key, value in tree.items()}


def _filed(tree: Mapping[str, Any], words: Sequence[Word], vocabulary: Vocabulary) -> Iterator[Word]:
    """References `${...}` in the user's own files that no word overrides."""
    named = {word.key for word in words}
    for group in GROUPS:
        for key, value in leaves(tree.get(group), group):
            if "${" in str(value) and not any(key == word or key.startswith(f"{word}.") for word in named - {group}):
                names = key.split(".")[1:]
                name, names = (names[0], names[1:]) if group in LISTS else (vocabulary.choices[group], names)
                path = vocabulary.files.get((group, name))
                yield Word(key, value, text(value), place(path, names) if path else f"{group}={name}")


def _of_files(word: Word, vocabulary: Vocabulary) -> Word:
    """The word without those parts of a list that have no file: their `_target_` defines them."""
    names = word.value if isinstance(word.value, list) else [word.value]
    if word.key not in LISTS or all(name in vocabulary.options[word.key] for name in names):
        return word
    names = [name for name in names if name in vocabulary.options[word.key]]
    return replace(word, value=names, text=f"[{','.join(names)}]")


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


def _converted(key: str, value: Any) -> Any:
    """Whole numbers become floats where the schema has floats."""
    kind = _types().get(key)
    if is_dataclass(kind) and isinstance(value, dict):
        fields = _types(kind if isinstance(kind, type) else type(kind))
        return {
            name: float(item) if _is_fraction(fields.get(name)) and type(item) is int else item
            for name, item in value.items()
        }
    if kind == list[str] and isinstance(value, list):
        return [item if isinstance(item, dict | list) else str(item) for item in value]
    return float(value) if _is_fraction(kind) and type(value) is int and abs(value) < 2**63 else value


def _is_fraction(kind: Any) -> bool:
    return kind is float or float in get_args(kind)


@cache
def _types(of: Any = Schema) -> Mapping[str, Any]:
    return get_type_hints(of)
