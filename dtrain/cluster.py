"""What this machine or allocation has, read without torch: GPUs, CPU cores, and whether someone else already started the ranks.

And what another machine has, in the words of conf/cluster: `python -m dtrain plan cluster=h100x8 nodes=128` plans for that one from here.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.started import External, external

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Cluster:
    """`gpus` and `cpus` count what this process may use on this host; `memory` in bytes, of one GPU or of the host where there is none."""

    gpus: int
    cpus: int
    external: External | None = None
    memory: int = 16 << 30
    gpu: str = ""
    """What the driver calls the first of them."""


@dataclass(frozen=True)
class Machine:
    """One node of a cluster, of which the predictions know: `gpus` of the kind `gpu`, or none and `cpus` cores.

    Bytes, bytes per second one way, seconds. `memory`, `flops` (operations per second by type, without sparsity) and `bandwidth` of memory are of
    one GPU; where there is none `memory` and `bandwidth` are of the host, `flops` of one core. `reach`: the share of `flops` that products of
    training reach. `inside` and `between`: what one rank sends to others of its node and to other nodes.
    """

    gpu: str
    gpus: int
    cpus: int
    memory: int
    flops: Mapping[str, float]
    reach: float
    bandwidth: float
    inside: float
    inside_latency: float
    between: float
    between_latency: float
    start: float
    host: int
    offload: float

    def seen(self, here: Cluster) -> Cluster:
        """As `look` would see it there; who starts the ranks is what it is here."""
        return Cluster(self.gpus, self.cpus, here.external, self.memory, self.gpu)

    def missing(self, here: Cluster) -> str:
        """What this host lacks to be one; empty when it is."""
        if self.gpus and (here.gpus < self.gpus or self.gpu not in here.gpu):
            return f"this host has {f'{here.gpus} x {here.gpu}'.rstrip(' x') if here.gpus else 'no GPU'}, not {self.gpus} x {self.gpu}"
        return "this host has a GPU" if not self.gpus and here.gpus else ""


def look(environ: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster as seen from here. Raises PreflightError where the variables of ranks make no sense."""
    gpus = _gpus(environ)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Cluster(gpus, cpus, external(environ), *(_driver() if gpus else (_memory(), "")))


def _driver() -> tuple[int, str]:
    """(memory of the smallest GPU, name of the first)."""
    asked = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        rows = [line.split(",", 1) for line in told]
        return min(int(row[0]) for row in rows) << 20, rows[0][1].strip()
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 16 << 30, ""


def _memory() -> int:
    """Of this host as far as its control group lets us."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no limit, or no control group
            continue
    return min(limits)


def _gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
