"""`dtrain runs [best | rm | send] [folder or URL] [sort=<column>]`: lists runs, one per line: name, start, step,
held-out metrics, status and changed words.

    dtrain runs                              the runs below ./outputs and ./runs
    dtrain runs s3://bucket/sweep sort=eval_loss       the best last; any column or word; sort=-step is descending
    dtrain runs best runs/sweep              the run with the best held-out metric; the objective says which is better
    dtrain runs best runs/sweep figure=eval_f1 best_is=highest     by another metric
    dtrain runs rm runs/a runs/b             asks, then removes them completely, unless in use
    dtrain runs send runs/a                  sends its trackers (logger=[wandb]) what they lack, from its files

Words that all runs share are printed once, above the table; runs that differ in their seed alone have a row of mean and
standard deviation below it. Only `rm` changes anything.
"""

import math
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import starmap
from operator import itemgetter

from dtrain.compose import connect, provenance
from dtrain.config.word import cut
from dtrain.errors import LeaseError, StoreError, WordsError, nearest
from dtrain.launcher import detached
from dtrain.logger import again
from dtrain.report import runs, seeds
from dtrain.report.runs import Run
from dtrain.secrets import masked, screen
from dtrain.storage import lease, store

HERE = ("outputs", "runs")
ACTS = ("best", "rm", "send")
TAKES = ("sort", "figure", "best_is")
WAITING = (runs.NEVER, "preempted", "died")
"""Of runs whose job may be in the queue."""
LAST = ("config.yaml", "lease")
"""Files of a run that are removed last: the first makes it a run, the second is its lease."""


@store.starting()
def run(words: Sequence[str]) -> int:
    act = words[0] if words and words[0] in ACTS else ""
    options, places = _read(words[1:] if act else words, act)
    if act == "rm":
        return _remove(places)
    if act == "send":
        return _send(places)
    named = len(places) == 1 and places[0] in words
    entries = [entry for place in places for entry in _below(place, whole=not named)]
    if not entries:
        cause, hint = "there is no run. A run has a config.yaml", "Type dtrain runs <folder or URL>"
        raise StoreError.during("find runs in", " ".join(places), cause, hint)
    if act == "best":
        entries = [_best(entries, options)]
    elif "sort" in options:
        entries = _sorted(entries, options["sort"])
    screen.say(table(entries))
    return 0


def show(place: str) -> None:
    """Print the runs below a folder, after a sweep; nothing if none has begun or they cannot be read."""
    with suppress(StoreError):
        if entries := runs.below(place):
            screen.say(f"\nruns below {cut(masked(place))}\n{table(entries)}")


def _read(words: Sequence[str], act: str) -> tuple[dict[str, str], list[str]]:
    """The options, and the folders. Raises WordsError with every mistake."""
    named = [
        word.partition("=")[::2]
        for word in words
        if "=" in word and "://" not in word.partition("=")[0] and not store.exists(word)
    ]
    options = {name: value for name, value in named if not name.startswith("out_options.")}
    places = [word.rstrip("/") or word for word in words if word.partition("=")[::2] not in named]
    takes = {"": TAKES[:1], "best": TAKES[1:], "rm": (), "send": ()}[act]
    problems = [
        f"{cut(masked(name))}=: {f'runs {act}'.strip()} does not take it.{nearest(name, takes) if takes else ''}"
        for name in options
        if name not in takes
    ]
    problems += [
        f"{cut(word)}: options have no dashes. Type dtrain runs <folder or URL> sort=<column>."
        for word in places
        if word.startswith("-")
    ]
    if options.get("best_is", "lowest") not in ("lowest", "highest"):
        problems.append(f"best_is={cut(options['best_is'])}: allowed: lowest, highest. Type best_is=lowest.")
    if act in ("rm", "send") and not places:
        problems.append(f"runs {act}: no run is named. Type dtrain runs {act} <a run> <another>.")
    if problems:
        raise WordsError(*problems)
    places = places or [name for name in HERE if store.local_path(name).is_dir()]
    if not places:
        raise WordsError(
            f"runs: there is neither {' nor '.join(HERE)} in this folder. Type dtrain runs <folder or URL>."
        )
    storage_options = [word for word in words if word.startswith("out_options.")]
    for place in places:
        if storage_options and not store.is_local(place):
            connect(storage_options, place)
    return options, places


def _below(place: str, *, whole: bool) -> list[Run]:
    """`whole`: their names include the folder."""
    return [replace(entry, name=entry.url) if whole else entry for entry in runs.below(place)]


# choose and sort


def _best(entries: Sequence[Run], options: Mapping[str, str]) -> Run:
    """The run with the best figure, of equal ones the first by name. Raises WordsError if no figure, or no direction,
    is known.
    """
    known = runs.directions(entries)
    figures = dict.fromkeys(name for entry in entries for name in entry.compared)
    figure = options.get("figure") or next((name for name in known if name in figures), next(iter(figures), ""))
    which = options.get("best_is") or known.get(figure)
    having = sorted((entry for entry in entries if figure in entry.compared), key=lambda entry: entry.name)
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
    return (max if which == "highest" else min)(having, key=lambda entry: entry.compared[figure])


def _sorted(entries: Sequence[Run], column: str) -> list[Run]:
    """Sort by a column: a metric with a known direction has the best last. Runs without a value come first. Raises
    WordsError for an unknown column.
    """
    key = column.removeprefix("-")
    names = [*COLUMNS, *dict.fromkeys(name for entry in entries for name in (*entry.figures, *entry.words))]
    if key not in names:
        raise WordsError(f"sort={cut(column)}: there is no such column.{nearest(key, names)}")
    descending = column.startswith("-") != (runs.directions(entries).get(key) == "lowest")
    ranked = [(rank, entry) for entry in entries if (rank := _rank(entry, key)) is not None]
    ranked.sort(key=itemgetter(0), reverse=descending)
    return [entry for entry in entries if _rank(entry, key) is None] + [entry for _, entry in ranked]


def _rank(entry: Run, key: str) -> tuple[int, float, str] | None:
    """Sort key: numbers before texts."""
    value = COLUMNS[key](entry) if key in COLUMNS else entry.compared.get(key, entry.words.get(key))
    try:
        return None if value is None else (0, float(value), "")
    except ValueError:
        return (1, 0.0, str(value))


COLUMNS: Mapping[str, Callable[[Run], str | float | None]] = {
    "name": lambda entry: entry.name,
    "when": lambda entry: entry.began,
    "step": lambda entry: entry.step,
    "status": lambda entry: entry.status,
}


# the table


def table(entries: Sequence[Run]) -> str:
    """One line per run, below the words that all runs share. Words at their default in every run are left out."""
    changes = {key for entry in entries for key in entry.words.keys() - entry.at_default}
    shared = {key: text for key, text in entries[0].words.items() if key in changes} if len(entries) > 1 else {}
    for entry in entries:
        shared = {key: text for key, text in shared.items() if entry.words.get(key) == text}
    figures = list(dict.fromkeys(name for entry in entries for name in entry.figures))
    best = list(dict.fromkeys(name for entry in entries for name in entry.best))
    columns = [*(cut(name, 40) for name in figures), *(f"best {cut(name, 40)}" for name in best)]
    rows = [("name", "when", "step", *columns, "status", "changed")]
    for entry in entries:
        values = [f"{entry.figures[name]:.5g}" if name in entry.figures else "-" for name in figures]
        values += [_at(*entry.best[name]) if name in entry.best else "-" for name in best]
        changed = " ".join(
            _word(key, text) for key, text in entry.words.items() if key in changes and key not in shared
        )
        name, when = cut(masked(entry.name)), _when(entry.began)
        rows.append((name, when, f"{entry.step:,}", *values, _status(entry), changed))
    words = {key for key in changes if key not in shared}
    text = "\n\n".join(filter(None, [screen.table(rows), _over_seeds(seeds.groups(entries), words)]))
    return f"all runs: {' '.join(starmap(_word, shared.items()))}\n{text}" if shared else text


def _over_seeds(groups: Sequence[seeds.Group], words: Container[str]) -> str:
    """Mean and standard deviation of runs that differ in their seed alone; `words`: the keys that are shown."""
    if not groups:
        return ""
    figures = list(dict.fromkeys(name for group in groups for name in group.figures))
    rows = [("seeds", *(cut(name, 40) for name in figures), "changed")]
    for group in groups:
        means = [_spread(*group.figures[name]) if name in group.figures else "-" for name in figures]
        changed = " ".join(_word(key, text) for key, text in group.words.items() if key in words)
        rows.append((str(group.runs), *means, changed))
    return screen.table(rows)


def _spread(mean: float, deviation: float) -> str:
    return f"{mean:.5g} ± {deviation:.2g}"


def _status(entry: Run) -> str:
    """Of a run that a scheduler's job serves, the job it waits for, or how its user ended it."""
    if entry.status == "stopped":
        return "stopped early"
    if entry.status in WAITING and (job := detached.job_there(entry.url)):
        return f"queued, job {job}"
    return detached.ended(entry.url, entry.status)


def _at(value: float, step: int) -> str:
    return f"{value:.5g} @{step:,}"


@lru_cache(4096)
def _word(key: str, text: str) -> str:
    return cut(f"{key}={provenance.shown(key, text)}")


def _when(began: float | None) -> str:
    return "-" if began is None or not math.isfinite(began) else time.strftime("%Y-%m-%d %H:%M", time.localtime(began))


# trackers


def _send(places: Sequence[str]) -> int:
    """Send what the trackers of runs lack. Raises StoreError for a run without any."""
    said = [(place, word, text) for place in places for word, text in again.send(place).items()]
    for place, word, text in said:
        screen.say(screen.on_one_line(f"{place}: {word}: {masked(text) or 'it has everything'}"))
    return 0


# removal


def _others(place: str) -> list[str]:
    """The files that say that the folder of a run is also that of a sweep, or is above other runs."""
    files = store.tree(place, depth=runs.DEEPEST + 1)
    return sorted(path for path in files if path == "sweep.yaml" or path.endswith(("/sweep.yaml", "/plan.yaml")))


def _remove(places: Sequence[str]) -> int:
    """Remove runs after asking. Raises LeaseError if one is in use, WordsError if a folder is not a run, or holds
    others.
    """
    entries = []
    for place in places:
        matches = [entry for entry in runs.below(place) if entry.url == place]
        if not matches:
            raise WordsError(
                f"{cut(masked(place))} is not a run: it has no config.yaml. Type dtrain runs rm <a run>, each by its "
                "own name."
            )
        if others := _others(place):
            raise WordsError(
                f"{cut(masked(place))} holds more than one run: {cut(', '.join(others))}. Type dtrain runs rm <a run>, "
                "each by its own name, or remove the folder by hand with all of them."
            )
        state, who = lease.holder(place)
        if state == "held":
            raise LeaseError(f"{cut(masked(place))} is being written by a run: {cut(who)}. Stop it, or wait for it.")
        entries += _below(place, whole=True)
    screen.say(table(entries))
    which = "it" if len(entries) == 1 else f"these {len(entries)}"
    screen.say(f"Remove {which} with all checkpoints? Type yes: ", end="")
    if sys.stdin.readline().strip().lower() not in ("yes", "y"):
        screen.say("nothing was removed")
        return 1
    for entry in entries:
        with lease.hold(entry.url):  # a run that begins meanwhile is refused
            for name in sorted(store.children(entry.url), key=LAST.count):
                if name != LAST[1]:
                    store.remove(store.join(entry.url, name))
        store.remove(entry.url)
        screen.say(f"removed {cut(masked(entry.url))}")
    return 0
