"""What this machine or allocation has, read without torch: GPUs, CPU cores, and whether someone else already started the ranks."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class External:
    """This process is one of `world` ranks that torchrun (or any launcher that sets RANK and WORLD_SIZE) started.

    `one_store`: all its attempts share a rendezvous store.
    """

    rank: int
    world: int
    local_world: int
    one_store: bool = False


@dataclass(frozen=True)
class Cluster:
    """`gpus` and `cpus` count what this process may use on this host; `memory` in bytes, of one GPU or of the host where there is none."""

    gpus: int
    cpus: int
    external: External | None = None
    memory: int = 16 << 30


def look(environ: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster as seen from here."""
    external = None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world = int(environ["WORLD_SIZE"])
        one_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        external = External(int(environ["RANK"]), world, int(environ.get("LOCAL_WORLD_SIZE", world)), one_store)
    gpus = _gpus(environ)
    return Cluster(gpus, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, external, _memory(gpus))


def _memory(gpus: int) -> int:
    """Of the smallest GPU as its driver tells, or of this host as far as its control group lets us."""
    if gpus:
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            told = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split()
            return min(map(int, told)) << 20
        except (OSError, subprocess.SubprocessError, ValueError):
            return 16 << 30
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
