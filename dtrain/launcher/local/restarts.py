"""How often a run was started again, and how far it had come: what counts against `restarts`, and outlives a server
that is killed.
"""

import contextlib
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.storage import store


@dataclass
class RestartLog:
    """`restarts` in a row: a failure in a later step than any before is the first again. `furthest`: the last step that
    ranks were in.
    """

    round: int = -1
    restarts: int = 0
    furthest: int = 1
    reason: str = ""

    @classmethod
    def read(cls, scratch: Path) -> "RestartLog":
        path = scratch / "book.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, scratch: Path) -> None:
        store.write(str(scratch / "book.json"), json.dumps(asdict(self)).encode())

    def failed(self, scratch: Path, reason: str) -> bool:
        """Count a failure of this round. Whether it had come further than any before."""
        step = _furthest(scratch / f"round-{self.round}")
        further = step > self.furthest
        self.furthest, self.reason = max(step, self.furthest), reason
        self.restarts = 1 if further else self.restarts + 1
        return further


def _furthest(folder: Path) -> int:
    """The last step that a rank of a round was in; 0 when none said so."""
    steps = [0]
    for path in folder.glob("*.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            steps.append(int(json.loads(path.read_text())["step"]))
    for path in folder.glob("step-*"):  # kept in memory that outlives a killed rank
        with contextlib.suppress(struct.error):
            steps.append(struct.unpack_from("<q", path.read_bytes())[0])
    return max(steps)
