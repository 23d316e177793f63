"""Which tool wrote a config, and what it is in our words. One file for each tool.

A dialect is a module with TITLE, MARKS (names that tell its files), SILENT (groups and words that such a file never
says) and `translate(ledger)`, which says of every key what becomes of it.
"""

import importlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, cast

from dtrain.config import files
from dtrain.config.schema import GROUPS, LISTS, WORDS
from dtrain.dialect import others
from dtrain.dialect.ledger import Ledger, flatten, show
from dtrain.dialect.read import read
from dtrain.errors import StoreError, WordsError, nearest
from dtrain.secrets import screen
from dtrain.storage import store

DIALECTS = ("accelerate", "axolotl", "deepspeed", "lightning", "ray", "torchtitan", "torchtune")


class Dialect(Protocol):
    TITLE: str
    MARKS: frozenset[str]
    SILENT: tuple[str, ...]

    def translate(self, ledger: Ledger) -> None: ...


def load(name: str) -> Dialect:
    """Raises WordsError for a tool that is not known."""
    if name not in DIALECTS:
        raise WordsError(f"as={name}: there is no such dialect.{nearest(name, DIALECTS)}")
    return cast(Dialect, importlib.import_module(f"dtrain.dialect.{name}"))


def recognise(tree: Mapping[str, Any], place: str) -> str:
    """The dialect with the most marks among the names of the tree. Raises WordsError when none or several fit."""
    others.refuse(tree, place)
    parts = [key.split(".") for key, _ in flatten(tree)]
    names = {name for key in parts for name in (key[0], key[-1])}
    marks = {dialect: len(names & load(dialect).MARKS) for dialect in DIALECTS}
    most = max(marks.values())
    fitting = [dialect for dialect, found in marks.items() if found == most]
    if most == 0:
        raise WordsError(
            f"{place}: no key of a tool that is known here ({', '.join(list(tree)[:4])} ...). Type as=<one of "
            f"{', '.join(DIALECTS)}>."
        )
    if "scaling_config" in tree and "trainer" in tree:
        return "ray"  # which starts the other's Trainer on its workers
    if len(fitting) > 1:
        raise WordsError(f"{place}: could be of {' or '.join(fitting)}. Type as={fitting[0]}.")
    return fitting[0]


def translate(tree: Mapping[str, Any], name: str, place: str, *, prefix: str = "", auto: str = "") -> Ledger:
    """Translate every key of the tree."""
    dialect = load(name)
    twice = next((key for key, times in Counter(key for key, _ in flatten(tree)).items() if times > 1), None)
    if twice is not None:
        raise WordsError(f"{place}: {twice} is said twice, once with a dot in its name. Take one of them out.")
    ledger = Ledger(dialect.TITLE, tree, place, prefix, auto)
    dialect.translate(ledger)
    return ledger


def _ranks(nodes: Any) -> int:
    """Of a number of nodes, or of `2:8` the smallest that all of them divide."""
    least, _, most = str(nodes).partition(":")
    return math.lcm(*range(int(least), int(most or least) + 1))


def complete(ledger: Ledger) -> None:
    """Add what a plan needs and the file leaves open: ranks for the mesh, samples for the ranks. It is marked as ours,
    and asked for.
    """
    words = ledger.words
    _drop_foreign(ledger)
    if words:
        ledger.imply({"precision": "fp32"}, "what torch computes in unless told otherwise")
    degree = {axis: words.get(f"mesh.{axis}") or 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    if words.get("strategy") == "hsdp":
        degree |= {axis: max(2, degree[axis]) for axis in ("dp_replicate", "dp_shard")}
    data = degree["dp_replicate"] * degree["dp_shard"]
    if degree["ep"] > 1 and words.get("remat") in ("selective", "budget"):
        ledger.withdraw(
            "remat",
            "where experts are shared out over ranks, a block is computed again as a whole or not at all. Type "
            f"remat=full, not {words['remat']}.",
        )
        ledger.withdraw("remat.share", "of remat=budget")
    if words.get("strategy") == "single":
        ledger.imply({"devices": 1}, "one process")
    needed = max(degree["pp"] * data * degree["cp"] * degree["tp"], degree["ep"])
    if needed > 1 and "devices" not in words and "nodes" not in words:
        ledger.imply({"devices": needed}, "the fewest that the mesh needs; type as many as there are")
    ranks = _ranks(words.get("nodes", 1)) * words.get("devices", 1)
    sizes = {word for word in ("batch", "microbatch") if word in words or ledger.asks(word)}
    if ("accumulate" in words or ledger.asks("accumulate")) and not sizes:
        ledger.imply({"microbatch": 1}, "not in this file: type microbatch=<samples of a forward>")
        ledger.command.setdefault("microbatch", "<samples of a forward on one rank>")
    elif ranks > 1 and not sizes:
        samples = ranks // (degree["pp"] * degree["cp"] * degree["tp"]) * (2 * degree["pp"] if degree["pp"] > 1 else 1)
        ledger.imply({"batch": samples}, "not in this file: type batch=<samples of a step>")
        ledger.command.setdefault("batch", "<samples of a step>")
    _leave_open(ledger)


TYPED = ("out", "trust", "data", "launcher", "evaluate", "checkpoint", "log", "time_limit")
"""Keys that a recipe does not leave open: those of the command line alone, and those that change no training."""


def _leave_open(ledger: Ledger) -> None:
    """Words that are asked for stand as ??? in the recipe, so that no default takes its place; what a key says after
    all is not asked for.
    """
    for word in [word for word in ledger.command if ledger.asks(word)]:
        if word in ledger.words and word not in ledger.implied:
            del ledger.command[word]
        elif word not in ledger.words and word.split(".")[0] not in TYPED:
            ledger.words[word] = "???"
            ledger.implied[word] = f"{word}={ledger.command[word]} is to be typed"


def _drop_foreign(ledger: Ledger) -> None:
    """Arguments that what was chosen for their group does not have, or of which the choice is still open."""
    for word in [word for word in ledger.words if "." in word and word.split(".")[0] in {*GROUPS} - {*LISTS}]:
        group, name = word.split(".", 1)
        choice = ledger.words.get(group, WORDS[group])
        if f"{group}._target_" in ledger.words or (not ledger.asks(group) and name in files.node(group, choice)):
            continue
        having = [other for other in files.groups()[group] if name in files.node(group, other)]
        why = f"{group} is to be typed" if ledger.asks(group) else f"{group}={choice} has no such choice"
        ledger.withdraw(word, f"{why}. Type {group}={having[0]} {word}={show(ledger.words[word])}.")


def nested(ledger: Ledger, key: str, name: str, *, auto: str = "") -> None:
    """The key names another file, which is read with this one: beside it or in this folder; of a file from elsewhere,
    below its own place alone.
    """
    file = str(ledger.leaves[key])
    local = store.is_local(ledger.place)
    if not local and ("://" in file or file.startswith("/") or ".." in file.split("/")):
        ledger.refuse(
            key, f"a file from elsewhere may only name one beside it. Type dtrain import {screen.typed(str(file))}."
        )
        return
    beside = store.join(ledger.place.rpartition("/")[0] or ".", file)
    places = [beside, file] if local else [beside]
    for place in dict.fromkeys(reversed(places) if file.startswith("/") else places):
        try:
            tree = read(place)
        except StoreError:
            continue
        other = translate(tree, name, place, prefix=f"{file}: ", auto=auto)
        ledger.adopt(other)
        ledger.skip(key, "its keys are told one by one")
        return
    ledger.refuse(key, f"{file} cannot be read. Type dtrain import <where it is> to have its words too.")
