"""The process of a tracker's client: reads the files of the run and sends what the tracker lacks. Needs no torch.

A line of standard input says what to send and where, the next ones where the run goes on and how it ended. Without
such an end the rank was killed: what is there is sent, and the next start goes on after it.
"""

import hashlib
import importlib
import json
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from dtrain.errors import StoreError, text_of
from dtrain.logger.journals import Journals
from dtrain.logger.tracker import FOLDER, PATIENCE, Run, Tracker
from dtrain.secrets.as_json import clean
from dtrain.storage import leftovers, options, store

PERIOD = 0.5
"""Seconds between two looks at the files."""
LONGEST_PAUSE = 15.0
"""Between two tries while the server does not answer."""
LEAVE = 5.0
"""Seconds for what is there when the rank was killed."""
BATCH = 100
"""Rows that are sent at a time."""
KILLED: Mapping[str, Any] = {"status": "killed"}


class Sender:
    """Sends what a tracker lacks. `facts`: a dtrain.logger.Facts as a mapping; `say`: tells the user a sentence, as
    `say` or as `trouble`.
    """

    def __init__(self, tracker: Tracker, facts: Mapping[str, Any], say: Callable[..., None]) -> None:
        self._tracker, self._facts, self._say = tracker, facts, say
        self._journals = Journals(Path(facts["rows"]), Path(facts["events"]), every=facts["every"])
        self._run: Run | None = None
        self._last: int | None = None
        """The last step that the tracker has; None if it must be asked."""
        self._texts, self._referred = dict[str, int](), set[int]()
        self._undone: int | None = None
        self._is_well, self.pause = True, PERIOD

    def back(self, step: int) -> None:
        """The run goes on after `step`."""
        self._journals.again()
        self._last, self._undone = None, step

    def close(self) -> None:
        self._journals.close()

    def look(self, result: Mapping[str, Any] | None = None) -> bool:
        """Send what there is, and the result. Returns whether that was possible."""
        try:
            self._send(result)
        except Exception as error:  # whatever a client raises
            self._last, self.pause = None, min(2 * self.pause, LONGEST_PAUSE)
            if self._is_well:
                self._say(trouble=f"{type(error).__name__}: {text_of(error)}".rstrip("."))
            self._is_well = False
            return False
        if not self._is_well:
            self._say(say="it works again")
        self._is_well, self.pause = True, PERIOD
        return True

    def _send(self, result: Mapping[str, Any] | None) -> None:
        self._journals.read()
        if self._last is None:
            self._connect()
        whole = result is not None and result is not KILLED
        while rows := self._journals.ready(self._last or 0, whole=whole):
            for first in range(0, len(rows), BATCH):
                some = rows[first : first + BATCH]
                self._tracker.send(some)
                self._last = some[-1].step
            self._journals.read()  # there may be more than fit into memory
        for name, lines in self._journals.texts(self._last or 0).items():
            if len(lines) > self._texts.get(name, 0):
                self._tracker.table(name, lines)
                self._texts[name] = len(lines)
        for step, url in self._journals.committed.items():
            if step not in self._referred:
                self._tracker.refer(step, url)
                self._referred.add(step)
        if result is not None:
            if rest := self._tracker.finish(result):
                self._say(say=rest)
            self._save()

    def _connect(self) -> None:
        facts, tracker = self._facts, self._tracker
        if self._run is None:
            there = noted(facts["out"], tracker.word)
            identity = there.get("id") or uuid.uuid4().hex[:8]
            note(
                facts["out"], tracker.word, {**there, "id": identity, "arguments": tracker.arguments(), "facts": facts}
            )
            self._run = Run(
                id=identity,
                name=tracker.name or facts["name"],
                group=tracker.group or facts["group"],
                tags=[*tracker.tags],
                out=facts["out"],
                settings=facts["settings"],
                words=facts["words"],
                known=dict(there.get("known") or {}),
            )
        if self._undone is not None:
            tracker.forget(self._undone)
            self._undone = None
        self._last = tracker.connect(self._run)
        self._save()

    def _save(self) -> None:
        """Note what the tracker knows of the run."""
        out, word = self._facts["out"], self._tracker.word
        there = noted(out, word)
        if self._run and there.get("known") != self._run.known:
            note(out, word, {**there, "known": self._run.known})


def noted(out: str, word: str) -> dict[str, Any]:
    """Notes under `out` about a tracker; empty. Raises StoreError."""
    try:
        found = json.loads(store.read(store.join(out, FOLDER, f"{word}.json")))
    except ValueError:  # a process was killed as it wrote it
        return {}
    except StoreError as error:
        if error.kind == "missing":
            return {}
        raise
    return found if isinstance(found, dict) else {}


def note(out: str, word: str, facts: Mapping[str, Any]) -> None:
    """Note facts about a tracker under `out`. Raises StoreError."""
    store.write(store.join(out, FOLDER, f"{word}.json"), json.dumps(clean(facts), indent=1).encode())


def made(word: str, arguments: Mapping[str, Any]) -> Tracker:
    """The tracker behind a word."""
    module = importlib.import_module(f"dtrain.logger.{word}")
    kinds = (each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__)
    tracker: Tracker = next(each for each in kinds if issubclass(each, Tracker))(**arguments)
    return tracker


def alone(out: str, word: str) -> AbstractContextManager[None]:
    """A context that one process of this host is in at a time: that of a killed rank may still be sending."""
    return leftovers.alone(hashlib.sha256(f"{out} {word}".encode()).hexdigest()[:16])


class Inbox:
    """Lines of a file as mappings. Once it has ended, the process has `seconds_left` to do so too."""

    def __init__(self, file: BinaryIO) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._file = file
        threading.Thread(target=self._listen, name="dtrain-inbox", daemon=True).start()

    def _listen(self) -> None:
        ended = False
        for line in self._file:
            message = json.loads(line)
            ended = ended or "end" in message
            self._messages.put(message)
        if not ended:
            self._messages.put({"end": KILLED})
        time.sleep(PATIENCE if ended else LEAVE)
        os._exit(1)  # whatever the client waits for

    def next(self, seconds: float | None = None) -> dict[str, Any]:
        """The next message within `seconds`; empty if none comes."""
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            return {}


def serve(sender: Sender, inbox: Inbox) -> None:
    """Send until the end of the run is sent."""
    begun, result = False, None
    while True:
        message = inbox.next(sender.pause)
        if "back" in message:
            sender.back(message["back"])
            begun = True
        if "end" in message:
            result = KILLED if message["end"] == KILLED else message["end"]
            sender.pause = PERIOD
        if (begun or result is not None) and sender.look(result) and result is not None:
            return


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what a client prints
    os.nice(5)

    def say(**message: str) -> None:
        answers.write(json.dumps(message) + "\n")

    inbox = Inbox(sys.stdin.buffer)
    asked = inbox.next()
    options.take_over(asked["storage"])
    with alone(asked["facts"]["out"], asked["word"]):
        serve(Sender(made(asked["word"], asked["arguments"]), asked["facts"], say), inbox)
    os._exit(0)  # clients have threads that wait


if __name__ == "__main__":
    main()
