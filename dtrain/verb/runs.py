"""`dtrain runs [best | rm] [folder or URL] [sort=<column>]`: the runs there, a line each: name, when, what was changed,
step, held-out figures, status.

    dtrain runs                              those below ./outputs and ./runs
    dtrain runs s3://bucket/sweep sort=eval_loss       the best last; any column or word, sort=-step the other way round
    dtrain runs best runs/sweep              the one with the best held-out figure, by what its objective says is better
    dtrain runs best runs/sweep figure=eval_f1 best_is=highest     by another figure
    dtrain runs rm runs/a runs/b             asks, then removes them whole; not what a living run holds

Words that all of them share stand once, above. Nothing is written there but by `rm`.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from dtrain.compose import connect, provenance
from dtrain.config.word import cut
from dtrain.errors import LeaseError, StoreError, WordsError, nearest
from dtrain.report import runs
from dtrain.report.runs import Run
from dtrain.secrets import masked, screen
from dtrain.storage import lease, store

HERE = ("outputs", "runs")
ACTS = ("best", "rm")
TAKES = ("sort", "figure", "best_is")
LAST = ("config.yaml", "lease")
"""Files of a run that is removed: the first makes it a run, the second is its lease."""


def run(words: Sequence[str]) -> int:
    act = words[0] if words and words[0] in ACTS else ""
    said, places = _read(words[1:] if act else words, act)
    if act == "rm":
        return _remove(places)
    named = len(places) == 1 and places[0] in words
    found = [one for place in places for one in _below(place, whole=not named)]
    if not found:
        raise StoreError.during(
            "find runs in",
            " ".join(places),
            "there is none. A run has a config.yaml",
            "Type dtrain runs <folder or URL>",
        )
    if act == "best":
        found = [_best(found, said)]
    elif "sort" in said:
        found = _sorted(found, said["sort"])
    screen.say(table(found))
    return 0


def show(place: str) -> None:
    """The runs below a folder, after a sweep; none if none has begun, or if they cannot be read."""
    with suppress(StoreError):
        if found := runs.below(place):
            screen.say(f"\nruns below {cut(masked(place))}\n{table(found)}")


def _read(words: Sequence[str], act: str) -> tuple[dict[str, str], list[str]]:
    """The options, and the folders. Raises WordsError with every mistake."""
    named = [
        word.partition("=")[::2]
        for word in words
        if "=" in word and "://" not in word.partition("=")[0] and not store.exists(word)
    ]
    said = {name: value for name, value in named if not name.startswith("out_options.")}
    places = [word.rstrip("/") or word for word in words if word.partition("=")[::2] not in named]
    takes = {"": TAKES[:1], "best": TAKES[1:], "rm": ()}[act]
    problems = [
        f"{cut(masked(name))}=: {f'runs {act}'.strip()} does not take it.{nearest(name, takes) if takes else ''}"
        for name in said
        if name not in takes
    ]
    problems += [
        f"{cut(word)}: words have no dashes. Type dtrain runs <folder or URL> sort=<column>."
        for word in places
        if word.startswith("-")
    ]
    if said.get("best_is", "lowest") not in ("lowest", "highest"):
        problems.append(f"best_is={cut(said['best_is'])}: it is lowest or highest. Type best_is=lowest.")
    if act == "rm" and not places:
        problems.append("runs rm: which? Type dtrain runs rm <a run> <another>.")
    if problems:
        raise WordsError(*problems)
    places = places or [name for name in HERE if store.local_path(name).is_dir()]
    if not places:
        raise WordsError(
            f"runs: there is neither {' nor '.join(HERE)} in this folder. Type dtrain runs <folder or URL>."
        )
    options = [word for word in words if word.startswith("out_options.")]
    for place in places:
        if options and not store.is_local(place):
            connect(options, place)
    return said, places


def _below(place: str, *, whole: bool) -> list[Run]:
    """`whole`: with the folder in their names."""
    return [replace(one, name=one.url) if whole else one for one in runs.below(place)]


# which, and in which order


def _best(found: Sequence[Run], said: Mapping[str, str]) -> Run:
    """Raises WordsError where no figure, or no direction, is known."""
    known = runs.directions(found)
    figures = dict.fromkeys(name for one in found for name in one.figures)
    figure = said.get("figure") or next((name for name in known if name in figures), next(iter(figures), ""))
    which = said.get("best_is") or known.get(figure)
    having = [one for one in found if figure in one.figures]
    if not having:
        raise WordsError(
            "best: no run here has "
            f"{f'a figure {cut(figure)}' if figure else 'held-out figures yet'}."
            f"{nearest(figure, figures) if figures else ''}"
        )
    if not which:
        raise WordsError(
            f"best: nothing here says which {cut(figure)} is the best. Type best_is=lowest or best_is=highest."
        )
    return (max if which == "highest" else min)(having, key=lambda one: one.figures[figure])


def _sorted(found: Sequence[Run], column: str) -> list[Run]:
    """Sort by a column; of a metric with a known direction, the best last. Runs without a value come first. Raises
    WordsError.
    """
    key = column.removeprefix("-")
    names = [*COLUMNS, *dict.fromkeys(name for one in found for name in (*one.figures, *one.said))]
    if key not in names:
        raise WordsError(f"sort={cut(column)}: there is no such column.{nearest(key, names)}")
    descending = column.startswith("-") != (runs.directions(found).get(key) == "lowest")
    ordered = sorted(
        (one for one in found if _rank(one, key) is not None),
        key=lambda one: _rank(one, key) or (0, 0.0, ""),
        reverse=descending,
    )
    return [one for one in found if _rank(one, key) is None] + ordered


def _rank(one: Run, key: str) -> tuple[int, float, str] | None:
    """Sort key: numbers before texts."""
    value = COLUMNS[key](one) if key in COLUMNS else one.figures.get(key, one.said.get(key))
    try:
        return None if value is None else (0, float(value), "")
    except ValueError:
        return (1, 0.0, str(value))


COLUMNS: Mapping[str, Callable[[Run], str | float | None]] = {
    "name": lambda one: one.name,
    "when": lambda one: one.began,
    "step": lambda one: one.step,
    "status": lambda one: one.status,
}


# what is shown


def table(found: Sequence[Run]) -> str:
    """A line for each; what all of them say stands above. What is a default wherever it was said is left out."""
    changes = {key for one in found for key in one.said.keys() - one.usual}
    shared = {key: text for key, text in found[0].said.items() if key in changes} if len(found) > 1 else {}
    for one in found:
        shared = {key: text for key, text in shared.items() if one.said.get(key) == text}
    figures = list(dict.fromkeys(name for one in found for name in one.figures))
    rows = [("name", "when", "step", *(cut(name, 40) for name in figures), "status", "changed")]
    for one in found:
        values = [f"{one.figures[name]:.5g}" if name in one.figures else "-" for name in figures]
        changed = " ".join(_word(key, text) for key, text in one.said.items() if key in changes and key not in shared)
        rows.append(
            (cut(masked(one.name)), _when(one.began), f"{one.step:,}", *values, screen.on_one_line(one.status), changed)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    return "\n".join(
        [*([f"all of them: {' '.join(_word(key, text) for key, text in shared.items())}"] if shared else []), *lines]
    )


@lru_cache(4096)
def _word(key: str, text: str) -> str:
    return cut(f"{key}={provenance.shown(key, text)}")


def _when(began: float | None) -> str:
    return "-" if began is None or not math.isfinite(began) else time.strftime("%Y-%m-%d %H:%M", time.localtime(began))


# what is removed


def _remove(places: Sequence[str]) -> int:
    """Raises LeaseError for a run that is in use and WordsError for a folder that is none, before any question."""
    found = []
    for place in places:
        there = [one for one in runs.below(place) if one.url == place]
        if not there:
            raise WordsError(
                f"{cut(masked(place))} is no run: it has no config.yaml. Type dtrain runs rm <a run>, each by its own "
                "name."
            )
        state, who = lease.holder(place)
        if state == "held":
            raise LeaseError(f"{cut(masked(place))} is being written by a run: {cut(who)}. Stop it, or wait for it.")
        found += _below(place, whole=True)
    screen.say(table(found))
    screen.say(f"Remove {'it' if len(found) == 1 else f'these {len(found)}'} with all checkpoints? Type yes: ", end="")
    if sys.stdin.readline().strip().lower() not in ("yes", "y"):
        screen.say("nothing was removed")
        return 1
    for one in found:
        with lease.hold(one.url):  # a run that begins meanwhile is told so
            for name in sorted(store.children(one.url), key=LAST.count):
                if name != LAST[1]:
                    store.remove(store.join(one.url, name))
        store.remove(one.url)
        screen.say(f"removed {cut(masked(one.url))}")
    return 0
