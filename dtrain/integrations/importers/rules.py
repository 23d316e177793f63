"""Rules: functions that record the outcome of a key."""

from collections.abc import Callable, Mapping
from typing import Any

from dtrain.integrations.importers.ledger import Code, Ledger, Rule, number, switch

ODD = "not a valid value in the other tool. Correct it, or type the equivalent word."


def to(
    word: str,
    kind: Callable[[Any], Any] = number,
    note: str = "",
    *,
    command: bool = False,
    further: Mapping[str, Any] | None = None,
) -> Rule:
    """Carry the value over to a word, unchanged apart from its type, together with the words `further`."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        if unread(ledger, key, value, word):
            return
        try:
            converted = kind(value)
        except (ValueError, OverflowError, TypeError) as error:
            ledger.refuse(key, f"{ledger.tool} takes {error} here, not {value!r}. Type {word}=<value>.")
            ledger.ask(word)
        else:
            ledger.carry(key, {word: converted, **(further or {})}, note, command=command)

    return rule


def unread(ledger: Ledger, key: str, value: Any, word: str) -> bool:
    """Record a key whose value is not in the file: computed, or filled in by other software. Return whether it was."""
    if isinstance(value, Code):
        ledger.refuse(key, f"{value.why}. Type {word}=<value>.")
        ledger.ask(word)
    elif value == "auto" and ledger.auto:
        ledger.skip(key, f"filled in by {ledger.auto}")
    elif value == "auto":
        ledger.refuse(key, f"filled in by the caller of {ledger.tool}, so not in this file. Type {word}=<value>.")
        ledger.ask(word)
    else:
        return False
    return True


def unneeded(why: str) -> Rule:
    return lambda ledger, key, value: ledger.skip(key, why)


OFF = unneeded("off, as here")


def refused(why: str, *asked: str) -> Rule:
    """Refuse the key; ask for the words `asked`, which a run cannot do without."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        ledger.refuse(key, why)
        for word in asked:
            ledger.ask(word)

    return rule


def lacking(why: str, *off: Any, asked: str = "") -> Rule:
    """Refuse a key that is switched on. Empty, zero, false and the values `off` count as off. `asked` is as in
    refused.
    """

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        is_off = not value or value in off or str(value).lower() in ("false", "no", "none", "off")
        (OFF if is_off else refused(why, *asked.split()))(ledger, key, value)

    return rule


def when(test: Callable[[Ledger, str, Any], bool], rule: Rule, other: Rule) -> Rule:
    """Choose a rule by a test of the ledger, the key and its value."""
    return lambda ledger, key, value: (rule if test(ledger, key, value) else other)(ledger, key, value)


def given(rule: Rule) -> Rule:
    """Skip a key that is empty, where the other tool then has a default."""
    return when(lambda ledger, key, value: value is None, unneeded("empty"), rule)


def chosen(table: Mapping[Any, Rule], other: Rule) -> Rule:
    """Choose a rule by the value; strings are compared in lower case."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        name = value.lower() if isinstance(value, str) else value
        try:
            table.get(name, other)(ledger, key, value)
        except TypeError:  # an unhashable value, such as a list
            other(ledger, key, value)

    return rule


def table(rules: Mapping[str, Any], section: str = "") -> dict[str, Rule]:
    """Expand a table: a key holds the names that share a rule, separated by spaces, or a section and its own table."""
    expanded: dict[str, Rule] = {}
    for names, rule in rules.items():
        for name in names.split():
            expanded |= table(rule, f"{section}{name}.") if isinstance(rule, Mapping) else {f"{section}{name}": rule}
    return expanded


def says(words: Mapping[str, Any], note: str = "") -> Rule:
    """Carry the key over as these words."""
    return lambda ledger, key, value: ledger.carry(key, words, note)


def switched(on: Rule, off: Rule) -> Rule:
    """Choose a rule by a boolean."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        try:
            (on if switch(value) else off)(ledger, key, value)
        except ValueError as error:
            ledger.refuse(key, f"{ledger.tool} takes {error} here, not {value!r}.")

    return rule


def turns_on(words: Mapping[str, Any], note: str = "") -> Rule:
    """Carry a boolean over as these words if it is true; false is the default here too."""
    return switched(says(words, note), OFF)
