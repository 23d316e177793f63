"""The runs under a folder or URL, read from their files: start, changed words, last step, held-out metrics. Needs no
torch.

    outputs/sweep-a/optim.lr-0.001         config.yaml, events.jsonl, result.json, lease: read, never written

The content of these files is not trusted: pass it through `dtrain.config.word.cut` before printing it.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeVar

import yaml

from dtrain.config import files
from dtrain.config.schema import GROUPS, LISTS, WORDS, defaults
from dtrain.config.structure import fault
from dtrain.errors import EXIT_CODES, StoreError
from dtrain.result import SHAPE
from dtrain.storage import lease, store
from dtrain.storage.attempts import STEP

DEEPEST = 3
"""Levels of folders that are searched for runs, such as project and sweep."""
MOST = 10_000
"""Most runs that are read."""
STREAMS = 64
"""Runs read at the same time from a remote storage."""
LARGEST = 1 << 18
"""Most bytes that are read of a config.yaml or result.json, or of the end of a journal."""
LINE = re.compile(r"( *)(?:- override /)?(\w[\w.-]*):(?: (.*))?")
BEGAN = re.compile(rb'\{"time": (\d{1,11}(?:\.\d+)?),')
DECIDES = re.compile(r"(?:objective|model|data)(?:\._target_)?$|checkpoint\.best")
"""Words that decide which metrics a run has, and which direction is better."""
ENDED = (*EXIT_CODES, "failed")
STOPPED = {EXIT_CODES[word]: word for word in ("interrupted", "preempted")}
"""Exit code of a run that was asked to stop before it could write that -> status."""
NEVER = "never began"
Read = TypeVar("Read")


@dataclass(frozen=True)
class Run:
    """`words`: dotted key -> value as text; `at_default`: the keys whose value is the default; `figures`: the newest
    evaluation; `best`: figure -> (value, step), where the best is asked; `began`: seconds since 1970.
    """

    url: str
    name: str
    began: float | None
    words: Mapping[str, str]
    at_default: frozenset[str]
    step: int
    figures: Mapping[str, float]
    status: str
    best: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def compared(self) -> dict[str, float]:
        """The figures by which runs are compared: the best value where that is asked, else the newest."""
        return {**self.figures, **{name: value for name, (value, _) in self.best.items()}}


def below(url: str) -> list[Run]:
    """The run at `url`, or the runs in folders below it, oldest first. Raises StoreError if the folder is missing."""
    return sorted(each(url, lambda run, events: run), key=lambda run: (run.began or math.inf, run.name))


def each(url: str, act: Callable[[Run, bytes], Read]) -> list[Read]:
    """`act(run, the end of its events.jsonl)` of the run at `url`, or of the runs in folders below it, several at a
    time on a remote storage. Raises StoreError if the folder is missing.
    """
    configs: list[tuple[str, bytes]] = []
    level = [url.rstrip("/") or "/"]
    for depth in range(DEEPEST + 1):
        read = [*_each(_config, level, url)]
        configs += [(place, config) for place, (config, _) in zip(level, read, strict=True) if config is not None]
        others = [place for place, (_, is_above) in zip(level, read, strict=True) if is_above]
        if depth == 0 and others and store.is_local(url) and not store.exists(url):
            raise StoreError.during("look for runs in", url, "there is no such folder", kind="missing")
        level = [
            store.join(place, name)
            for place, names in zip(others, _each(_folders, others, url), strict=True)
            for name in names
        ][: MOST * 4]
    return list(_each(lambda pair: act(*_run(*pair, above=url)), configs[:MOST], url))


def _each(act: Any, items: Sequence[Any], url: str) -> Iterable[Any]:
    """`act(item)` for each item; in threads for a remote storage, to hide its latency."""
    if store.is_local(url):
        return map(act, items)
    with ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(act, items))


def _folders(url: str) -> list[str]:
    """Folders directly below `url` that may hold runs."""
    return [name for name in store.folders(url) if not name.startswith(".") and not STEP.fullmatch(name)]


def _config(url: str) -> tuple[bytes | None, bool]:
    """The config.yaml of the run at `url`, empty if it was removed, None if there is no run; and whether folders below
    may hold runs: those of a run do not, unless a sweep shares its folder.
    """
    config = _bytes(store.join(url, "config.yaml"))
    if config is None and store.exists(store.join(url, "plan.yaml")):
        config = b""
    return config, config is None or store.exists(store.join(url, "sweep.yaml"))


def _bytes(url: str) -> bytes | None:
    """The beginning of a file; None if it is missing, or is local and cannot be read."""
    try:
        return store.beginning(url, LARGEST)
    except StoreError as error:
        if error.kind == "missing" or store.is_local(url):
            return None
        raise


def _run(url: str, config: bytes, *, above: str) -> tuple[Run, bytes]:
    """The run at `url`, and the end of its events.jsonl."""
    name = url.removeprefix(above.rstrip("/")).strip("/") or url
    try:
        tail = store.ending(store.join(url, "events.jsonl"), LARGEST)
        first = tail if len(tail) < LARGEST else store.beginning(store.join(url, "events.jsonl"), 64)
    except StoreError:
        first = tail = b""
    began = BEGAN.match(first)
    events = [
        *rows(
            tail, (b'"event": "evaluated"', b'"event": "started"', *(f'"event": "{word}"'.encode() for word in ENDED))
        )
    ]
    last = events[-1] if events else {}
    status = next((str(event["event"]) for event in reversed(events) if event["event"] != "evaluated"), "")
    evaluated = [event for event in events if event["event"] == "evaluated"]  # hooks have steps of their own
    figures = {key: value for event in evaluated for key, value in event.items()}
    result = {} if figures else _result(url)
    best = figures.get("best", result.get("best", {}))
    figures = figures or result.get("metrics") or {}
    if status not in EXIT_CODES:
        status, last = _unended(url, status), {"step": _newest_step(url)}
        if status == NEVER and result.get("status") in EXIT_CODES:  # of a loop of your own, which writes no events
            status, last = result["status"], result
    step = last.get("step")
    words, at_default = changed_words(config.decode(errors="replace"))
    scored = () if fault(best, SHAPE["best?"]) else best.items()
    run = Run(
        url=url,
        name=name,
        began=float(began[1]) if began else None,
        words=words,
        at_default=at_default,
        step=step if type(step) is int and step >= 0 else 0,
        figures={
            key: float(value)
            for key, value in figures.items()
            if key.startswith("eval_") and type(value) in (int, float) and math.isfinite(value)
        },
        status=status,
        best={name: (float(each["value"]), each["step"]) for name, each in scored},
    )
    return run, tail


def rows(data: bytes, wanted: Sequence[bytes] = (b"",)) -> Iterator[Mapping[str, Any]]:
    """The rows of a journal's end that contain one of the texts `wanted`. Incomplete lines and lines that are not JSON
    objects are left out.
    """
    for line in data.splitlines():
        if any(text in line for text in wanted):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("event", ""), str):
                yield row


def _result(url: str) -> Mapping[str, Any]:
    try:
        result = json.loads(_bytes(store.join(url, "result.json")) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return {} if fault(result, SHAPE) else result


def _newest_step(url: str) -> int:
    """The newest step in metrics.jsonl, for a run that has not ended."""
    try:
        tail = store.ending(store.join(url, "metrics.jsonl"), 1 << 13)
    except StoreError:
        return 0
    steps = [row.get("step") for row in rows(tail, (b'"step"',))]
    return next((step for step in reversed(steps) if type(step) is int), 0)


def _unended(url: str, status: str) -> str:
    """The status, according to the lease and failure.json, of a run whose events record no end."""
    try:
        state, _ = lease.holder(url)
        code = lease.exit_code(url)
        has_failed = status == "failed" or store.exists(store.join(url, "failure.json"))
    except StoreError:
        return "unknown"
    if state in ("held", "unknown"):
        return "running" if state == "held" else "elsewhere"
    if code in STOPPED:
        return STOPPED[code]
    if has_failed:
        return "failed"
    if not status:
        return NEVER
    return "died" if code is None else "interrupted"  # what is killed gives no lease back


# changed words


def changed_words(config: str) -> tuple[dict[str, str], frozenset[str]]:
    """Dotted key -> value as text, for the values that config.yaml gives a source, and the keys whose value is the
    default. Read line by line, because parsing YAML takes milliseconds per file.
    """
    choices: dict[str, Any] = {}
    words: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in config.splitlines():
        is_wanted = "  # " in line or line.endswith(":") or "- override /" in line  # few are
        match = LINE.match(line) if is_wanted else None
        if not match:
            continue
        indent, name, rest = len(match[1]), match[2], match[3]
        chosen = "- override /" in line[: indent + 12]
        while above and above[-1][0] >= indent:
            above.pop()
        if not rest:
            above.append((indent, name))
            continue
        if chosen and name in GROUPS:
            text = rest.rpartition("  # ")[0] or rest
            choices[name] = _value(text)
        if "  # " in rest:
            words[name if chosen else ".".join([*(part for _, part in above), name])] = rest.rpartition("  # ")[0]
    return words, frozenset(key for key, text in words.items() if _is_default(key, text, choices))


def _is_default(key: str, text: str, choices: Mapping[str, Any]) -> bool:
    group, *rest = key.split(".")
    word = next(iter(rest), None) if group in LISTS else choices.get(group)
    defaults = _defaults(group, word if isinstance(word, str) else None)
    return key in defaults and bool(defaults[key] == _value(text))


@cache
def _defaults(group: str, word: str | None) -> Mapping[str, Any]:
    """Dotted key -> default, for a group with that word, or for a plain key."""
    if group not in GROUPS:
        return dict(_flat(defaults().get(group), group))
    node = files.node(group, word) if word in files.groups()[group] else {}
    return {group: WORDS[group]} | dict(_flat(node, f"{group}.{word}" if group in LISTS else group))


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}")
    else:
        yield key, value


@lru_cache(4096)
def _value(text: str) -> Any:
    """The value of a text of config.yaml; the text itself if it is not YAML."""
    try:
        return yaml.load(text, files.Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


# directions of metrics


def directions(runs: Iterable[Run]) -> dict[str, str]:
    """Figure -> lowest or highest, as the objectives of the runs, `checkpoint.best_is` and `stop.best_is` state it.
    Figures on which two runs disagree are left out.
    """
    directions_of: dict[str, set[str]] = {}
    seen = set()
    for run in runs:
        deciding = tuple(sorted((key, text) for key, text in run.words.items() if DECIDES.match(key)))
        stated = _stated(run.url) if deciding not in seen else {}
        if stated:
            seen.add(deciding)
            for figure, which in stated.items():
                for name in (figure, figure.replace("eval_", "eval_ema_", 1)):
                    directions_of.setdefault(name, set()).add(which)
    return {figure: min(ways) for figure, ways in directions_of.items() if len(ways) == 1}


def _stated(url: str) -> dict[str, str]:
    """Figure -> lowest or highest, from the plan of a run. Its figures override what was typed."""
    try:
        plan = yaml.load(_bytes(store.join(url, "plan.yaml")) or b"{}", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        checkpoint, stated = plan.get("checkpoint") or {}, plan.get("figures") or {}
        stop = plan.get("stop") or {}
        stated = {
            **({stop["metric"]: stop["is_best"]} if stop.get("metric") else {}),
            **({checkpoint["best"]: checkpoint["best_is"]} if checkpoint.get("best") else {}),
            **stated,
        }
        return {str(figure): which for figure, which in stated.items() if which in ("lowest", "highest")}
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return {}
