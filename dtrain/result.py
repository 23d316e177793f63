"""The result of a run: saved as result.json under `out`, and the exit code of the command."""

import hashlib
import os
import resource
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.config.environment import CODE
from dtrain.config.installed import python, version
from dtrain.config.structure import COUNT, FINITE, MAPPING, NUMBER, TEXT, Each, Optional
from dtrain.errors import EXIT_CODES, Status

SHAPE = {
    "status": TEXT, "step": COUNT, "loss": Optional(FINITE), "wall_seconds": NUMBER, "metrics?": MAPPING,
    "versions?": Each(TEXT, named=True),
    "reason?": TEXT, "peak_bytes?": Optional(COUNT), "measured?": Each(COUNT, named=True),
    "stop?": MAPPING, "best?": Each({"value": FINITE, "step": COUNT}, named=True),
    "spent?": Each(NUMBER, named=True),
}  # fmt: skip
"""The structure of result.json."""
PARTS = ("step", "data_wait", "checkpoint_stall", "evaluate", "other")
"""Where the time goes: steps, their wait for samples, saves that they wait for, evaluations, logs and hooks."""
OF_THE_MACHINE = (
    "step_seconds", "samples_per_second", "tokens_per_second", "mfu", "peak_bytes", *(f"time_{part}" for part in PARTS),
)  # fmt: skip
"""Columns of metrics.jsonl about speed and memory, which differ between runs of the same words."""


@dataclass(frozen=True)
class Result:
    """The result of a run. `loss` is the mean over the last step's batch; `metrics` are those of the last evaluation,
    or the result of a command such as `generate`.
    """

    status: Status
    step: int
    loss: float | None
    wall_seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    """Why the run stopped, as a message."""
    peak_bytes: int | None = None
    """Peak memory of rank 0: of its GPU, or of its process on the CPU."""
    measured: dict[str, int] = field(default_factory=dict)
    """The step after which each of `metrics` was measured."""
    stop: dict[str, Any] = field(default_factory=dict)
    """The `stop` of the plan, if it ended the run before its last step."""
    best: dict[str, Any] = field(default_factory=dict)
    """Metric -> `value` and `step` of its best evaluation, for `checkpoint.best` and `stop.metric`."""
    spent: dict[str, float] = field(default_factory=dict)
    """Part -> seconds of this start of the run, on this rank: `start` and PARTS, which add up to its wall clock."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics by which runs are compared: those of the last evaluation, or the best value where that is asked."""
    return {**result.get("metrics", {}), **{name: best["value"] for name, best in result.get("best", {}).items()}}


@cache
def _versions() -> dict[str, str]:
    numbers = {"python": python()}
    packages = ("dtrain", "torch", "numpy", "hydra-core")
    return numbers | {package: version(package) or "checkout" for package in packages}


def versions() -> dict[str, str]:
    """Versions of the packages and the code that determine the results."""
    return _versions() | ({"code": os.environ[CODE]} if os.environ.get(CODE) else {})


def note_code() -> None:
    """Record the commit of this folder for `versions`, here and in the ranks: `3f786850e387`, plus `-dirty` if files
    were changed since.

    Records nothing if the folder is not in git or git does not answer in time. Runs no hook and no file monitor of the
    folder.
    """
    quiet = ("--no-optional-locks", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
    os.environ.pop(CODE, None)
    try:
        answer = subprocess.run(
            ["git", *quiet, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=2,
            check=True,
        )
        os.environ[CODE] = answer.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return


@cache
def source_digest(name: str) -> str:
    """A digest of the Python files of a package or module, which is not imported; empty if it is not here, or is
    installed: then its version tells.
    """
    try:
        spec = find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])
    except ValueError:  # it is no name of a module, or that of a script
        return ""
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin)
    root = file.parent
    if "site-packages" in root.parts and name != "dtrain":
        return ""
    files = sorted(root.rglob("*.py")) if file.name == "__init__.py" else [file]
    # the projects that `dtrain new` copies are inside the package, or beside it in a checkout
    read = [(str(path.relative_to(root)), path.read_bytes()) for path in files if root / "project" not in path.parents]
    return hashlib.sha256(repr(read).encode()).hexdigest()[:12]


def peak_bytes(device: str) -> int:
    """Peak memory of this process so far, on its GPU (`cuda`) or on the host."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
