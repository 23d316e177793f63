"""What came out of a run: saved as result.json under `out`, and the exit code of the command."""

import platform
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["finished", "stopped", "interrupted", "preempted", "spiked"]
EXIT_CODES: dict[Status, int] = {"finished": 0, "stopped": 0, "interrupted": 130, "preempted": 75, "spiked": 1}


@dataclass(frozen=True)
class Result:
    """`loss` is the mean over the last step's batch; `metrics` holds the last evaluation (held-out data) or a verb's answer."""

    status: Status
    step: int
    loss: float | None
    wall_seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    """Why it stopped, for a person."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    from importlib.metadata import PackageNotFoundError, version  # not at the top: `dtrain plan` answers in half a second

    found = {"python": platform.python_version()}
    for package in ("dtrain", "torch", "numpy", "hydra-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a plain checkout is not installed
            found[package] = "checkout"
    return found
