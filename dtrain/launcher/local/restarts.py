"""The restarts of a run, counted against `launcher.restarts`, in a file that outlives a killed server."""

import contextlib
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.storage import store


@dataclass
class RestartLog:
    """`restarts` without progress: a failure in a later step than any before counts as the first. `furthest`: the last
    step that a rank was in.
    """

    round: int = -1
    restarts: int = 0
    furthest: int = 1
    reason: str = ""

    @staticmethod
    def path(scratch: Path) -> Path:
        return scratch / "restarts.json"

    @classmethod
    def read(cls, scratch: Path) -> "RestartLog":
        path = cls.path(scratch)
        return cls(**json.loads(path.read_text("utf-8"))) if path.exists() else cls()

    def write(self, scratch: Path) -> None:
        store.write(str(self.path(scratch)), json.dumps(asdict(self)).encode())

    def failed(self, scratch: Path, reason: str) -> bool:
        """Count a failure of this round. Returns whether the round came further than any before."""
        step = _furthest(scratch / f"round-{self.round}")
        further = step > self.furthest
        self.furthest, self.reason = max(step, self.furthest), reason
        self.restarts = 1 if further else self.restarts + 1
        return further


def _furthest(folder: Path) -> int:
    """The last step that a rank of a round was in; 0 if none reported a step."""
    steps = [0]
    for path in folder.glob("*.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
            steps.append(int(json.loads(path.read_text("utf-8"))["step"]))
    for path in folder.glob("step-*"):  # kept in memory that outlives a killed rank
        with contextlib.suppress(struct.error):
            steps.append(struct.unpack_from("<q", path.read_bytes())[0])
    return max(steps)
