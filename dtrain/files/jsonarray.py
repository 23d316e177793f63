"""A file that is one JSON array of objects, whose elements are rows: found by their places, as lines are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.files.linekinds import Torn

BEGIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?=\{)")
SPACE = re.compile(r"[ \t\r\n]*")
MOST = 1 << 31
"""Bytes of the largest array, which is read whole when its index is made."""


class Broken(Torn):
    """The array is no JSON from byte `at` on."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.at = at


def is_array(beginning: bytes) -> bool:
    """Whether a file is an array of objects, by how it begins."""
    return BEGIN.match(beginning) is not None


def first(beginning: bytes) -> bytes | None:
    """The first element of an array, if it is whole."""
    match = BEGIN.match(beginning)
    assert match is not None
    try:
        _, end = json.JSONDecoder().raw_decode(beginning.decode("latin-1"), match.end())
    except ValueError:
        return None
    return beginning[match.end() : end]


def elements(file: Path, digest: Any) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each element; all bytes of the file are added to `digest`. Raises Broken."""
    if file.stat().st_size > MOST:
        raise Broken("the array is too large to be read whole. Write a line for each object", 0)
    data = file.read_bytes()
    digest.update(data)
    # a character for each byte: what has a meaning in JSON, outside of texts, is one byte in UTF-8
    text, scan = data.decode("latin-1"), json.JSONDecoder().raw_decode
    match = BEGIN.match(data)
    at = match.end() if match else 0
    while True:
        try:
            _, end = scan(text, at)
        except (ValueError, RecursionError) as error:
            raise Broken(f"the array is torn or no JSON: {str(error).partition(':')[0]}", at) from None
        yield at, data[at:end]
        at = _after(text, end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise Broken("the array is torn or no JSON: a comma or ] is missing", end)
        at = _after(text, at + 1)
    if _after(text, at + 1) != len(text):
        raise Broken("something follows the end of the array", at + 1)


def _after(text: str, at: int) -> int:
    """The place behind white space."""
    space = SPACE.match(text, at)
    return space.end() if space else at
