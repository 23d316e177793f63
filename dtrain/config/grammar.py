"""Parses values in the plain part of Hydra's override grammar, without Hydra.

Supported: numbers, true, false, null, text, quotes, lists, mappings, and several values separated by commas. Functions
such as range(1,4), escapes and interpolations are left to Hydra; whatever neither can parse is text.
"""

import re
from typing import Any

# as in https://github.com/facebookresearch/hydra/blob/main/hydra/grammar/OverrideLexer.g4
INT = re.compile(r"[+-]?(?:0|[1-9](?:_?\d)*)", re.ASCII)
POINT = r"(?:(?:0|[1-9](?:_?\d)*)\.|(?:0|[1-9](?:_?\d)*)?\.\d(?:_?\d)*)"
FLOAT = re.compile(rf"[+-]?(?:(?:0|[1-9](?:_?\d)*|{POINT})e[+-]?\d(?:_?\d)*|{POINT}|inf|nan)", re.ASCII | re.IGNORECASE)
PRIMITIVE = re.compile(r"[\w/\-+.%*@?|: \t]+", re.ASCII)
KEY = re.compile(r"[\w/\-+.%*@?| \t]+", re.ASCII)
QUOTED = re.compile(r"'([^'\\]*)'|\"([^\"\\]*)\"")
ITEM = re.compile(r"""(?:[^,\[\]{}'"\\]|'[^'\\]*'|"[^"\\]*"|\[[^\[\]]*\]|\{[^{}]*\})+""")
"""Of a list that holds texts alone: any letters up to a comma that is in no quotes and no brackets."""
BLANK = re.compile(r"[ \t]*")
FOR_HYDRA = re.compile(r"[($\\]")
DEEPEST = 32
NAMED = {"true": True, "false": False, "null": None}


class Unread(ValueError):
    """The text is not a value of the grammar."""


def read(text: str) -> list[Any]:
    """Parse the values in `text`, usually one, otherwise separated by commas. Raises Unread."""
    values, at = [], 0
    while True:
        value, at = _element(text, at, 0)
        values.append(value)
        at = _skip(text, at)
        if at == len(text):
            return values
        at = _skip(text, _expect(text, at, ","))


def texts(text: str) -> list[str]:
    """The items of a list that holds texts alone, which need quotes only around commas and brackets:
    `[--constraint=a100,export A=1 B='x y']`. Raises Unread.
    """
    items: list[str] = []
    at = _expect(text, 0, "[")
    while text[at:] != "]":
        at = _expect(text, at, ",") if items else at
        item = ITEM.match(text, at)
        if not item or not item[0].strip():
            raise Unread(text)
        quoted = QUOTED.fullmatch(item[0].strip())
        items.append((quoted[1] or quoted[2] or "") if quoted else item[0].strip())
        at = item.end()
    return items


def typed(text: str) -> Any:
    """The number, true, false or null that the whole text spells; otherwise the text."""
    try:
        if INT.fullmatch(text):
            return int(text)
        if FLOAT.fullmatch(text):
            return float(text)
    except ValueError:  # more digits than Python converts
        return text
    return NAMED.get(text.lower(), text) if text.isascii() else text


def _element(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > DEEPEST:
        raise Unread(text)
    first = text[at : at + 1]
    if first == "[":
        return _sequence(text, at, depth)
    if first == "{":
        return _mapping(text, at, depth)
    quoted = QUOTED.match(text, at)
    if quoted:
        return quoted[1] if quoted[2] is None else quoted[2], quoted.end()
    primitive = PRIMITIVE.match(text, at)
    if not primitive:
        raise Unread(text)
    return typed(primitive[0].strip(" \t")), primitive.end()


def _sequence(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        at = _skip(text, _expect(text, at, ",")) if items else at
        item, at = _element(text, at, depth + 1)
        items.append(item)
        at = _skip(text, at)
    return items, at + 1


def _mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        at = _skip(text, _expect(text, at, ",")) if items else at
        name, at = _name(text, at)
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        items[name], at = _element(text, at, depth + 1)
        at = _skip(text, at)
    return items, at + 1


def _name(text: str, at: int) -> tuple[str, int]:
    """A name in a mapping. In quotes, as in YAML, it may hold any letters; Hydra has no quotes there."""
    quoted = QUOTED.match(text, at)
    if quoted:
        return quoted[1] if quoted[2] is None else quoted[2], quoted.end()
    plain = KEY.match(text, at)
    if not plain:
        raise Unread(text)
    return str(typed(plain[0].strip(" \t"))), plain.end()


def _skip(text: str, at: int) -> int:
    blank = BLANK.match(text, at)
    return blank.end() if blank else at


def _expect(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise Unread(text)
    return at + 1
