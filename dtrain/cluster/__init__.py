"""The machine or allocation, read without torch: GPUs, CPU cores, and whether someone else already started
the ranks.

And what another machine has, in the words of conf/cluster: `python -m dtrain plan cluster=h100x8 nodes=128` plans for
that one from here.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.cluster.allocation import External, external

FILES = Path("/dev")
WSL = "dxg"
"""Under Windows GPUs have this file there, whoever made them, and none of their own."""
OF_WINDOWS = Path("/usr/lib/wsl/lib/nvidia-smi")
"""There its driver lies, often outside of PATH."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Cluster:
    """`gpus` and `cpus` count what this process may use on this host; `memory` in bytes, of one GPU or of the host
    where there is none.
    """

    gpus: int
    cpus: int
    external: External | None = None
    memory: int = 16 << 30
    gpu: str = ""
    """The driver's name of the first of them."""
    capability: float = 0.0
    """Compute capability of the oldest of them (https://developer.nvidia.com/cuda-gpus); 0: not known."""
    threads: int | None = None
    """OMP_NUM_THREADS."""


@dataclass(frozen=True)
class Machine:
    """One node of a cluster, of which the predictions know: `gpus` of the kind `gpu`, or none and `cpus` cores.

    Bytes, bytes per second one way, seconds. `memory`, `flops` (operations per second by type, without sparsity) and
    `bandwidth` of memory are of one GPU; where there is none `memory` and `bandwidth` are of the host, `flops` of one
    core. `efficiency`: the share of `flops` that products of training attains. `intra_node` and `inter_node`: what one
    rank sends to others of its node and to other nodes.
    """

    gpu: str
    gpus: int
    cpus: int
    memory: int
    flops: Mapping[str, float]
    efficiency: float
    bandwidth: float
    intra_node: float
    intra_node_latency: float
    inter_node: float
    inter_node_latency: float
    start: float
    host: int
    offload: float

    def seen(self, here: Cluster) -> Cluster:
        """As `look` would see it there; who starts the ranks is what it is here."""
        return Cluster(self.gpus, self.cpus, here.external, self.memory, self.gpu)

    def missing(self, here: Cluster) -> str:
        """The reason why this host is not one; empty when it is."""
        if self.gpus and (here.gpus < self.gpus or self.gpu not in here.gpu):
            return (
                f"this host has {f'{here.gpus} x {here.gpu}'.rstrip(' x') if here.gpus else 'no GPU'}, not "
                f"{self.gpus} x {self.gpu}"
            )
        return "this host has a GPU" if not self.gpus and here.gpus else ""


def detect(environ: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster as seen from here. Raises PreflightError where the variables of ranks make no sense."""
    gpus = visible_gpus(environ)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks, threads = external(environ), environ.get("OMP_NUM_THREADS", "").split(",")[0]
    wanted = int(threads) if re.fullmatch("0*[1-9][0-9]{0,3}", threads) else None
    if not gpus:
        return Cluster(0, cpus, ranks, _memory(), threads=wanted)
    count = (
        ranks.local_world if ranks and len(gpus) == 1 else len(gpus)
    )  # each rank sees its own alone, as under srun --gpus-per-task=1
    return Cluster(
        count, cpus, ranks, min(gpu.memory for gpu in gpus), gpus[0].name, min(gpu.capability for gpu in gpus), wanted
    )


@dataclass(frozen=True)
class GPU:
    """As the driver tells of it; `memory` in bytes. `uuid` of a part of a divided one: that of the whole."""

    index: str
    uuid: str
    memory: int
    name: str
    capability: float = 0.0
    divided: bool = False

    def is_called(self, name: str) -> bool:
        return name == self.index or (name.startswith("GPU-") and self.uuid.startswith(name))


UNKNOWN = GPU("", "", 16 << 30, "")
"""One of which the driver does not tell."""


def visible_gpus(environ: Mapping[str, str]) -> list[GPU]:
    """Those that CUDA lets this process use."""
    names = visible(environ)
    nodes = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in FILES.glob("nvidia*"))
    absent = not nodes and not (FILES / WSL).exists()
    if names == [] or (names is None and absent):
        return []
    if names and names[0].startswith("MIG-"):
        part = _part(names[0])
        return [part or UNKNOWN] if part or not absent else []
    there = _told()
    if there is None and absent:
        return []  # a variable alone makes no GPU
    if there is None:
        return [UNKNOWN] * (nodes if names is None else len(names))
    if names is not None:
        named = [next((gpu for gpu in there if gpu.is_called(name)), None) for name in names]
        there = [gpu for gpu in (named[: named.index(None)] if None in named else named) if gpu]
    # CUDA uses one part alone, and beside it no whole GPU: https://docs.nvidia.com/datacenter/tesla/mig-user-guide
    part = next(filter(None, (_part(gpu.uuid) for gpu in there if gpu.divided)), None)
    return [part] if part else [gpu for gpu in there if not gpu.divided]


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it: up to the first entry that is no GPU (Slurm's
    NoDevFiles, -1), nothing when one is named twice, and one part of a divided GPU (MIG) alone. None where it is not
    set.
    """
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return None
    names = [name.strip() for name in said.split(",")]
    wrong = next(
        (number for number, name in enumerate(names) if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name)), len(names)
    )
    names = names[:wrong]
    if len(set(names)) < len(names):
        return []
    return names[:1] if names and names[0].startswith("MIG-") else names


def share(environ: Mapping[str, str], node: int, devices: int) -> dict[str, str]:
    """The variable by which a node that is not alone on its host sees GPUs of its own: as many as it has ranks."""
    first = node * devices
    names = visible(environ)
    own = map(str, range(first, first + devices)) if names is None else names[first : first + devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _told() -> list[GPU] | None:
    """All that the driver shows to this process, which a control group may hide; None where it does not answer."""
    fields = "index,uuid,memory.total,name"
    rows = _query(f"{fields},mig.mode.current,compute_cap") or _query(fields)  # which drivers before 2021 do not know
    try:
        found = [
            GPU(index, uuid, int(memory) << 20, name, float(rest[-1] if rest else 0), "Enabled" in rest)
            for index, uuid, memory, name, *rest in rows
        ]
        return found or None
    except ValueError:  # memory that the host shares has no number
        return None


def _query(fields: str) -> list[list[str]]:
    rows = _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [[part.strip() for part in row.split(",")] for row in rows]


def _part(uuid: str) -> GPU | None:
    """A part of a divided GPU, by its own name, or the first of the GPU of this name. Its figures are not those of the
    whole.
    """
    whole = ""
    for row in _smi("-L"):
        whole = found[1] if (found := re.search(r"^GPU .*UUID: (GPU-[\w-]+)", row)) else whole
        if (uuid in row or uuid == whole) and (profile := re.search(r"MIG \S*?(\d+)gb\S*", row)):
            return GPU("", whole, int(profile[1]) * 10**9, profile[0])
    return None


def _smi(*asked: str) -> list[str]:
    """The lines of nvidia-smi; none where it fails."""
    try:
        return subprocess.run(
            [nvidia_smi(), *asked], capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def nvidia_smi() -> str:
    """The program that tells of GPUs."""
    return str(OF_WINDOWS) if OF_WINDOWS.exists() and not shutil.which("nvidia-smi") else "nvidia-smi"


def _memory() -> int:
    """Of this host as far as its control group lets us."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no limit, or no control group
            continue
    return min(limits)
