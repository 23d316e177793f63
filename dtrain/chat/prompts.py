"""Prompts of a file: a text on each line, or JSON lines with `prompt` (a text) or `messages`."""

import json
from collections.abc import Sequence
from typing import Any

from dtrain.chat import turns
from dtrain.chat.template import Message
from dtrain.errors import PreflightError, StoreError, nearest
from dtrain.files.linekinds import Doubled, once
from dtrain.storage import store

Prompt = str | Sequence[Message]
JSON = (".jsonl", ".ndjson", ".json")
NAMES = ("prompt", "messages")
GIVEN = {"prompt": "a text", "messages": "a list of messages"}


def read(url: str) -> list[Prompt]:
    """The prompts, in order. Raises PreflightError, with the line, for one that is none."""
    where = f"generate.prompts={url}"
    try:
        lines = [(number, line) for number, line in enumerate(store.read(url).decode().splitlines(), 1) if line.strip()]
    except (StoreError, UnicodeDecodeError) as error:
        raise PreflightError(f"{where}: {error}") from None
    if not lines:
        raise PreflightError(f"{where}: there is no prompt in it.")
    if not url.lower().endswith(JSON):
        return [line for _, line in lines]
    return [_parsed(line, f"{where}: line {number}") for number, line in lines]


def messages_of(prompt: Prompt) -> Sequence[Message]:
    """The messages of a prompt: a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def row_of(prompt: Prompt, answer: str) -> dict[str, Any]:
    """A row of the answers' file."""
    return {"prompt" if isinstance(prompt, str) else "messages": prompt, "answer": answer}


def _parsed(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line, object_pairs_hook=once)
    except Doubled as error:
        raise PreflightError(f"{where}: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise PreflightError(f"{where}: this is no JSON: {error}.") from None
    if not isinstance(row, dict):
        raise PreflightError(f'{where}: a row is an object, such as {{"prompt": "Hello"}}.')
    name = next((name for name in NAMES if row.get(name) is not None), None)
    if name is None:
        for null in row.keys() & set(NAMES):
            raise PreflightError(f"{where}: {null} is null. Give {GIVEN[null]}.")
        near = next((hint for key in row if "Did you mean" in (hint := nearest(key, NAMES))), "")
        raise PreflightError(f"{where} has neither prompt nor messages: it has {', '.join(row) or 'nothing'}.{near}")
    if isinstance(row[name], str) and name == "prompt":
        return row[name] or _empty(where)
    if not isinstance(row[name], str | list):
        raise PreflightError(f"{where}: {name} is {row[name]!r}. Give {GIVEN[name]}.")
    try:
        (of,) = turns.conversations("messages", {"messages": row[name]})
    except turns.BadRow as error:
        raise PreflightError(f"{where}: {error.sentence}") from None
    return of.messages


def _empty(where: str) -> str:
    raise PreflightError(f"{where}: the prompt is empty.")
