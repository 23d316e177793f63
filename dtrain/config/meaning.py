"""Words of other tools in those of dtrain, for the command line and `dtrain import`: reads config/elsewhere.py."""

import re
from typing import Any

from dtrain.config import constraints, files, grammar
from dtrain.config.answers import BY_WORD, FLAGS, OTHER, PART, SAID
from dtrain.config.elsewhere import MEANT, OURS
from dtrain.config.facts import allowed_of
from dtrain.config.schema import ALLOWED, GROUPS, LISTS
from dtrain.config.word import cut
from dtrain.secrets import screen

KINDS = (["name"], ["type"])
"""Names of the choice of a group in its section in other tools, as in optimizer.name=adam."""
PLACE = "/"
"""In the table: every value that is a path. A `[` stands for every list."""
WEIGHTS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
FRACTION = re.compile(r"0?\.\d*[1-9]\d*")
FILLED = re.compile(r"[\w.=\['-]*\{\}'?\]?")
"""A word around the value that is filled in."""


def meant(name: str, value: str = "") -> str:
    """The meaning of a word of another tool: the words to type, or a sentence; empty if that is not known."""
    parts = name.lower().replace("-", "_").replace("/", ".").split(".")
    group = OURS.get(parts[0], parts[0])
    if group in GROUPS and parts[1:] in KINDS:
        return of_value(group, value) or valued(group, value)
    for suffix in (".".join(parts[at:]) for at in range(len(parts))):
        if said := _said(suffix, value):
            return _filled(said, value)
        if suffix in OURS:
            return of_value(OURS[suffix], value) or valued(OURS[suffix], value)
        if suffix != name and parts[0] not in GROUPS and (suffix in GROUPS or suffix in ALLOWED):
            return of_value(suffix, value) or valued(suffix, value)
    below = f"{group}.{'.'.join(parts[1:])}"
    return valued(below, value) if parts[0] in OURS and _allowed(below) is not None else ""


def of_argument(chosen: str, name: str, value: str) -> str:
    """The words for an argument that the word chosen for a group does not have; `chosen` as in `launcher=slurm`."""
    table = {each: text for names, text in BY_WORD.get(chosen, {}).items() for each in names.split()}
    if name in table:
        return _filled(table[name], value)
    return valued(name, value) if name in ALLOWED else ""


def _said(name: str, value: str) -> str:
    said = SAID.get(name, "")
    if isinstance(said, str):
        return said
    kind = PART if FRACTION.fullmatch(value) and PART in said else OTHER
    return said.get(value.lower(), said.get(kind, ""))


def of_value(key: str, value: str) -> str:
    """The meaning of a value of another tool, as words or a sentence; empty if that is not known."""
    known = MEANT.get(key, {})
    kind = PLACE if PLACE in value or value.endswith(WEIGHTS) else "[" * value.startswith("[")
    text = known.get(value.lower(), known.get(kind, ""))
    return _filled(text if not text or "=" in text or is_sentence(text) else f"{key}={text}", value)


def flag(text: str, value: str) -> str:
    """The meaning of an option with dashes, as words or a sentence; empty if that is not known."""
    name = text.lstrip("-")
    return _filled(FLAGS[name], value) if name in FLAGS else meant(name, value)


def hint(text: str) -> str:
    """` Type <words>.`, or the sentence; empty if there is neither."""
    return f" {text if is_sentence(text) else f'Type {text}.'}" if text else ""


def is_sentence(text: str) -> bool:
    return text.endswith(".")


def _filled(text: str, value: str) -> str:
    shown = cut(value) or "<value>"
    text = text.replace("[{}]", "{}") if shown.startswith("[") else text
    return FILLED.sub(lambda match: screen.typed(match[0].replace("{}", shown)), text)


def valued(key: str, value: str) -> str:
    """`key=value`, or `key=<what is allowed>` where that is not allowed."""
    allowed = _allowed(key)
    if value and (allowed is None or constraints.fits(_read(value), allowed)):
        return screen.typed(f"{key}={cut(value)}")
    return f"{key}=<{', '.join(allowed) if isinstance(allowed, list) else constraints.say(allowed or 'any')}>"


def _read(value: str) -> Any:
    try:
        return grammar.read(value)[0]
    except grammar.Unread:
        return value


def _allowed(key: str) -> Any:
    """The constraint on a key, or on an argument of the first word of its group that has it; None if it is unknown."""
    group, _, name = key.partition(".")
    if key in GROUPS:
        return list(files.groups()[key])
    if key in ALLOWED or group not in GROUPS or group in LISTS:
        return ALLOWED.get(key)
    having = (files.node(group, word) for word in files.groups()[group])
    return next((allowed_of(node, name) for node in having if name in node), None)
