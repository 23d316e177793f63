"""Rules: what becomes of a key of another tool's config."""

from collections.abc import Callable, Mapping
from typing import Any

from dtrain.dialect.ledger import Code, Ledger, Rule, number, switch

ODD = "not a value that it takes there. Look it up, or type the word you mean."


def to(word: str, kind: Callable[[Any], Any] = number, note: str = "", *, command: bool = False) -> Rule:
    """Carried over as it is."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        if unread(ledger, key, value, word):
            return
        try:
            said = kind(value)
        except (ValueError, OverflowError, TypeError) as error:
            ledger.refuse(key, f"{ledger.tool} takes {error} here, not {value!r}. Type {word}=<value>.")
            ledger.ask(word)
        else:
            ledger.carry(key, {word: said}, note, command=command)

    return rule


def unread(ledger: Ledger, key: str, value: Any, word: str) -> bool:
    """Whether a value is not in the file: computed, or filled in by somebody else. Then the key is told here."""
    if isinstance(value, Code):
        ledger.refuse(key, f"{value.why}. Type {word}=<value>.")
        ledger.ask(word)
    elif value == "auto" and ledger.auto:
        ledger.skip(key, f"filled in by {ledger.auto}")
    elif value == "auto":
        ledger.refuse(key, f"filled in by whoever calls {ledger.tool}, so it is not in this file. Type {word}=<value>.")
        ledger.ask(word)
    else:
        return False
    return True


def unneeded(why: str) -> Rule:
    return lambda ledger, key, value: ledger.skip(key, why)


def refused(why: str, *asked: str) -> Rule:
    """Refused; `asked` are the words that a run cannot do without, and that have to be typed."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        ledger.refuse(key, why)
        for word in asked:
            ledger.ask(word)

    return rule


def lacking(why: str, *off: Any, asked: str = "") -> Rule:
    """Refused where it is switched on; `off` are values that mean it is not, beside those that are empty, zero or
    false; `asked` as in refused.
    """

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        out = value in off or not value or (isinstance(value, str) and value.lower() in ("false", "no", "none", "off"))
        ledger.skip(key, "off, as here") if out else refused(why, *asked.split())(ledger, key, value)

    return rule


def chosen(table: Mapping[Any, Rule], other: Rule) -> Rule:
    """By the value, texts in lower case."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        name = value.lower() if isinstance(value, str) else value
        try:
            table.get(name, other)(ledger, key, value)
        except TypeError:  # a list, or what else is no value of a choice
            other(ledger, key, value)

    return rule


def every(words: str, rule: Rule, section: str = "") -> dict[str, Rule]:
    """The same rule for all of these names of a section."""
    return {f"{section}.{name}".removeprefix("."): rule for name in words.split()}


def says(words: Mapping[str, Any], note: str = "") -> Rule:
    """Carried over as these words."""
    return lambda ledger, key, value: ledger.carry(key, words, note)


def switched(on: Rule, off: Rule) -> Rule:
    """One rule for true, one for false."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        try:
            (on if switch(value) else off)(ledger, key, value)
        except ValueError as error:
            ledger.refuse(key, f"{ledger.tool} takes {error} here, not {value!r}.")

    return rule
