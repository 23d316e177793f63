"""Recognise the tool that wrote a config and translate it into dtrain's words. One module per tool.

A dialect is a module with TITLE, MARKS (key names that identify its files), SILENT (groups and words that such files
never set) and `translate(ledger)`, which records the outcome of every key.
"""

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

from dtrain.config import files
from dtrain.config.schema import GROUPS, LISTS, WORDS
from dtrain.errors import StoreError, WordsError, nearest
from dtrain.integrations.importers import others
from dtrain.integrations.importers.ledger import Ledger, flatten, show
from dtrain.integrations.importers.loops import LOOP
from dtrain.integrations.importers.read import ARGUMENTS, read
from dtrain.secrets import screen
from dtrain.storage import store

DIALECTS = (
    "accelerate",
    "axolotl",
    "deepspeed",
    "lightning",
    "ray",
    "script",
    "torchtitan",
    "torchtune",
    "transformers",
    "wandb",
)


class Dialect(Protocol):
    TITLE: str
    MARKS: frozenset[str]
    SILENT: tuple[str, ...]

    def translate(self, ledger: Ledger) -> None: ...


def load(name: str) -> Dialect:
    """Import a dialect. Raises WordsError for an unknown name."""
    if name not in DIALECTS:
        raise WordsError(f"as={name}: there is no such dialect.{nearest(name, DIALECTS)}")
    return cast(Dialect, importlib.import_module(f"dtrain.integrations.importers.{name}"))


def recognise(tree: Mapping[str, Any], place: str) -> str:
    """Return the dialect that shares the most marks with the tree's keys. Raises WordsError for no match or a tie."""
    others.refuse(tree, place)
    parts = [key.split(".") for key, _ in flatten(tree)]
    names = {name for key in parts for name in (key[0], key[-1])}
    marks = {dialect: len(names & load(dialect).MARKS) for dialect in DIALECTS}
    most = max(marks.values())
    candidates = [dialect for dialect, matches in marks.items() if matches == most]
    if most == 0:
        raise WordsError(
            f"{place}: no key belongs to a supported tool ({', '.join(list(tree)[:4])} ...). Type as=<one of "
            f"{', '.join(DIALECTS)}>."
        )
    if LOOP in tree:
        return "script"
    if "scaling_config" in tree and "trainer" in tree:
        return "ray"  # Ray runs Lightning's Trainer on its workers
    if set(ARGUMENTS) & set(tree):
        return "transformers"  # a class of its own: arguments may have the names of others
    if len(candidates) > 1:
        raise WordsError(f"{place}: could be a file of {' or '.join(candidates)}. Type as={candidates[0]}.")
    return candidates[0]


def translate(tree: Mapping[str, Any], name: str, place: str, *, prefix: str = "", auto: str = "") -> Ledger:
    """Translate every key of the tree."""
    dialect = load(name)
    twice = next((key for key, times in Counter(key for key, _ in flatten(tree)).items() if times > 1), None)
    if twice is not None:
        raise WordsError(f"{place}: {twice} is given twice, once with a dot in its name. Remove one of them.")
    ledger = Ledger(dialect.TITLE, tree, place, prefix, auto)
    dialect.translate(ledger)
    return ledger


def _ranks(nodes: Any) -> int:
    """Return the number of nodes; for a range such as `2:8`, its least common multiple."""
    least, _, most = str(nodes).partition(":")
    return math.lcm(*range(int(least), int(most or least) + 1))


PARTS = ("model", "data")
"""Groups whose default is never what a file of another tool trains."""
HOLDOUT = "0 to train on all rows, or a part to evaluate"


def complete(ledger: Ledger, silent: Iterable[str] = ()) -> None:
    """Add values that a plan needs and the file lacks: ranks for the mesh, samples for the ranks. They are marked as
    implied, and the user is asked for them, as for the model and the data, if they are `silent`."""
    words = ledger.words
    for part in PARTS:
        if part in silent and not {part, f"{part}._target_", f"sweep.space.{part}"} & words.keys():
            ledger.ask(part)
    if ledger.asks("data") and not any(word.startswith("data.holdout") for word in words):
        ledger.ask("data.holdout", HOLDOUT)
    hint = ledger.command.get("schedule", "")
    if ledger.asks("schedule") and "schedule.warmup" not in words and "schedule.warmup" not in hint:
        ledger.ask("schedule.warmup", "steps or a part of the run, 0 for none")
    _drop_foreign(ledger)
    if words:
        ledger.imply({"precision": "fp32"}, "torch's default")
    degree = {axis: words.get(f"mesh.{axis}") or 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    if words.get("strategy") == "hsdp":
        degree |= {axis: max(2, degree[axis]) for axis in ("dp_replicate", "dp_shard")}
    data = degree["dp_replicate"] * degree["dp_shard"]
    if degree["ep"] > 1 and words.get("remat") in ("selective", "budget"):
        ledger.withdraw(
            "remat",
            "with expert parallelism a block is recomputed entirely or not at all. Type "
            f"remat=full, not {words['remat']}.",
        )
        ledger.withdraw("remat.share", "only remat=budget uses it")
    if words.get("strategy") == "single":
        ledger.imply({"devices": 1}, "one process")
    needed = max(degree["pp"] * data * degree["cp"] * degree["tp"], degree["ep"])
    if needed > 1 and "devices" not in words and "nodes" not in words:
        ledger.imply({"devices": needed}, "the minimum for this mesh; type the number that you have")
    ranks = _ranks(words.get("nodes", 1)) * words.get("devices", 1)
    sizes = {word for word in ("batch", "microbatch") if word in words or ledger.asks(word)}
    if ("accumulate" in words or ledger.asks("accumulate")) and not sizes:
        ledger.ask("microbatch", "samples per forward on one rank")
    elif ranks > 1 and not sizes:
        ledger.ask("batch", "samples per step")
    _leave_open(ledger)


TYPED = ("out", "trust", "data", "launcher", "evaluate", "checkpoint", "log", "time_limit", "sweep")
"""Keys that stand as ??? in a recipe only if it chooses their word: they belong on the command line, or do not affect
training."""


def _leave_open(ledger: Ledger) -> None:
    """Write ??? for every requested word so that no default replaces it; drop requests that another key
    has answered.
    """
    for word in sorted((word for word in ledger.command if ledger.asks(word)), key=lambda word: "." in word):
        if word in ledger.words and word not in ledger.implied:
            del ledger.command[word]
        elif word not in ledger.words and (
            word in PARTS or word.split(".")[0] not in TYPED or word.split(".")[0] in ledger.words
        ):
            ledger.words[word] = "???"
            ledger.implied[word] = f"{word}={ledger.command[word]} must be typed"


def _drop_foreign(ledger: Ledger) -> None:
    """Refuse arguments that the chosen member of their group lacks, or whose group is not chosen yet."""
    for word in [word for word in ledger.words if "." in word and word.split(".")[0] in {*GROUPS} - {*LISTS}]:
        group, name = word.split(".", 1)
        choice = ledger.words.get(group, WORDS[group])
        if f"{group}._target_" in ledger.words or (not ledger.asks(group) and name in files.node(group, choice)):
            continue
        having = [other for other in files.groups()[group] if name in files.node(group, other)]
        if having == [*files.groups()[group]]:
            continue  # whichever is typed takes it
        value, is_open = show(ledger.words[word]), ledger.asks(group) and word not in ledger.implied
        why = f"{group} must be typed" if ledger.asks(group) else f"{group}={choice} does not take it"
        ledger.withdraw(word, f"{why}. Type {group}={having[0]} {word}={value}.")
        if is_open:
            ledger.ask(word, f"{value} with {having[0]}")


def nested(ledger: Ledger, key: str, name: str, *, auto: str = "") -> None:
    """Translate the file that a key names: beside this file or in the working directory. A remote file may only name
    files below its own folder."""
    file = str(ledger.leaves[key])
    local = store.is_local(ledger.place)
    if not local and ("://" in file or file.startswith("/") or ".." in file.split("/")):
        ledger.refuse(
            key, f"a remote file may only name files beside it. Type dtrain import {screen.typed(str(file))}."
        )
        _ask_for_its_words(ledger)
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
        ledger.skip(key, "its keys are listed separately")
        return
    ledger.refuse(key, f"{file} cannot be read. Type dtrain import <its path or URL> to import it too.")
    _ask_for_its_words(ledger)


def _ask_for_its_words(ledger: Ledger) -> None:
    """Ask for what a file of DeepSpeed decides."""
    for word in ("strategy", "clip", "precision"):
        ledger.ask(word)
