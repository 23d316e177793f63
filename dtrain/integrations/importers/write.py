"""Write the recipe of an imported file: three lists as comments, then the words, with the tool's defaults marked."""

import re
import shlex
from collections.abc import Iterable
from itertools import starmap
from typing import Any

import yaml

from dtrain.config.schema import GROUPS
from dtrain.integrations.importers.ledger import Entry, Ledger, show
from dtrain.secrets import masked, screen

HEADS = {"carried": "carried over", "unneeded": "not needed here", "refused": "refused, and what to type instead"}
LONGEST = 100
"""Characters shown of an imported value."""


def recipe(ledger: Ledger, silent: Iterable[str], name: str) -> str:
    """Return the recipe as text; `silent` are the words that files of this tool never set, `name` goes after
    `recipe=`.
    """
    lines = [
        "# @package _global_",
        f"# {ledger.place.rsplit('/', 1)[-1]}, a config of {ledger.tool}, in dtrain's words",
        f"# plan       dtrain plan {_typed('recipe', name)}{_needed(ledger)}",
        f"# run        {command(ledger, name)}",
    ]
    lines += [f"# {line}".rstrip() for line in (*not_given(ledger, silent), *lists(ledger))]
    return "\n".join([*map(_plain, lines), *_words(ledger), ""])


def not_given(ledger: Ledger, silent: Iterable[str]) -> Iterable[str]:
    """Yield a line that names the `silent` words that the file leaves to dtrain's defaults."""
    given = {word.split(".")[0] for word in ledger.words} | {*ledger.command}
    given |= {"batch"} if {"microbatch", "accumulate"} <= given else set()
    given |= {"steps"} if "epochs" in given else set()
    missing = [word for word in silent if word not in given]
    if missing:
        yield f"not given  {', '.join(missing)}: type {'it' if len(missing) == 1 else 'them'}, or get dtrain's defaults"


def command(ledger: Ledger, name: str) -> str:
    """Return the command to type, with secret values as ***."""
    sweeps = any(word.startswith("sweep.space.") for word in ledger.words)
    words = {"recipe": name, **ledger.command}
    return " ".join(["dtrain -m" if sweeps else "dtrain", *starmap(_typed, words.items())])


def _typed(word: str, value: Any) -> str:
    """Quote a word for a shell, which must neither execute file contents nor read <...> as a redirection."""
    assignment = masked(f"{word}={value}")
    return shlex.quote(screen.on_one_line(assignment)) if str(value).startswith("<") else screen.typed(assignment)


def _plain(line: str) -> str:
    """Escape unprintable characters, which could end the line or hide a part of it."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


TRUSTED = re.compile(r"trust=\[([\w, ]+|<[\w ]+>)\]")


def allows(text: str) -> Iterable[str]:
    """Yield a warning for each trust=[...] in a text."""
    for package in dict.fromkeys(TRUSTED.findall(text)):
        yield (
            f"trust=[{package}] lets any code of {package.strip('<>')} run with your permissions: review the package "
            f"first, and the source of the files it loads"
        )


def lists(ledger: Ledger) -> Iterable[str]:
    """Yield every key in one of three lists, then a warning for each trust that they mention."""
    lines = list(_lists(ledger))
    yield from lines
    yield from allows("\n".join([*lines, *(f"{word}={value}" for word, value in ledger.command.items())]))


def _lists(ledger: Ledger) -> Iterable[str]:
    for kind, head in HEADS.items():
        entries = ledger.of(kind)  # type: ignore[arg-type]
        yield f"{head} ({len(entries)})"
        for why in dict.fromkeys(entry.why for entry in entries):  # keys with the same reason share one line for it
            *before, last = [_entry(entry) for entry in entries if entry.why == why]
            yield from map(_plain, before)
            yield _plain(masked(f"{last}{' -> ' if kind == 'carried' else ': '}{why}"))


def _entry(entry: Entry) -> str:
    value = show(entry.value)
    key, _, value = masked(f"{entry.key}={value if len(value) <= LONGEST else f'{value[:LONGEST]}...'}").partition("=")
    return f"  {key} = {value}"


def _needed(ledger: Ledger) -> str:
    """Return the words without which dtrain plan is refused."""
    return "".join(
        f" {_typed(word, value)}"
        for word, value in ledger.command.items()
        if word == "trust" or (ledger.asks(word) and not word.startswith("sweep."))
    )


def _words(ledger: Ledger) -> Iterable[str]:
    """Yield the words as YAML: group choices in the defaults list, the others as a tree."""
    choices = {word: value for word, value in ledger.words.items() if word in GROUPS}
    if choices:
        yield "defaults:"
        yield from (f"  - override /{group}: {_flow(value)}{_why(ledger, group)}" for group, value in choices.items())
    tree: dict[str, Any] = {}
    for word in ledger.words:
        if word not in choices:
            *path, leaf = ("sweep", *word.split(".", 2)[1:]) if word.startswith("sweep.space.") else word.split(".")
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
