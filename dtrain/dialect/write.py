"""The recipe of an imported file: three lists as comments, then the words, each default of theirs
marked as such.
"""

import re
import shlex
from collections.abc import Iterable
from typing import Any

import yaml

from dtrain.config.schema import GROUPS
from dtrain.dialect.ledger import Entry, Ledger, show
from dtrain.secrets import masked, screen

HEADS = {"carried": "carried over", "unneeded": "not needed here", "refused": "refused, and what to do"}
LONGEST = 100
"""Characters of a value of theirs that are shown."""


def recipe(ledger: Ledger, silent: Iterable[str], name: str) -> str:
    """The recipe as a text; `silent` is what files of this tool never say, `name` what stands for it after
    `recipe=`.
    """
    lines = [
        "# @package _global_",
        f"# {ledger.place.rsplit('/', 1)[-1]}, which {ledger.tool} reads, in words of dtrain",
        f"# plan       dtrain plan {_typed('recipe', name)}{_needed(ledger)}",
        f"# run        {command(ledger, name)}",
    ]
    missing = [
        word
        for word in silent
        if word not in ledger.command and not any(said.split(".")[0] == word for said in ledger.words)
    ]
    if missing:
        lines.append(f"# not said   {', '.join(missing)}: type them, or get dtrain's defaults")
    lines += [f"# {line}".rstrip() for line in lists(ledger)]
    return "\n".join([*map(_plain, lines), *_words(ledger), ""])


def command(ledger: Ledger, name: str) -> str:
    """The words to type; a value that is a secret stands as ***."""
    return " ".join(
        [
            "dtrain",
            _typed("recipe", name),
            *(_typed(word, value) for word, value in ledger.command.items()),
        ]
    )


def _typed(word: str, value: Any) -> str:
    """As it is typed in a shell, which must neither run what a file says nor take <...> for a file to read."""
    said = masked(f"{word}={value}")
    return shlex.quote(screen.on_one_line(said)) if str(value).startswith("<") else screen.typed(said)


def _plain(line: str) -> str:
    """One line: what could end it, or hide a part of it, is written out."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


TRUSTED = re.compile(r"trust=\[([\w, ]+|<[\w ]+>)\]")


def allows(text: str) -> Iterable[str]:
    """Packages that each trust=[...] in a text would allow."""
    for package in dict.fromkeys(TRUSTED.findall(text)):
        yield (
            f"trust=[{package}] lets any code of {package.strip('<>')} run as you, and read what you may read: "
            "look at it first, and at who wrote what it loads"
        )


def lists(ledger: Ledger) -> Iterable[str]:
    """Every key of theirs, in one of three lists, and what a trust that is named there would allow."""
    lines = list(_lists(ledger))
    yield from lines
    yield from allows("\n".join([*lines, *(f"{word}={value}" for word, value in ledger.command.items())]))


def _lists(ledger: Ledger) -> Iterable[str]:
    for kind, head in HEADS.items():
        entries = ledger.of(kind)  # type: ignore[arg-type]
        yield f"{head} ({len(entries)})"
        for why in dict.fromkeys(entry.why for entry in entries):  # what is said of several keys is said once
            *before, last = [_theirs(entry) for entry in entries if entry.why == why]
            yield from map(_plain, before)
            yield _plain(masked(f"{last}{' -> ' if kind == 'carried' else ': '}{why}"))


def _theirs(entry: Entry) -> str:
    value = show(entry.value)
    key, _, value = masked(f"{entry.key}={value if len(value) <= LONGEST else f'{value[:LONGEST]}...'}").partition("=")
    return f"  {key} = {value}"


def _needed(ledger: Ledger) -> str:
    """Without these a plan is refused."""
    return "".join(
        f" {_typed(word, value)}" for word, value in ledger.command.items() if word == "trust" or ledger.asks(word)
    )


def _words(ledger: Ledger) -> Iterable[str]:
    """The words as YAML: choices of groups in the defaults list, the others as a tree."""
    choices = {word: value for word, value in ledger.words.items() if word in GROUPS}
    if choices:
        yield "defaults:"
        yield from (f"  - override /{group}: {_flow(value)}{_why(ledger, group)}" for group, value in choices.items())
    tree: dict[str, Any] = {}
    for word in ledger.words:
        if word not in choices:
            *path, leaf = word.split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = word
    yield from _branch(ledger, tree, "")


def _branch(ledger: Ledger, tree: dict[str, Any], indent: str) -> Iterable[str]:
    for name, below in tree.items():
        if isinstance(below, dict):
            yield f"{indent}{name}:"
            yield from _branch(ledger, below, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_flow(ledger.words[below])}{_why(ledger, below)}"


def _why(ledger: Ledger, word: str) -> str:
    return f" # {_plain(masked(ledger.implied[word]))}" if word in ledger.implied else ""


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
