"""The result of a run: saved as result.json under `out`, and the exit code of the command."""

import os
import platform
import resource
import subprocess
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

from dtrain.config.environment import CODE
from dtrain.config.structure import COUNT, MAPPING, NUMBER, TEXT, Each, Optional

Status = Literal["finished", "stopped", "interrupted", "preempted", "spiked"]
SHAPE = {
    "status": TEXT, "step": COUNT, "loss": Optional(NUMBER), "wall_seconds": NUMBER, "metrics?": MAPPING,
    "versions?": Each(TEXT, named=True),
    "reason?": TEXT, "peak_bytes?": Optional(COUNT),
}  # fmt: skip
"""Of result.json."""
OF_THE_MACHINE = ("step_seconds", "samples_per_second", "tokens_per_second", "mfu", "peak_bytes")
"""Columns of metrics.jsonl that tell how fast the run was and what it took: the same words give other numbers."""
EXIT_CODES: dict[Status, int] = {"finished": 0, "stopped": 0, "interrupted": 130, "preempted": 75, "spiked": 1}


@dataclass(frozen=True)
class Result:
    """`loss` is the mean over the last step's batch; `metrics` holds the last evaluation (held-out data) or a verb's
    answer.
    """

    status: Status
    step: int
    loss: float | None
    wall_seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    """Why it stopped, for a person."""
    peak_bytes: int | None = None
    """The most memory that rank 0 had: of its device, or of its process on the CPU."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def _versions() -> dict[str, str]:
    from importlib.metadata import (
        PackageNotFoundError,
        version,
    )  # not at the top: `dtrain plan` answers in half a second

    found = {"python": platform.python_version()}
    for package in ("dtrain", "torch", "numpy", "hydra-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a plain checkout is not installed
            found[package] = "checkout"
    return found


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return _versions() | ({"code": os.environ[CODE]} if os.environ.get(CODE) else {})


def note_code() -> None:
    """Keep for `versions`, here and in the ranks, which commit this folder is at: `3f786850e387`, `-dirty` where files
    were changed since.

    Nothing is kept where git does not know the folder, or does not answer in time. No hook and no file monitor of the
    folder's is run.
    """
    quiet = ("--no-optional-locks", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
    os.environ.pop(CODE, None)
    try:
        said = subprocess.run(
            ["git", *quiet, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=2,
            check=True,
        )
        os.environ[CODE] = said.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return


def peak_bytes(device: str) -> int:
    """The most memory this process has had so far, of its `cuda` device or of its own."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
