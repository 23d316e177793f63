"""Checks words before anything is composed: one sentence per mistake, with its source and the words to type instead.

Here it is checked that a key exists; values are checked later, over the whole run (dtrain/resolve/values.py).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.compose import here, layers, provenance
from dtrain.config import constraints, files, grammar, meaning
from dtrain.config.elsewhere import VERBS as VERBS_ELSEWHERE
from dtrain.config.facts import SHARED, allowed_of
from dtrain.config.schema import ALLOWED, GROUPS, LISTS, NAMED
from dtrain.config.trust import reading
from dtrain.config.verbs import VERBS
from dtrain.config.word import Word, cut, typed_at
from dtrain.config.word import spelling as quoted
from dtrain.errors import WordsError, nearest
from dtrain.recipe.locate import Place
from dtrain.secrets import masked, screen
from dtrain.storage.options import is_one

HOLDERS = {
    key.split(".")[0]: [name for name in ALLOWED if name.startswith(f"{key.split('.')[0]}.")]
    for key in ALLOWED
    if "." in key
}
"""mesh, pipeline, ...: words that only hold other words."""
TOPS = (*(key for key in ALLOWED if "." not in key), *HOLDERS)
CALL = re.compile(r"\w+\(.*\)", re.DOTALL)
OPEN = ("part", "mapping", "any")
"""Types of values that are given whole, with names chosen by the user."""

MAPPINGS = tuple(f"{key}." for key in ALLOWED if "mapping" in constraints.kinds(ALLOWED[key]))
"""Beginnings of keys below which the user chooses the names."""
NAMELESS = tuple(f"{group}._target_" for group in LISTS)
"""A target without the name that parts of such a list have."""


MOST = 3
"""Words with an argument that a hint lists."""
CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


@dataclass(frozen=True)
class Vocabulary:
    """All words that a run can be given."""

    options: Mapping[str, Sequence[str]]
    """group -> its words"""
    choices: Mapping[str, Any]
    """group -> the word (or words) of this run"""
    targets: Sequence[str]
    """Keys with a `_target_` of the user's own: its signature, not our files, tells its arguments."""
    load: Callable[[str, str], dict[str, Any]]
    """(group, word) -> the arguments in its file"""
    foreign: bool = False
    """Whether some words come from the user's own folders."""
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(group, word) -> why the file of a word of the user's own cannot be used"""
    files: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    """(group, word) -> the file of a word of the user's own"""
    strangers: Sequence[str] = ()
    """Packages that the words name, and of which no words are known."""
    trusted: Sequence[str] = ()

    def node(self, group: str, name: Any) -> dict[str, Any]:
        return self.load(group, name) if name in self.options[group] else {}

    def free(self, key: str) -> bool:
        """Whether `key` is an argument of a target of the user's own."""
        return any(key.startswith(f"{target}.") for target in self.targets)

    def allowed(self, key: str) -> Any:
        """The constraint on `key`; None if only a target of the user's own knows it."""
        group, *rest = key.split(".")
        if group not in GROUPS:
            return list(self.options[NAMED[key]]) if key in NAMED else ALLOWED.get(key)
        if self.free(key) or not rest:
            return None
        word, rest = (rest[0], rest[1:]) if group in LISTS else (self.choices[group], rest)
        part = self.node(group, word)
        return allowed_of(part, rest[0]) if len(rest) == 1 and rest[0] in part else None

    def near(self, key: str, value: str) -> str:
        """A hint for a key that does not exist: by its name in other tools, then by the name of an argument, then by
        similarity.
        """
        if told := meaning.meant(key, value):
            return meaning.hint(told)
        arguments = [
            f"{group}.{name}"
            for group in GROUPS
            if group not in LISTS
            for name in self.node(group, self.choices[group])
            if name[0] != "_"
        ]
        by_leaf = [name for name in (*arguments, *ALLOWED) if name.split(".")[-1] == key]
        if "." not in key and not by_leaf and (near := _below(key, ALLOWED)):
            return f" Did you mean {meaning.valued(near, value)}?"
        fitting = [name for name in by_leaf if constraints.fits(grammar.typed(value), self.allowed(name) or "any")]
        if fitting or by_leaf:
            return meaning.hint(meaning.valued((fitting or by_leaf)[0], value))
        having = [
            f"{group}={word}" for group in GROUPS for word in self.options[group] if key in self.node(group, word)
        ]
        if having and len({word.split("=")[0] for word in having}) == 1:
            return f" {' or '.join(having[:MOST])} has {having[0].split('=')[0]}.{key}."
        return nearest(key, [*ALLOWED, *HOLDERS, *arguments] if "." in key else [*TOPS, *GROUPS, "recipe"])


def _below(key: str, names: Iterable[str]) -> str:
    """The only one of dotted names whose last part is a part of `key`, as in max_new_tokens; empty if none or several
    are.
    """
    parts = key.split("_")
    found = [name for name in names if "." in name and len(parts) > 1 and name.rpartition(".")[2] in parts]
    return found[0] if len(found) == 1 else ""


def judge(word: Word, known: Vocabulary) -> Iterable[str]:
    """One sentence per mistake in `word`."""
    label = shown(word)
    top, *rest = word.key.split(".")
    if is_one(word.key):
        return  # checked when it was passed to the storage
    if top not in GROUPS and secrets.redact_arg(str(word)) != str(word):
        yield f"{label}: {secrets.REFUSED}"
    elif top not in TOPS and top not in GROUPS:
        yield f"{label}: there is no word {cut(word.key)}.{known.near(word.key, word.text)}"
    elif word.sweep and top in LISTS and word.key == top:
        listed = cut(",".join(map(str, _several(word))))
        yield f"{label}: several of these need a list. Type {screen.typed(f'{word.key}=[{listed}]')}."
    elif word.sweep:
        yield f"{label}: several values are a sweep. Add -m, or type {_one(word, known.allowed(word.key))}."
    elif parted := layers.parted(word):
        yield f"{label}: {parted}"
    elif word.key in GROUPS:
        yield from _judge_choice(word, label, known)
    elif top in GROUPS:
        yield from _judge_argument(word, label, known, top, rest)
    elif word.key in HOLDERS:
        yield (
            f"{label}: {word.key} holds other words. Type {', '.join(f'{name}=<value>' for name in HOLDERS[word.key])}."
        )
    elif whole := next((key for key in ALLOWED if word.key.startswith(f"{key}.") and not _open(ALLOWED[key])), ""):
        yield f"{label}: {_given_whole(word, whole, ALLOWED[whole])}"
    elif word.key not in ALLOWED and not word.key.startswith(MAPPINGS):
        yield f"{label}: there is no word {cut(word.key)}.{known.near(word.key, word.text)}"


def _open(allowed: Any) -> bool:
    """Whether names may follow a key."""
    return any(kind in OPEN for kind in constraints.kinds(allowed))


def _given_whole(word: Word, key: str, allowed: Any) -> str:
    """The sentence about a word below a key that holds no other words, such as an item of a list."""
    rest = word.key.removeprefix(f"{key}.").split(".")
    instead = f"{key}=<value>"
    if rest[0].isdecimal() and any(isinstance(kind, constraints.Many) for kind in constraints.kinds(allowed)):
        item = word.value
        for name in reversed(rest[1:]):
            item = {name: item}
        instead = f"{screen.typed(f'{key}={quoted([item])}')}, with all items"
    return f"{key} holds no other words, it is {constraints.say(allowed)}. Type {instead}."


def _one(word: Word, allowed: Any) -> str:
    """The words to type for one value instead of several."""
    items, called = _several(word), CALL.fullmatch(word.text.strip()) is not None
    is_text = (
        not called
        if allowed is None
        else any(kind in ("text", "some text", "any") for kind in constraints.kinds(allowed))
    )
    if is_text and word.key not in GROUPS:
        return screen.typed(f"{word.key}='{cut(word.text)}'")
    listed = any(
        isinstance(kind, constraints.Many) and kind.holds(items) for kind in constraints.kinds(allowed or "any")
    )
    return screen.typed(f"{word.key}={quoted(items) if listed else cut(str(items[0]))}")


def _several(word: Word) -> list[Any]:
    """The values of a sweep, also those that a call such as range(0,4) produces."""
    if not CALL.fullmatch(word.text.strip()):
        return constraints.listed(word.text)
    from dtrain.compose.hydra import jobs

    try:
        return [grammar.typed(text.partition("=")[2]) for (text,) in jobs([word])]
    except (WordsError, ValueError):
        return ["<one value>"]


def shown(word: Word) -> str:
    """The word and its source, on one line and without secrets."""
    return f"{cut(secrets.redact_arg(f'{word.key}={word.text}'))} ({word.source})"


@cache
def sayable() -> tuple[str, ...]:
    """Every key that some run can take."""
    arguments = [
        f"{group}.{name}" if group not in LISTS else f"{group}.{word}.{name}"
        for group, words in files.groups().items()
        for word in words
        for name in files.node(group, word)
        if name[0] != "_"
    ]
    return tuple(dict.fromkeys([*GROUPS, *ALLOWED, "recipe", *arguments]))


def no_dashes(text: str, following: str | None) -> str:
    """The word to type for `--flag`, `--flag=value` or `--flag value`."""
    name, _, value = text.lstrip("-").partition("=")
    value = value or following or ""
    typed = f"{text} {following}" if following else text
    plain = name.replace("-", "_")
    known = plain in sayable() or is_one(plain)
    told = meaning.flag(name, value)
    if known:
        told = meaning.of_value(plain, value) or ("" if is_one(plain) else meaning.valued(plain, value))
    if not told:
        near = nearest(plain, sayable()).partition(" Did you mean ")[2].removesuffix("?")
        key = plain if known else next((key for key in sayable() if key.split(".")[-1] == plain), near)
        told = (
            screen.typed(f"{key}={cut(value) or '<value>'}") if key else "dtrain --help lists them all, as key=value."
        )
    return f"{cut(typed)} ({typed_at()}): words have no dashes.{meaning.hint(told)}"


def no_word(text: str) -> str:
    """The word to type for a word without `=`."""
    if not text.strip():
        return f"'' ({typed_at()}): an empty word. Leave it out."
    if text in VERBS:
        return f"{text} ({typed_at()}): a verb comes before all words. Type dtrain {text}, then key=value."
    if text in VERBS_ELSEWHERE:
        return f"{text} ({typed_at()}): there is no verb {text}. Type dtrain {VERBS_ELSEWHERE[text]}, then key=value."
    groups = [group for group in GROUPS if text in files.groups()[group]]
    separated = re.fullmatch(r"([\w.]+)\s*[:=]+\s*(.+)", text)
    if groups:
        hint = f" Type {groups[0]}={text if groups[0] not in LISTS else f'[{text}]'}."
    elif text in files.recipes():
        hint = f" Type recipe={text}."
    elif (key := text.rstrip(":=")) in sayable() or key in HOLDERS:
        hint = f" Type {key}{'.<name>' * (key in HOLDERS)}=<value>."
    elif separated and separated[1] in sayable():
        hint = f" Type {screen.typed(f'{separated[1]}={cut(separated[2])}')}."
    else:
        hint = nearest(text, [*VERBS, *(f"{name}=<value>" for name in (*GROUPS, *TOPS))])
    return f"{cut(text)} ({typed_at()}): neither a verb nor a word. Words look like key=value.{hint}"


def _judge_choice(word: Word, label: str, known: Vocabulary) -> Iterable[str]:
    """One sentence per mistake in the choice of a word for a group."""
    if word.value == "???":
        yield f"{word.source} leaves {word.key} to you. Type {word.key}=<{', '.join(known.options[word.key])}>."
    elif isinstance(word.value, list) and word.key not in LISTS:
        yield f"{label}: {word.key} takes one word."
    elif isinstance(word.value, dict):
        yield (
            f"{label}: {word.key} is a word, and its arguments are words too. Type {word.key}=<word> "
            f"{word.key}.<argument>=<value>."
        )
    else:
        for name in word.value if isinstance(word.value, list) else [word.value]:
            if name in known.options[word.key] or f"{word.key}.{name}" in known.targets:
                continue
            if refused := known.refused.get((word.key, str(name))):
                yield f"{label}: {refused}"
            else:
                yield (
                    f"{label}: "
                    f"{f'there is no {word.key} {cut(str(name))}' if name != '' else f'{word.key} is empty'}."
                    f"{_other(word, name, known)}"
                )


def _other(word: Word, name: Any, known: Vocabulary) -> str:
    """The hint for a word that the group does not have."""
    group = word.key
    place = word.place
    folder = here.above(place.url, group, str(name)) if place and place.trust == "local" else None
    if folder and folder.parent.name not in known.strangers:
        return f" Its file is in {folder}. Type {screen.typed(f'hydra.searchpath=[{folder}]')} too."
    if place and place.trust != "own" and known.strangers:
        return _of_a_stranger(known.strangers[0], place, known)
    if group in LISTS and str(name).lower() in constraints.NONE:
        return f" Type {group}=[]."
    if told := meaning.of_value(group, str(name)):
        return meaning.hint(told)
    if CLASS.fullmatch(str(name)):
        return f" A class or function of your own is typed {group}{'.mine' * (group in LISTS)}._target_={name}."
    own = (
        f" One of your own is typed {group}.{cut(str(name))}._target_=<package.Class>."
        if group in LISTS and str(name).isidentifier()
        else ""
    )
    return nearest(str(name), known.options[group]) + own


def _of_a_stranger(package: str, place: Place, known: Vocabulary) -> str:
    """The hint for a word of a recipe that may be of a package which is not trusted, or not here."""
    if package not in known.trusted:
        return f" It may be a word of {package}. {reading(package)}, and then type trust=[{package}] if it may run."
    whence = masked(place.url) if place.member else "<its folder, zip file or git+https:// address>"
    return f" It may be a word of {package}, which is not installed. Read its source first, then pip install {whence}."


def _judge_argument(word: Word, label: str, known: Vocabulary, group: str, rest: list[str]) -> Iterable[str]:
    """One sentence per mistake in an argument of the word chosen for a group."""
    if word.key in NAMELESS:
        yield f"{label}: a {group} has a name. Type {screen.typed(f'{group}.mine._target_={cut(word.text)}')}."
        return
    choice: Any = known.choices[group]
    names = [
        name for name in (choice if isinstance(choice, list) else [choice]) if f"{group}.{name}" not in known.targets
    ]
    if known.free(word.key) or any(name not in known.options[group] for name in names):
        return  # the user's own argument, or the choice itself is the mistake
    if group in LISTS:
        choice, *rest = rest
        if choice not in names and not (names == ["auto"] and choice in known.options[group]):
            both = ",".join([*(name for name in names if name != "auto"), choice])
            hint = (
                f" Type {group}=[{both}] as well."
                if choice in known.options[group]
                else nearest(choice, known.options[group])
            )
            yield f"{label}: {group} {cut(choice)} is not part of this run.{hint}"
            return
    path = group if group not in LISTS else f"{group}.{choice}"
    part: Any = known.node(group, choice)
    names = [name for name in part if name[0] != "_"]
    if not rest:
        yield (
            f"{label}: {path} holds other words. Type "
            f"{', '.join(f'{path}.{name}=<value>' for name in names) or f'{group}=[{choice}]'}."
        )
    elif rest[0] == "_target_" or (len(rest) == 1 and rest[0] in SHARED.get(group, ())):
        return  # replacing the target of a word is intended
    elif rest[0] not in names:
        yield f"{label}: {group}={choice} has no {cut(rest[0])}.{_instead(known, names, path, word)}"
    elif len(rest) > 1 and not isinstance(part[rest[0]], dict) and not _open(allowed_of(part, rest[0])):
        yield f"{label}: {_given_whole(word, f'{path}.{rest[0]}', allowed_of(part, rest[0]))}"


def is_moot(word: Word, known: Vocabulary) -> bool:
    """Whether a recipe leaves an argument open that the word chosen for its group does not take."""
    group, *rest = word.key.split(".")
    if word.value != "???" or word.place is None or group not in GROUPS or group in LISTS or len(rest) != 1:
        return False
    choice = known.choices[group]
    return not known.free(word.key) and choice in known.options[group] and rest[0] not in known.node(group, choice)


def _instead(known: Vocabulary, arguments: Sequence[str], path: str, word: Word) -> str:
    """A hint: the words of the group that have this argument, what it means in other tools, or a similar argument."""
    group, name = word.key.split(".")[0], word.key.removeprefix(f"{path}.").split(".")[0]
    plain = word.text if isinstance(word.value, list | dict) or word.sweep else str(word.value)
    if told := meaning.of_argument(f"{group}={known.choices[group]}", name, plain):
        return meaning.hint(told)
    near = " It takes nothing."
    if told := meaning.meant(word.key, word.text):
        near = meaning.hint(told)
    elif arguments:
        near = nearest(f"{path}.{name}", [f"{path}.{argument}" for argument in arguments])
    others = [other for other in known.options[group] if name in known.node(group, other)]
    if not others or group in LISTS or name[0] == "_":
        return near
    listed = " or ".join(f"{group}={other}" for other in others) if len(others) <= MOST else f"{group}={others[0]}"
    chosen = f" {provenance.choosing(group, others[0], word.source)}" if len(others) == 1 else ""
    return f" {listed} has it.{chosen.rstrip()}"
