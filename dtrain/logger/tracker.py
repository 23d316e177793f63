"""Trackers: loggers whose client runs in a process of its own, so that no step waits for it or for its server.

The rank starts that process, which reads the files of the run, and tells it where the run goes on and how it ends. It
imports no client, starts no thread and does not fork afterwards. What the server lacks after a kill or an outage is
sent again from the files, after the step that the server has.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from dtrain.logger import Facts, Logger
from dtrain.logger.journals import Row
from dtrain.secrets import masked, screen
from dtrain.secrets.as_json import clean
from dtrain.storage import options

PATIENCE = 20.0
"""Seconds that the end of a run waits for its trackers."""
FOLDER = "trackers"
"""Of `out`: a file for each tracker, with what it needs to go on."""


@dataclass(frozen=True)
class Run:
    """A run as a tracker names it."""

    id: str
    """Of this run in each tracker, whatever is restarted."""
    name: str
    group: str
    tags: Sequence[str]
    out: str
    settings: Mapping[str, Any]
    """Dotted key -> value of what the plan decided."""
    words: Mapping[str, str]
    """Dotted key -> text of what was typed."""
    known: dict[str, Any]
    """Notes of the tracker itself under `out`, which it may change: its own id."""

    @property
    def config(self) -> dict[str, Any]:
        """Settings as mappings of mappings, with the words beside them."""
        return {**nested(self.settings), "words": dict(self.words), "out": self.out}

    @property
    def flat(self) -> dict[str, Any]:
        """Settings by dotted key, words by `words.<key>`."""
        return {**self.settings, **{f"words.{key}": text for key, text in self.words.items()}, "out": self.out}


@dataclass(kw_only=True)
class Tracker(Logger):
    """The methods of a Logger run in the rank, those below them in the process of the client, where the class is built
    again with the same arguments.
    """

    out: str
    steps: int
    name: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the client, unless they are set."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)
    _heard: bytes = field(default=b"", init=False, repr=False)
    _told: str = field(default="", init=False, repr=False)
    """The newest sentence about what does not go well."""

    @property
    def word(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def arguments(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    def lacks(self) -> str:
        """A sentence about a key that is not here, with what to type; empty."""
        return ""

    # in the rank

    def begin(self, facts: Facts) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dtrain.logger.sender"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**self.variables, **os.environ}, start_new_session=True, bufsize=0,
        )  # fmt: skip
        assert self._process.stdout
        os.set_blocking(self._process.stdout.fileno(), False)
        # with the options are the secrets that it is to mask
        self._tell(word=self.word, arguments=self.arguments(), facts=asdict(facts), storage=options.hand_over())

    def back(self, step: int) -> None:
        self._tell(back=step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Raises RuntimeError if the process has ended by itself."""
        self._hear()
        if self._process and self._process.poll() is not None:
            self._kill()
            raise RuntimeError(self._missing(f"its process ended with {self._process.returncode}"))

    def end(self, result: Mapping[str, Any]) -> None:
        process, deadline = self._process, time.monotonic() + PATIENCE
        assert process and process.stdout and process.stdin
        with suppress(OSError):  # it has ended
            self._tell(end=clean(result))
            process.stdin.close()
        while process.poll() is None and time.monotonic() < deadline:
            select.select([process.stdout], [], [], 0.1)
            self._hear()
        self._hear()
        if process.poll() != 0:
            self._say(self._missing(f"its server has not taken all rows within {PATIENCE:.0f} s"))
        self._kill()

    def _tell(self, **message: Any) -> None:
        """Raises OSError if the process has ended."""
        assert self._process and self._process.stdin
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _hear(self) -> None:
        """Print what the process says."""
        assert self._process and self._process.stdout
        with suppress(BlockingIOError):
            while part := self._process.stdout.read(1 << 16):
                self._heard += part
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._told = message.get("trouble", self._told)
            more = ". Training goes on, and rows are sent once that works" if "trouble" in message else ""
            self._say(message.get("say", self._told) + more)

    def _missing(self, otherwise: str) -> str:
        command = f"dtrain runs send {screen.typed(self.out)}"
        return f"{self._told or otherwise}. Its rows are kept: {command} sends what is missing"

    def _say(self, text: str) -> None:
        screen.say(screen.on_one_line(f"dtrain: logger {self.word}: {masked(text)}"))

    def _kill(self) -> None:
        """End the process, and those that its client started."""
        assert self._process
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(OSError):
                    pipe.close()

    # in the process of the client

    def connect(self, run: Run) -> int:
        """Begin the run in the tracker, or go on with it. Returns the last step whose row it has, 0 for none. Called
        again after an error. Each method may raise what its client raises.
        """
        raise NotImplementedError

    def forget(self, step: int) -> None:
        """Steps after `step` were undone. Most trackers keep what they have."""

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows, each after the last one that `connect` returned or that was sent, by ascending step."""
        raise NotImplementedError

    def table(self, name: str, lines: Sequence[tuple[int, str]]) -> None:
        """All (step, text) so far of the hook `name`."""

    def refer(self, step: int, url: str) -> None:
        """A checkpoint, of which the tracker gets the URL alone; it may have got it before."""

    def finish(self, result: Mapping[str, Any]) -> str:
        """Tell how the run ended, for `status` killed until it is started again. Returns a sentence about what is only
        here, with the command that sends it; empty.
        """
        return ""


def flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result as dotted keys: `status`, `loss`, `metrics.eval_loss`, `best.eval_loss.step`, ..."""
    found: dict[str, Any] = {}
    left = list(result.items())
    while left:
        key, value = left.pop(0)
        if isinstance(value, Mapping):
            left += [(f"{key}.{name}", item) for name, item in value.items()]
        elif value not in (None, "", []):
            found[key] = value
    return found


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings of mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *above, name = key.split(".")
        place = tree
        for part in above:
            inner = place.setdefault(part, {})
            place = inner if isinstance(inner, dict) else place.setdefault(f"{part}.", {})
        place[name] = value
    return tree
