"""Facts of a run that every page shows: its words, plan, machine and the cause of its end, as texts that are safe to
show.

What files say is not trusted: secrets are masked, control characters are escaped, and long texts are cut. The page
itself takes every text as text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import yaml

from dtrain import secrets
from dtrain.errors import StoreError
from dtrain.report.runs import LARGEST, Run, rows
from dtrain.secrets import screen
from dtrain.storage import store

MOST_EVENTS = 4 << 20
"""Most bytes of events.jsonl that are read."""
LONGEST, LONGEST_STACK = 500, 6000
"""Length at which a text, or a traceback, is cut, in characters."""
MOST_ROWS = 400
"""Most rows of a plan."""
STATUS = {
    "finished": "finished", "spiked": "failed", "failed": "failed", "died": "failed", "running": "running",
    "elsewhere": "running", "stopped": "stopped", "interrupted": "stopped", "preempted": "stopped",
}  # fmt: skip
"""Status of a run -> finished, failed, running or stopped; others have not begun."""
NUMBERS = re.compile(r"0x[0-9a-f]+|-?\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?", re.IGNORECASE)


def events(url: str) -> list[Mapping[str, Any]]:
    """The rows of events.jsonl, of a long one its end; none if it cannot be read."""
    try:
        return list(rows(store.ending(store.join(url, "events.jsonl"), MOST_EVENTS)))
    except StoreError:
        return []


@lru_cache(1 << 14)
def shown(text: str, most: int = LONGEST) -> str:
    """`text` on one line, without secrets and control characters."""
    line = screen.on_one_line(secrets.masked(text[: 4 * most]))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def shown_value(key: str, value: Any) -> str:
    """The value of a key, without secrets."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return shown(secrets.HERE.sub(secrets.MASK, secrets.redact_arg(f"{key}={text}"[: 4 * LONGEST]).partition("=")[2]))


def stack(text: str) -> str:
    """The end of a traceback, with its lines."""
    lines = screen.visible(secrets.masked(text[-2 * LONGEST_STACK :]))
    return lines if len(lines) <= LONGEST_STACK else f"...{lines[-LONGEST_STACK:]}"


def alike(cause: str) -> str:
    """The cause of a failure without what differs from job to job: numbers, and what stands in parentheses."""
    return NUMBERS.sub("#", re.sub(r"\([^()]*\)", "", cause.split(". ")[0])).strip()


def cause(run: Run, events: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """The error that ended a run and its traceback; empty if it has not failed."""
    if STATUS.get(run.status) in ("finished", "running"):
        return "", ""
    ends = [event for event in events if event.get("event") == run.status and run.status in ("failed", "spiked")]
    facts = _json(store.join(run.url, "failure.json"))
    texts = (facts.get("error"), *(event.get("error", event.get("reason")) for event in ends[-1:]))
    error = next((text for text in texts if isinstance(text, str) and text), "")
    if not error and STATUS.get(run.status) == "failed":
        error = "its process ended without a word"
    trace = facts.get("traceback")
    return shown(error), stack(trace) if isinstance(trace, str) else ""


def plan(url: str) -> list[tuple[str, str]]:
    """Dotted key -> value of the plan.yaml of a run; empty if it is damaged, or has aliases, which ours have not."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        data = store.beginning(store.join(url, "plan.yaml"), LARGEST)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(data, loader)):
            return []
        leaves = _leaves(yaml.load(data, loader), "")
        return [(shown(key), shown_value(key, value)) for key, value in islice(leaves, MOST_ROWS)]
    except (StoreError, yaml.YAMLError, ValueError, RecursionError):
        return []


def _leaves(tree: Any, above: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        elif value not in (None, {}, []) and name != "_about_":
            yield f"{above}{name}", value


def machine(url: str, events: Iterable[Mapping[str, Any]], plan: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Where a run ran, and with which versions."""
    decided, owner = dict(plan), _owner(url)
    table = [("host", owner)] if owner else []
    table += [(name, decided[name]) for name in ("device", "nodes", "devices", "threads") if name in decided]
    started: Mapping[str, Any] = next(
        (event for event in reversed(list(events)) if event.get("event") == "started"), {}
    )
    table += [
        (name, shown(str(started[name]))) for name in ("ranks", "parameters") if isinstance(started.get(name), int)
    ]
    versions = started.get("versions")
    pairs = versions.items() if isinstance(versions, dict) else ()
    table += [(shown(str(name)), shown(str(text))) for name, text in pairs][:20]
    return table


def _owner(url: str) -> str:
    """user@host of the newest lease."""
    try:
        names = [name for name in store.children(store.join(url, "lease")) if name.endswith(".json")]
        owner = _json(store.join(url, "lease", max(names))).get("owner") if names else ""
    except StoreError:
        return ""
    return shown(owner) if isinstance(owner, str) else ""


def _json(url: str) -> Mapping[str, Any]:
    """A JSON object; empty if it is missing or damaged."""
    try:
        data = json.loads(store.beginning(url, LARGEST))
    except (StoreError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
