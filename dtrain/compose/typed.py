"""Typed text as words: dashes, quotes, URLs and all. For `dtrain plan --lr 1e-3`, the error shows what to type
instead.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from dtrain import secrets
from dtrain.compose.check import no_dashes, no_word, sayable, shown
from dtrain.config import grammar
from dtrain.config.word import Word, cut, quote, spelling, typed_at
from dtrain.errors import WordsError
from dtrain.secrets import screen

LONGEST = 100_000
"""A longer value, in characters, is always read as text."""
KEY = re.compile(r"[a-zA-Z_$][\w$-]*(?:\.[\w$-]+)*(?:/\w+)*", re.ASCII)

BYTES = re.compile("[\ud800-\udfff]")
"""Bytes that Python could not decode."""
SEVERAL = re.compile(r",|^\w+\(", re.ASCII)
"""A text that looks like a list of values, or a function that gives one."""


def typed(words: Sequence[str]) -> tuple[list[Word], list[str]]:
    """The words that can be read, and a sentence for each that cannot."""
    secrets.hear(words)
    read, problems, values = [], list[str](), set[int]()
    for at, text in enumerate(words):
        if at in values:
            continue
        if BYTES.search(text):
            problems.append(
                f"{cut(text.encode(errors='replace').decode())} ({typed_at()}): some bytes are no text in the encoding "
                f"of this locale, {sys.getfilesystemencoding()}. Type LC_ALL=C.UTF-8 before the command."
            )
            continue
        following = words[at + 1] if at + 1 < len(words) else None
        if (
            re.match(r"--?[a-zA-Z]", text)
            and "=" not in text
            and following
            and "=" not in following
            and not following.startswith("--")
        ):
            values.add(at + 1)  # `--flag value`
        try:
            read.append(_parse(text, following if at + 1 in values else None))
        except WordsError as error:
            problems += error.problems
    return read, problems


def unlisted(word: Word, raw: str) -> Iterable[str]:
    """Why a word of a sweep is one text, where `raw`, as it was written, looks like several values."""
    if word.value == raw and SEVERAL.search(raw):
        items = [item.strip() for item in raw.split(",") if item.strip()]
        values = "choice(a,b)" if "(" in raw else spelling(items if len(items) > 1 else [*items, "b"])[1:-1]
        several, one = screen.typed(f"{word.key}={values}"), screen.typed(f"{word.key}={quote(raw)}")
        yield f"{shown(word)} is one text. Type {several} for several values, or {one} for the text."


def _parse(text: str, following: str | None) -> Word:
    if text in ("-m", "--multirun"):
        raise WordsError(f"{text} ({typed_at()}): only train takes it.")
    if text.startswith("-"):
        raise WordsError(no_dashes(text, following))
    if text.startswith("~"):
        key = text[1:].split("=")[0]
        hint = f" Type {key}=<another word>." if key in sayable() else ""
        raise WordsError(f"{cut(text)} ({typed_at()}): a word cannot be removed with ~.{hint}")
    if "=" not in text:
        raise WordsError(no_word(text))
    key, raw = text.lstrip("+").split("=", 1)
    key = key.strip()
    if not KEY.fullmatch(key):
        raise WordsError(
            f"{cut(text)} ({typed_at()}): {f'{cut(key)!r} is not a key' if key else 'there is no key before the ='}. "
            "Words look like key=value."
        )
    try:
        values = _read(raw)
    except grammar.Unread:  # a URL with `=` or a sentence with commas: plain text
        return Word(key, raw, quote(raw), typed_at())
    return Word(key, values[0] if len(values) == 1 else None, raw, typed_at(), len(values) > 1)


def _read(raw: str) -> list[Any]:
    if raw != raw.strip() or len(raw) > LONGEST:
        raise grammar.Unread(raw)
    if grammar.FOR_HYDRA.search(raw):
        from dtrain.compose.hydra import read

        return read(raw)
    return grammar.read(raw) if raw else [""]
