"""A word: `key=value` with its source; and values written in Hydra's grammar."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dtrain import secrets
from dtrain.config.grammar import KEY, typed

_typed_at = ContextVar("typed_at", default="command line")


def typed_at() -> str:
    """The source of words that are in no file: the command line, or the call of a function of `dtrain`."""
    return _typed_at.get()


CALL = "the call"
"""Source of the words of `dtrain.run(...)`."""


@contextmanager
def in_a_call() -> Iterator[None]:
    """A context in which words that are in no file are those of a call."""
    token = _typed_at.set(CALL)
    try:
        yield
    finally:
        _typed_at.reset(token)


@dataclass(frozen=True)
class Word:
    """`key=value` and its source. `text` is the value in Hydra's grammar."""

    key: str
    value: Any
    text: str
    source: str
    sweep: bool = False
    place: Any = None
    """The `dtrain.recipe.locate.Place` it was read from; None if the user typed it."""

    def __str__(self) -> str:
        return f"{self.key}={self.text}"


def quote(text: str) -> str:
    """Quote `text`; backslashes are doubled only before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def text(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(text(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_name(key)}:{text(item)}" for key, item in value.items()) + "}"
    return quote(value) if isinstance(value, str) else str(value)


def _name(key: Any) -> str:
    """A name in a mapping, with quotes only where they are needed."""
    name = str(key)
    is_plain = KEY.fullmatch(name) and name == name.strip() and str(typed(name)) == name
    return name if is_plain else quote(name)


def spelling(value: Any) -> str:
    """The spelling of a value on the command line, with quotes only where they are needed."""
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_item, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_name(key)}:{_item(item)}" for key, item in value.items()) + "}"
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w./:+@%-]+", value) and typed(value) == value
    return value if is_plain else text(value)


def _item(value: Any) -> str:
    """The spelling of a value among others, where the grammar has no other plain letters than those of ASCII."""
    return text(value) if isinstance(value, str) and not value.isascii() else spelling(value)


def cut(text: str, most: int = 120) -> str:
    """`text` for one line of a message: secrets redacted, escaped, at most `most` characters."""
    text = secrets.redact_suspect(text)
    plain = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return plain if len(plain) <= most else f"{plain[: most - 20]}... ({len(text)} characters)"


def slug(words: Iterable[str]) -> str:
    """A folder name without `=` and separators; a digest is appended if the text had to be changed or cut."""
    plain = "_".join(words)
    name = re.sub(r"[^\w.+-]+", "-", plain).strip("-.") or "job"
    if len(name) <= 80 and name == plain:
        return name
    return f"{name[:64]}-{hashlib.sha256(plain.encode()).hexdigest()[:10]}"
