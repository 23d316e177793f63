"""What a recipe may say, by the place it lies at: never what a run does to the machine of whoever runs it.

No recipe says whom to trust, where to write, with which credentials, or where words are looked for. One from elsewhere moreover reads
neither environment nor files, opens no addresses, and brings no code to what acts on the machine. See it with `dtrain plan recipe=<URL>`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.recipe.document import HIDDEN, KEY
from dtrain.recipe.place import Place
from dtrain.secrets import HERE, masked, shown
from dtrain.trust import from_elsewhere, own
from dtrain.words import Word

NEVER = ("trust", "out", "out_options", "hydra", "sweep")
"""From no recipe."""
NEVER_FROM_ELSEWHERE = re.compile(r"loop|launcher\.(address|here)|data(\.\w+)*\.cache")
"""The loop itself, addresses where others may join, folders that are written to."""
REFERENCE = re.compile(r"\$\{\s*(\w+(?:\.\w+)*)\s*\}", re.ASCII)
"""${model.width}: another key, and nothing that is run to find the value."""
NO_SMALL = ("recipe", "expect", "requires")
"""What is no word of `expect.small`."""


def refused(word: Word, place: Place) -> Iterable[str]:
    """One sentence for each thing that a recipe at this place may not say, with what a person may type instead."""
    said = HIDDEN.sub("?", masked(f"{str(word)[:200]} ({word.source})").replace("\n", "\\n"))
    top = word.key.split(".")[0]
    if top in NEVER:
        yield f"{said}: {top} cannot come from a recipe. Say it on the command line."
    if word.key == "expect.small":
        yield from _inside_small(word, place, said)
    if place.trust == "remote":
        yield from _from_elsewhere(word, place, said, top)


def _from_elsewhere(word: Word, place: Place, said: str, top: str) -> Iterable[str]:
    if NEVER_FROM_ELSEWHERE.fullmatch(word.key) and word.value is not None and word.value not in own().get(top, ()):
        yield f"{said}: {word.key} cannot come from a recipe of elsewhere. Say it on the command line."
    for key, value in _inside(word.key, word.value):
        if key.endswith("._target_") and not from_elsewhere(str(value), top):
            yield f"{said}: a recipe from elsewhere cannot bring code to {top}. Type {key}={value} trust=[{str(value).split('.')[0]}] if you mean it."
        told = f"{key}={HERE.sub('', value)}" if isinstance(value, str) else ""
        if shown(told) != told:
            yield f"{masked(said)}: a recipe from elsewhere cannot bring credentials. Put yours into the environment."
        if isinstance(value, str) and HIDDEN.search(value):
            yield f"{said}: a recipe from elsewhere cannot say what a terminal obeys instead of showing."
        if isinstance(value, str) and not _looks_up_keys_only(value, word.key):
            yield (
                f"{said}: a recipe from elsewhere may not read the environment, files or what it may not set: only other keys, as ${{model.width}}. "
                f"Type {word.key}=<value>, or copy the recipe to a local file if you trust it."
            )


def _inside_small(word: Word, place: Place, said: str) -> Iterable[str]:
    """The words of expect.small obey what those of the recipe do."""
    for small in word.value if isinstance(word.value, list) else []:
        key, equals, value = str(small).partition("=")
        if not equals or not KEY.fullmatch(key) or key.split(".")[0] in NO_SMALL:
            yield f"{said}: {small!r:.60} is no word here. Write words such as steps=50."
        else:
            yield from refused(Word(key, value, value, word.source), place)


def _inside(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    """(key, value) of everything in a value that is no list or mapping itself."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _inside(f"{key}.{name}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _inside(f"{key}.{number}", item)
    else:
        yield key, value


def _looks_up_keys_only(value: str, own_key: str) -> bool:
    """Whether nothing is looked up for a text but keys that its recipe could set; `${secret:<own key>}` asks the person."""
    if value == f"${{secret:{own_key}}}":
        return True
    keys = REFERENCE.findall(value)
    forbidden = any(key.split(".")[0] in (*NEVER, "init") or NEVER_FROM_ELSEWHERE.fullmatch(key) for key in keys)
    return len(keys) == value.count("${") and not forbidden
