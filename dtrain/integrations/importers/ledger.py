"""The ledger of an imported file: every key is recorded exactly once as carried over, not needed here, or refused.

A dialect first translates keys that depend on each other with functions, then applies a table (key -> Rule)
to the rest.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from dtrain.config.meaning import hint, meant
from dtrain.secrets import redact_arg

Kind = Literal["carried", "unneeded", "refused"]
CHOICES = {
    "model": "hf with model.name=..., or in its place model._target_=... and trust=[...]",
    "data": "chat, jsonl, csv, hf or text with data.path=..., or dataset", "optim": "adamw, sgd, muon or adafactor",
    "optim.lr": "value",
    "schedule": "linear, cosine schedule.floor=0, constant or wsd",
    "precision": "fp32, bf16, bf16_true, fp16 or fp8",
    "clip": "value or null",
    "strategy": "single, ddp, zero1, zero2, zero3 or fsdp", "objective": "next_token, dpo, distill or your own",
    "adapter": "lora, dora, qlora or none",
}  # fmt: skip
"""Words that every run needs, and the hint shown when the user must type one because the file's value was refused."""
REFERENCE = "${"
"""Begins what a recipe looks up, such as `${oc.env:HOME}`; the text of another tool's file is never that."""


class Code(str):
    """An expression whose value is not in the file; `why` explains it."""

    why = "computed in Python, which dtrain does not run"


class Differs(Code):
    """A value that differs between several calls."""

    why = "several calls in this file give different values"


@dataclass(frozen=True)
class Entry:
    """The outcome of one key. `why` names the resulting words, or the reason there are none."""

    key: str
    value: Any
    kind: Kind
    why: str
    words: frozenset[str] = frozenset()


@dataclass
class Ledger:
    """The keys of one file of `tool`, and the outcome of each. `place` is the file's path or URL."""

    tool: str
    tree: Mapping[str, Any]
    place: str = ""
    prefix: str = ""
    """Prefix of the keys of a file that another file names."""
    auto: str = ""
    """The software that replaces `auto` values in this file; empty if unknown."""
    entries: list[Entry] = field(default_factory=list)
    words: dict[str, Any] = field(default_factory=dict)
    """Words of the recipe."""
    implied: dict[str, str] = field(default_factory=dict)
    """word -> why the recipe sets it although no key does: the tool's default differs from dtrain's."""
    command: dict[str, str] = field(default_factory=dict)
    """Words for the command line: word -> value, or <hint> if the user must type it."""

    def __post_init__(self) -> None:
        self.leaves = {key: _numbered(value) for key, value in flatten(self.tree)}
        self._recorded: set[str] = set()
        self._unknown: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a leaf key; `default` if it is missing or null."""
        value = self.leaves.get(key, default)
        return default if value is None else value

    def under(self, *prefixes: str) -> list[str]:
        """Return the unrecorded keys that equal a prefix or lie below one."""
        return [key for key in self.open() if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)]

    def open(self) -> list[str]:
        """Return the keys that are not recorded yet."""
        return [key for key in self.leaves if key not in self._recorded]

    def settle(self, rule: "Rule", *names: str) -> None:
        """Apply a rule to the unrecorded keys of these names; `section.**` names all keys of a section."""
        rules = dict.fromkeys(names, rule)
        for key in self.open():
            if find(rules, key):
                rule(self, key, self.leaves[key])

    def carry(self, key: str, words: Mapping[str, Any], note: str = "", *, command: bool = False) -> None:
        """Record that a key becomes these words of the recipe (or of the command line); refuse it on a conflict with
        another key.
        """
        target: dict[str, Any] = self.command if command else self.words
        references = [word for word, value in words.items() if REFERENCE in str(value)]
        if references and not command:
            typed = " ".join(f"{word}=<value>" for word in references)
            self.refuse(key, f"a recipe would look that up on this machine. Type {typed}.")
            for word in references:
                self.ask(word)
            self.imply({word: value for word, value in words.items() if word not in references}, f"{key} needs it")
            return
        for word, value in words.items():
            if word in target and word not in self.implied and target[word] != value:
                self.refuse(key, f"another key of this file gives {word}={target[word]}. Remove one of them.")
                return
            if redact_arg(f"{word}={value}") != f"{word}={value}":
                self.refuse(key, f"secrets are not written to recipes. Type {word}=<secret> on the command line.")
                return
        for word in words:
            self.implied.pop(word, None)
        target.update(words)
        assignments = " ".join(f"{word}={show(value)}" for word, value in words.items()) + (
            " on the command line" if command else ""
        )
        self._record(key, "carried", assignments + (f" ({note})" if note else ""), frozenset(words))

    def skip(self, key: str, why: str) -> None:
        self._record(key, "unneeded", why)

    def refuse(self, key: str, why: str) -> None:
        value = self.leaves[key]
        if isinstance(value, Differs) and not why.startswith(value.why):
            why = f"{value.why}: {why}"
        self._record(key, "refused", why)

    def imply(self, words: Mapping[str, Any], why: str) -> None:
        """Set words from a default of the tool, unless a key sets them or the user is asked for them."""
        for word, value in words.items():
            if REFERENCE in str(value):
                self.ask(word)
            elif word not in self.words and not self.asks(word):
                self.words[word] = value
                self.implied[word] = why

    def ask(self, word: str, what: str = "") -> None:
        """Ask the user to type a word that the file does not determine, instead of using a default."""
        self.command.setdefault(word, f"<{what or CHOICES.get(word, 'value')}>")
        if word in self.implied:
            del self.words[word], self.implied[word]

    def asks(self, word: str) -> bool:
        return str(self.command.get(word, "")).startswith("<")

    def apply(self, rules: "Mapping[str, Rule]") -> None:
        """Apply the table to every unrecorded key; refuse the keys that it does not contain."""
        for key in self.open():
            rule, value = find(rules, key), self.leaves[key]
            whole = OBJECT.split(key)[0]
            if not rule and whole != key and (rule := find(rules, whole)):  # an argument that is an object
                value = Code(show(value))
            is_section = any(pattern.startswith(f"{key}.") for pattern in rules)
            if (value is None and rule) or (value in (None, {}) and is_section):
                self.skip(key, "empty")
            elif rule:
                rule(self, key, value)
            else:
                self.refuse(key, f"{self.tool} has no such key as far as dtrain knows.{self._near(rules, key)}")
                self._unknown.add(key)

    def adopt(self, other: "Ledger") -> None:
        """Add the entries and words of a file that this one names; this file's words win."""
        self.entries += other.entries
        for word, value in other.words.items():
            if word not in self.words or word in self.implied:
                self.words[word] = value
                self.implied.pop(word, None)
                if word in other.implied:
                    self.implied[word] = other.implied[word]
        self.command = {**other.command, **self.command}
        for word in [word for word in self.implied if self.asks(word)]:
            del self.words[word], self.implied[word]

    def take(self, other: "Ledger") -> None:
        """Add the entries and words of the same keys as translated by another dialect."""
        self._recorded |= set(other.leaves)
        self.adopt(other)

    def of(self, kind: Kind) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def withdraw(self, word: str, why: str) -> None:
        """Remove a word that conflicts with the others, and refuse the keys that became this word alone."""
        self.words.pop(word, None)
        self.implied.pop(word, None)
        self.entries = [
            Entry(entry.key, entry.value, "refused", why) if entry.words == {word} else entry for entry in self.entries
        ]

    def _record(self, key: str, kind: Kind, why: str, words: frozenset[str] = frozenset()) -> None:
        assert key in self.leaves and key not in self._recorded, key
        self._recorded.add(key)
        self.entries.append(Entry(self.prefix + key, self.leaves[key], kind, why, words))

    def _near(self, rules: "Mapping[str, Rule]", key: str) -> str:
        known = [*rules, *(name for name in self.leaves if name in self._recorded - self._unknown)]
        known = [name for name in known if "*" not in name]
        section, _, leaf = key.rpartition(".")
        beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section and name != key}
        elsewhere = [name for name in known if name.rpartition(".")[2] == leaf and name != key]
        near = [beside[name] for name in get_close_matches(leaf, beside, n=1, cutoff=0.75)] or get_close_matches(
            key, elsewhere, n=1, cutoff=0.4
        )
        if near:
            return f" Did you mean {near[0]}?"
        return hint(meant(key, show(self.leaves[key]))) or " Remove it, or look up its current name."


Rule = Callable[[Ledger, str, Any], None]
"""Records the outcome of one key, given its value."""


def find(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """Return the rule of a key: by its name, else by the first matching pattern, where `*` matches one part of the name
    and a final `**` the rest.
    """
    return rules.get(key) or next(
        (rule for pattern, rule in rules.items() if "*" in pattern and _fits(pattern.split("."), key.split("."))), None
    )


def _fits(pattern: list[str], parts: list[str]) -> bool:
    if pattern[-1] == "**":
        return len(parts) >= len(pattern) and _fits(pattern[:-1], parts[: len(pattern) - 1]) if pattern[:-1] else True
    return len(pattern) == len(parts) and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True))


def flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf; items of a list that contains mappings are numbered."""
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        items = enumerate(tree)
    else:
        yield key, tree
        return
    for name, value in items:
        yield from flatten(value, f"{key}.{name}".removeprefix("."))


OBJECT = re.compile(r"\.(?:class_path|init_args)\b")
"""Begins the keys of an object in a Python file."""
NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.))(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?")
"""Excludes 012, which may be octal."""


def _numbered(value: Any) -> Any:
    """Convert a number written as a string, such as "1e-5"."""
    if isinstance(value, list):
        return [_numbered(item) for item in value]
    if (
        isinstance(value, Code)
        or not isinstance(value, str)
        or not any(map(str.isdigit, value))
        or not NUMBER.fullmatch(value)
        or len(value) > 20
    ):
        return value
    return int(value) if value.lstrip("+-").isdecimal() else float(value)


def show(value: Any) -> str:
    """Format a value as a user would type it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {show(each)}" for name, each in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# value types: each returns the converted value, or raises ValueError naming the expected type


def number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return value


def positive(value: Any) -> int | float:
    if number(value) <= 0:
        raise ValueError("a number > 0")
    return number(value)


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
        raise ValueError("an integer")
    return int(value)


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer() or value < 1:
        raise ValueError("an integer >= 1")
    return int(value)


def text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError("a string")
    return show(value)


def switch(value: Any) -> bool:
    """Convert a boolean, also when written as a string such as "yes" or "off"."""
    named = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in named:
        return named[value.lower()]
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError("true or false")


# rules


def names(words: str) -> frozenset[str]:
    """Split `a b c` into a set."""
    return frozenset(words.split())
