"""Parser for recipes: YAML -> values with their lines, or one error with its line: `dtrain plan recipe=mine.yaml`.

The only types are mapping, list, text, number, true, false and null. Values that aliases repeat are counted before they
are expanded. Plain values follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), not YAML
1.1, in which `no` is false, `1:30` is ninety and `1e-3` is a text; a number that the two read differently is refused.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

DEEPEST, MOST, LONGEST, LONGEST_KEY = 20, 10_000, 20_000, 200
"""Limits: levels, values including repetitions by aliases, characters of a text, characters of a key."""
LONGEST_NUMBER = 40
PLAIN = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
OTHER_BASE = re.compile(r"0(x[0-9a-fA-F]+|o[0-7]+|b[01]+)")
ENDLESS = re.compile(r"[-+]?\.(inf|Inf|INF|nan|NaN|NAN)")
TWO_WAYS = re.compile(r"[-+]?0[0-9_]+")
KEY = re.compile(r"[A-Za-z0-9_][\w+-]*(\.[A-Za-z0-9_][\w+-]*)*", re.ASCII)
NAME = re.compile(r"[\w.*?!|/:@%+\[\] -]+", re.ASCII)
"""A name in a mapping that is one value, such as a pattern of names of tensors."""
OVERRIDE = re.compile(r"(?:override )?/(\w+)", re.ASCII)
"""A group in a defaults list, as Hydra writes it."""
HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that control a terminal instead of being shown: control characters, and bidirectional overrides."""
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Slip(Exception):
    """A mistake in a document. Line and column count from 1; column 0 means the whole line."""

    def __init__(self, sentence: str, line: int, column: int = 0) -> None:
        self.line, self.column = line, column
        super().__init__(sentence)


@dataclass(frozen=True)
class Node:
    """A value, and the line on which it, or its key, begins. `value` holds Nodes when it is a list or a dict."""

    value: Any
    line: int
    raw: str = ""
    """Source text of a number."""
    size: int = 1
    """Number of values in it, including every repetition by an alias."""

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value


@dataclass
class _Open:
    """A list or mapping whose end has not been read. In a mapping, keys and values alternate."""

    mapping: bool
    line: int
    anchor: str | None
    items: list[Node] = field(default_factory=list)


def parse(data: bytes) -> Node:
    """The document in `data`. Raises Slip."""
    text = _text(data)
    try:
        return _build(yaml.parse(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        here = text.splitlines()[line - 1] if line <= len(text.splitlines()) else ""
        if "\t" in here[: column + 1]:
            raise Slip("a tab: YAML is indented with blanks.", line, column) from error
        if "nesting depth" in (error.problem or ""):  # of PyYAML 6.0.4, which has a limit of its own
            raise Slip(f"more than {DEEPEST} levels.", line) from error
        raise Slip(
            f"not YAML: {error.problem or 'broken'}. Look at the indentation, colons and brackets there.", line, column
        ) from error
    except yaml.YAMLError as error:
        raise Slip(f"not YAML: {error}.", 1) from error


def scalar(raw: str) -> Any:
    """The value of a plain scalar. Raises ValueError for a number that is too long, or that two versions of YAML read
    differently.
    """
    if raw in PLAIN:
        return PLAIN[raw]
    number = next((kind for kind in (TWO_WAYS, INTEGER, FLOAT, OTHER_BASE, ENDLESS) if kind.fullmatch(raw)), None)
    if number is None:
        return raw
    if len(raw) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(raw)} characters. Write it shorter, or in quotes when it is a name.")
    if number is TWO_WAYS:
        raise ValueError(
            f"{raw} is another number in YAML 1.1 than in 1.2. Write {raw.replace('_', '').lstrip('+-0') or 0}, or "
            f"'{raw}' for a name."
        )
    if number is ENDLESS:
        return float(raw.replace(".", "").lower())
    return float(raw) if number is FLOAT else int(raw, 0 if number is OTHER_BASE else 10)


def _text(data: bytes) -> str:
    """Decode. Raises Slip for bytes that are not text, and for hidden characters."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Slip(f"byte 0x{data[error.start]:02x} is not UTF-8. Save the file as UTF-8.", line) from error
    if not text.strip():
        raise Slip("the file is empty.", 1)
    if text.lstrip()[:1] == "<":
        raise Slip("a web page, not YAML. Give the address of the raw file.", 1)
    hidden = HIDDEN.search(text)
    if hidden:
        line = text.count("\n", 0, hidden.start()) + 1
        raise Slip(
            f"{_named(hidden[0])} may not stand here. Take it out, or write it as an escape.",
            line,
            hidden.start() - text.rfind("\n", 0, hidden.start()),
        )
    return text


def _named(character: str) -> str:
    return f"the character U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()


def _build(events: Iterator[yaml.Event]) -> Node:
    """The tree of one document. Not recursive: a hostile document may be deeper than the stack."""
    anchors: dict[str, Node] = {}
    stack = [_Open(False, 1, None)]
    documents = 0
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 1
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise Slip("a second document begins. A file is one document.", line)
        _check(event, line)
        if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            if len(stack) > DEEPEST:
                raise Slip(f"more than {DEEPEST} levels.", line)
            stack.append(_Open(isinstance(event, yaml.MappingStartEvent), line, event.anchor))
            continue
        if isinstance(event, yaml.ScalarEvent):
            node, anchor = _scalar(event, line), event.anchor
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise Slip(f"*{event.anchor} stands for nothing that is complete before it.", line)
            node, anchor = anchors[event.anchor], None
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            ended = stack.pop()
            node, anchor = _collection(ended, KEY if len(stack) == 1 else NAME), ended.anchor
        else:
            continue
        if anchor:
            anchors[anchor] = node
        stack[-1].items.append(node)
        if len(stack[-1].items) > MOST:
            raise Slip(f"more than {MOST} values.", line)
    return stack[0].items[0] if stack[0].items else Node({}, 1)


def _check(event: yaml.Event, line: int) -> None:
    """Raises Slip for tags and for texts that are too long."""
    tag = getattr(event, "tag", None)
    if tag:
        raise Slip(
            f"the tag {tag!r:.60}: only plain values are allowed. Leave it out, and write a text that looks like a "
            "number in quotes.",
            line,
        )
    if not isinstance(event, yaml.ScalarEvent):
        return
    if len(event.value) > LONGEST:
        raise Slip(f"a text of {len(event.value)} characters; the limit is {LONGEST}.", line)


def _scalar(event: yaml.ScalarEvent, line: int) -> Node:
    if event.style:
        return Node(event.value, line)
    try:
        value = scalar(event.value)
    except ValueError as error:
        raise Slip(str(error), line) from error
    return Node(value, line, event.value)


def _collection(ended: _Open, allowed: re.Pattern[str]) -> Node:
    """A list, or a mapping whose keys look as `allowed`."""
    if not ended.mapping:
        return Node(ended.items, ended.line, size=_size(ended.items, ended.line))
    pairs: dict[str, Node] = {}
    merged: list[Node] = []
    for key, value in zip(ended.items[::2], ended.items[1::2], strict=True):
        name = _key(key, allowed)
        if name == "<<":
            merged += value.value if isinstance(value.value, list) else [value]
            continue
        if name in pairs:
            raise Slip(f"{name} is already in line {pairs[name].line}.", key.line)
        pairs[name] = Node(value.value, key.line, value.raw, value.size)
    for other in merged:  # https://yaml.org/type/merge.html: own keys win, then the first merged mapping
        if not isinstance(other.value, dict):
            raise Slip("<< merges mappings, but this is not a mapping.", ended.line)
        pairs = {**other.value, **pairs}
    return Node(pairs, ended.line, size=_size(pairs.values(), ended.line))


def no_key(name: str) -> str:
    """Why a name is no key."""
    return f"{name!r:.60} is not a key. Keys are made of letters, digits, _ and dots between them."


def _size(nodes: Any, line: int) -> int:
    size: int = 1 + sum(node.size for node in nodes)
    if size > MOST:
        raise Slip(f"more than {MOST} values, with those that aliases repeat.", line)
    return size


def _key(node: Node, allowed: re.Pattern[str]) -> str:
    """A key as text. Raises Slip unless it looks as `allowed`: keys become parts of command lines, files and calls."""
    if isinstance(node.value, dict | list):
        raise Slip("a key is a word, not a list or mapping.", node.line)
    name = node.raw or str(node.value)
    if name == "<<":
        return name
    strange = next((character for character in name if ord(character) > 127), "")
    if strange:
        raise Slip(f"the key {name!r:.60} has {_named(strange)}. Keys are ASCII.", node.line)
    if not (allowed.fullmatch(name) or OVERRIDE.fullmatch(name)) or len(name) > LONGEST_KEY:
        raise Slip(no_key(name), node.line)
    return name
