"""Sends what the trackers of a run lack, from the files of the run: `dtrain runs send <out>`."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.errors import StoreError
from dtrain.logger.sender import KILLED, Sender, alone, made, noted
from dtrain.logger.tracker import FOLDER
from dtrain.secrets import MASK
from dtrain.storage import store

FILES = {"rows": "metrics.jsonl", "events": "events.jsonl"}


def send(out: str) -> dict[str, str]:
    """Tracker -> what it said, empty if it has everything now. Raises StoreError if the run has no trackers."""
    names = [name.removesuffix(".json") for name in store.children(store.join(out, FOLDER)) if name.endswith(".json")]
    if not names:
        raise StoreError.during("find trackers of", out, "the run has none", "Type logger=[csv] and others as it runs")
    with _copies(out) as copies:
        return {name: _send(out, name, copies) for name in sorted(names)}


def _send(out: str, word: str, copies: Mapping[str, str]) -> str:
    there, said = noted(out, word), list[str]()
    # what was masked is taken from the environment of the client
    given = {name: value for name, value in there["arguments"].items() if MASK not in str(value)}
    with alone(out, word):
        sender = Sender(
            made(word, {**given, "out": out}), {**there["facts"], "out": out, **copies},
            lambda **message: said.extend(message.values()),
        )  # fmt: skip
        sender.look(_result(out))
        sender.close()
    return said[-1] if said else ""


def _result(out: str) -> Mapping[str, Any]:
    """The result of a run; if it has none, that of one that was killed."""
    try:
        result: dict[str, Any] = json.loads(store.read(store.join(out, "result.json")))
    except (StoreError, ValueError):
        return KILLED
    return result


@contextmanager
def _copies(out: str) -> Iterator[dict[str, str]]:
    """A context in which the files of the run are on this disk."""
    with tempfile.TemporaryDirectory(prefix="dtrain-") as folder:
        paths = {}
        for name, file in FILES.items():
            url = store.join(out, file)
            paths[name] = str(store.local_path(url) if store.is_local(url) else Path(folder, file))
            if not store.is_local(url):
                store.download(url, Path(paths[name]))
        yield paths
