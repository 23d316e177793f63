"""The ledger of another tool's file, key by key: carried over, not needed here, or refused; each once, and none is
left out.

A dialect first lets functions tell the keys that mean something only together, then hands the rest to a table: key ->
Rule.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from dtrain.secrets import redact_arg

Kind = Literal["carried", "unneeded", "refused"]
CHOICES = {
    "model": "gpt, or in its place model._target_=... and trust=[...]", "optim": "adamw, sgd, muon or adafactor",
    "optim.lr": "value",
    "schedule": "cosine, constant or wsd", "precision": "fp32, bf16, bf16_true, fp16 or fp8", "clip": "value or null",
}  # fmt: skip
"""Words that every run needs: where a file's value is refused, the word is asked for."""


class Code(str):
    """A value that is not in the file: what is written in its place, and why that is not one."""

    why = "computed in Python, which is not run"


class Differs(Code):
    """A value of which several calls say different ones."""

    why = "several calls in this file say different values"


@dataclass(frozen=True)
class Entry:
    """`why`: the words it became, or the reason it did not."""

    key: str
    value: Any
    kind: Kind
    why: str
    words: frozenset[str] = frozenset()


@dataclass
class Ledger:
    """The keys of one file of `tool`, and what was said of each. `place` is the file's path or URL."""

    tool: str
    tree: Mapping[str, Any]
    place: str = ""
    prefix: str = ""
    """Before the keys of a file that another one names."""
    auto: str = ""
    """Who fills in `auto` in such a file; empty: nobody that is known here."""
    entries: list[Entry] = field(default_factory=list)
    words: dict[str, Any] = field(default_factory=dict)
    """Words of the recipe."""
    implied: dict[str, str] = field(default_factory=dict)
    """word -> why the recipe says it though no key does: a default of theirs that is not ours."""
    command: dict[str, str] = field(default_factory=dict)
    """Words for the command line, or to be typed: word -> value or <what it is>."""

    def __post_init__(self) -> None:
        self.leaves = {key: _numbered(value) for key, value in flatten(self.tree)}
        self._told: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key that has none below it; `default` also for an empty one."""
        found = self.leaves.get(key, default)
        return default if found is None else found

    def under(self, *prefixes: str) -> list[str]:
        """The keys below the prefixes (and they themselves) of which nothing was said yet."""
        return [key for key in self.open() if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)]

    def open(self) -> list[str]:
        """Keys of which nothing was said yet."""
        return [key for key in self.leaves if key not in self._told]

    def carry(self, key: str, words: Mapping[str, Any], note: str = "", *, command: bool = False) -> None:
        """The key becomes these words of the recipe (or of the command line); where another key said them otherwise, it
        is refused.
        """
        target: dict[str, Any] = self.command if command else self.words
        other = next(
            (
                word
                for word, value in words.items()
                if word in target and word not in self.implied and target[word] != value
            ),
            None,
        )
        if other is not None:
            self.refuse(key, f"another key of this file says {other}={target[other]}. Take one of them out.")
            return
        secret = next(
            (word for word, value in words.items() if redact_arg(f"{word}={value}") != f"{word}={value}"), None
        )
        if secret is not None:
            self.refuse(key, f"a secret is not written anywhere. Type {secret}=<it> where it is needed.")
            return
        for word in words:
            self.implied.pop(word, None)
        target.update(words)
        said = " ".join(f"{word}={show(value)}" for word, value in words.items()) + (
            " on the command line" if command else ""
        )
        self._tell(key, "carried", said + (f" ({note})" if note else ""), frozenset(words))

    def skip(self, key: str, why: str) -> None:
        self._tell(key, "unneeded", why)

    def refuse(self, key: str, why: str) -> None:
        differs = self.leaves[key]
        if isinstance(differs, Differs) and not why.startswith(differs.why):
            why = f"{differs.why}: {why}"
        self._tell(key, "refused", why)

    def imply(self, words: Mapping[str, Any], why: str) -> None:
        """Words that a default of theirs means; a key that says otherwise wins, and what is asked for stays open."""
        for word, value in words.items():
            if word not in self.words and not self.asks(word):
                self.words[word] = value
                self.implied[word] = why

    def ask(self, word: str, what: str = "") -> None:
        """A word that has to be typed, since the file does not say enough; no default of theirs or ours takes its
        place.
        """
        self.command.setdefault(word, f"<{what or CHOICES.get(word, 'value')}>")
        if word in self.implied:
            del self.words[word], self.implied[word]

    def asks(self, word: str) -> bool:
        return str(self.command.get(word, "")).startswith("<")

    def apply(self, rules: "Mapping[str, Rule]") -> None:
        """The table for every key of which nothing was said yet; what it does not know is refused as unknown."""
        for key in self.open():
            rule = find(rules, key)
            value = self.leaves[key]
            if (value is None and rule) or (value in (None, {}) and self._holds(rules, key)):
                self.skip(key, "empty")
            elif rule:
                rule(self, key, value)
            else:
                self.refuse(key, f"{self.tool} has no such key that dtrain knows.{self._near(rules, key)}")

    def adopt(self, other: "Ledger") -> None:
        """Take in the entries of a file that this one names; for keys of both, this one's count."""
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
        """Take in the entries of the same keys from another tool's dialect."""
        self._told |= set(other.leaves)
        self.adopt(other)

    def of(self, kind: Kind) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def withdraw(self, word: str, why: str) -> None:
        """A word that does not go with the others after all: the keys that alone say it are refused."""
        self.words.pop(word, None)
        self.implied.pop(word, None)
        self.entries = [
            Entry(entry.key, entry.value, "refused", why) if entry.words == {word} else entry for entry in self.entries
        ]

    def _tell(self, key: str, kind: Kind, why: str, words: frozenset[str] = frozenset()) -> None:
        assert key in self.leaves and key not in self._told, key
        self._told.add(key)
        self.entries.append(Entry(self.prefix + key, self.leaves[key], kind, why, words))

    def _holds(self, rules: "Mapping[str, Rule]", key: str) -> bool:
        """Whether the table has keys below this one."""
        return any(pattern.startswith(f"{key}.") for pattern in rules)

    def _near(self, rules: "Mapping[str, Rule]", key: str) -> str:
        known = [
            pattern for pattern in (*rules, *(key for key in self.leaves if key in self._told)) if "*" not in pattern
        ]
        section, _, leaf = key.rpartition(".")
        beside = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section and name != key}
        elsewhere = [name for name in known if name.rpartition(".")[2] == leaf and name != key]
        near = [beside[name] for name in get_close_matches(leaf, beside, n=1, cutoff=0.75)] or get_close_matches(
            key, elsewhere, n=1, cutoff=0.4
        )
        return f" Did you mean {near[0]}?" if near else " Take it out, or look up what it is called now."


Rule = Callable[[Ledger, str, Any], None]
"""Tells one key, given its value."""


def find(rules: Mapping[str, Rule], key: str) -> Rule | None:
    """The rule of a key: by its name, else by the first pattern, in which `*` is one part of the name and a last `**`
    all that follow.
    """
    return rules.get(key) or next(
        (rule for pattern, rule in rules.items() if "*" in pattern and _fits(pattern.split("."), key.split("."))), None
    )


def _fits(pattern: list[str], parts: list[str]) -> bool:
    if pattern[-1] == "**":
        return len(parts) >= len(pattern) and _fits(pattern[:-1], parts[: len(pattern) - 1]) if pattern[:-1] else True
    return len(pattern) == len(parts) and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True))


def flatten(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """dotted key -> value, for every value that holds no names; parts of a list that do are numbered."""
    if isinstance(tree, Mapping) and tree:
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        items = enumerate(tree)
    else:
        yield key, tree
        return
    for name, value in items:
        yield from flatten(value, f"{key}.{name}".removeprefix("."))


NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*|(?=\.))(\.[0-9]*)?([eE][-+]?[0-9]{1,2})?")
"""Not 012, which may be meant otherwise."""


def _numbered(value: Any) -> Any:
    """A number that is given as a text, "1e-5", as that number."""
    if isinstance(value, list):
        return [_numbered(one) for one in value]
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
    """A value as a person would type it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# kinds of values: each gives back what is meant, or raises ValueError with what was expected


def number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return value


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
        raise ValueError("a text")
    return show(value)


def switch(value: Any) -> bool:
    """true, also as the texts that configs are full of."""
    named = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in named:
        return named[value.lower()]
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError("true or false")


# rules


def names(words: str) -> frozenset[str]:
    """`a b c` as a set: tables of names are long."""
    return frozenset(words.split())
