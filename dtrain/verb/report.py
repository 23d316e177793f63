"""`dtrain report <run or sweep> [to=<file>]`: one HTML file that shows a run, or all runs below a folder or URL.

    dtrain report runs/s                       runs/s/report.html: curves, leaderboard, what mattered, failures
    dtrain report s3://bucket/a to=a.html      of a run: loss, rate, norm, speed, memory, saves and restarts

The file needs nothing else and sends no request. It shows what is there now, also of runs that are still going on.
"""

import math
from collections.abc import Sequence

from dtrain.compose import connect
from dtrain.config.schema import default
from dtrain.config.word import cut, slug, spelling
from dtrain.errors import StoreError, WordsError
from dtrain.report import of_run, of_sweep, page, runs
from dtrain.report.of_sweep import Sweep
from dtrain.secrets import masked, screen
from dtrain.storage import store
from dtrain.sweep import folder


@store.starting()
def run(words: Sequence[str]) -> int:
    place, target = _read(words)
    if store.exists(store.join(place, "config.yaml")) and not store.exists(store.join(place, "sweep.yaml")):
        data = of_run.data(runs.below(place)[0])
    else:
        sweep = _sweep(place)
        jobs = of_sweep.read(place, sweep)
        if not jobs:
            raise StoreError.during("find runs in", place, "there is no run. A run has a config.yaml")
        data = of_sweep.data(place, jobs, sweep)
    text = page.document(data).encode()
    store.write(target, text)
    screen.say(f"wrote {cut(masked(target))}, {len(text) / 1e6:.2g} MB. Open it in a browser.")
    return 0


def _read(words: Sequence[str]) -> tuple[str, str]:
    """The place of the run or sweep, and of the page. Raises WordsError."""
    targets = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    storage = [word for word in words if word.startswith("out_options.")]
    places = [word for word in words if word not in storage and not word.startswith("to=")]
    if len(places) != 1 or len(targets) > 1 or (targets and not targets[0]):
        raise WordsError("report: type dtrain report <a run, or a folder or URL of runs> [to=<file>].")
    place = places[0].rstrip("/") or "/"
    connect(storage, place)
    default = store.join(place, "report.html") if store.is_local(place) else f"{slug([place])}.html"
    target = targets[0] if targets else default
    if store.exists(target) and page.GENERATOR not in store.beginning(target, page.BEGINNING):
        raise WordsError(f"to={cut(masked(target))}: is there, and is no report. Type to=<another file>.")
    return place, target


def _sweep(place: str) -> Sweep:
    """The sweep at a URL as its sweep.yaml has it; a folder of runs has none."""
    there = folder.read(place)
    if there is None:
        return Sweep()
    swept = {key: values for axes in there.spaces for key, values in axes.items()}
    goals = zip(there.study.metrics, there.study.goals, strict=False)
    return Sweep(
        {key: [] if isinstance(values, str) else list(map(spelling, values)) for key, values in swept.items()},
        _count(there),
        {metric: {"max": "highest"}.get(goal, "lowest") for metric, goal in goals},
        screen.on_one_line(_command(place, there)),
    )


def _count(there: folder.Description) -> int | None:
    """The number of jobs of a sweep; None if its spaces overlap, or have keys that exist only under others."""
    if there.study.trials is not None:
        return there.study.trials
    [axes, *others] = there.spaces or [{}]
    if others or any(key.split(".")[0] in axes for key in axes if "." in key):
        return None
    return math.prod(len(values) for values in axes.values())


def _command(place: str, there: folder.Description) -> str:
    """The command that runs what is missing of a sweep."""
    words = [f"{key}={text}" for key, text in there.words.items()]
    swept = {key: values for axes in there.spaces for key, values in axes.items()}
    words += [f"{key}={folder.typed(values)}" for key, values in swept.items()]
    words += [f"{key}={text}" for key, text in there.study.settings().items() if text != spelling(default(key))]
    return " ".join(["python -m dtrain -m", *(screen.typed(masked(word)) for word in [*words, f"sweep.out={place}"])])
