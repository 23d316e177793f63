"""Detects the machine or allocation, without torch: GPUs, CPU cores, and whether another launcher started the ranks.

conf/cluster describes other machines: `python -m dtrain plan cluster=h100x8 nodes=128` plans for one of them.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from dtrain.cluster import measured
from dtrain.cluster.allocation import External, external, read
from dtrain.cluster.measured import Figures

FILES = Path("/dev")
WSL = "dxg"
"""The device file of all GPUs under WSL, which has none per GPU."""
WSL_NVIDIA_SMI = Path("/usr/lib/wsl/lib/nvidia-smi")
"""nvidia-smi under WSL, which is often not in PATH."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs and CPU cores that this process may use on this host. `memory` in bytes: of one GPU, or of the host if
    it has none.
    """

    gpus: int
    cpus: int
    external: External | None = None
    memory: int = 16 << 30
    gpu: str = ""
    """Name of the first GPU, from its driver."""
    capability: float = 0.0
    """The lowest compute capability of the GPUs (https://developer.nvidia.com/cuda-gpus); 0: not known."""
    threads: int | None = None
    """OMP_NUM_THREADS, if it is a number of threads."""
    devices: int | None = None
    """Ranks per node that the launcher of the nodes asks for."""
    figures: Figures | None = field(default=None, compare=False)
    """Figures of these cores that `dtrain doctor` measured (dtrain.cluster.measured)."""
    unmeasured: str = field(default="", compare=False)
    """Why there are no figures."""


@dataclass(frozen=True)
class Machine:
    """One node of a cluster, as the predictions see it: `gpus` of the kind `gpu`, or no GPU and `cpus` cores.

    Units are bytes, seconds, and bytes per second in one direction. `memory`, `flops` (operations per second by type,
    without sparsity) and memory `bandwidth` are those of one GPU; without GPUs, `memory` and `bandwidth` are those of
    the host and `flops` those of one core. `efficiency` is the fraction of `flops` that training attains in matrix
    products, `attention` that in attention. `intra_node` and `inter_node` are the rates at which one rank sends within
    its node and to other nodes. `price`: of one GPU for an hour, or of one node without GPUs; None: not known.

    Of the memory of a rank, `context` is what libraries keep, `communicator` what each group of ranks keeps to
    communicate, `exchange` what it keeps besides if its ranks exchange rows. `reserve`: bytes that torch's allocator
    reserves for each that it gives out; `reserve_fixed`: without expandable segments.
    """

    gpu: str
    gpus: int
    cpus: int
    memory: int
    context: float
    communicator: float
    exchange: float
    reserve: float
    reserve_fixed: float
    flops: Mapping[str, float]
    efficiency: float
    attention: float
    bandwidth: float
    intra_node: float
    intra_node_latency: float
    inter_node: float
    inter_node_latency: float
    start: float
    host: int
    offload: float
    price: float | None = None

    def seen(self, here: Cluster) -> Cluster:
        """The Cluster that `detect` would return there; the launcher is that of `here`."""
        return Cluster(self.gpus, self.cpus, here.external, self.memory, self.gpu)

    def missing(self, here: Cluster) -> str:
        """Why this host is not such a node; empty if it is."""
        if self.gpus and (here.gpus < self.gpus or self.gpu not in here.gpu):
            return (
                f"this host has {f'{here.gpus} x {here.gpu}'.rstrip(' x') if here.gpus else 'no GPU'}, not "
                f"{self.gpus} x {self.gpu}"
            )
        return "this host has a GPU" if not self.gpus and here.gpus else ""


def detect(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Detect the cluster from this process. Raises EnvironError if the variables of other launchers contradict."""
    outer, place = external(environ), read(environ)
    gpus = visible_gpus(environ)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    wanted = int(threads) if re.fullmatch("0*[1-9][0-9]{0,3}", threads) else None
    devices = place.devices if place else None
    if not gpus:
        figures, unmeasured = measured.read(cpus, environ)
        return Cluster(
            0, cpus, outer, _memory(), threads=wanted, devices=devices, figures=figures, unmeasured=unmeasured
        )
    # each rank may see its own GPU only, as under srun --gpus-per-task=1
    count = outer.local_world if outer and outer.local_world and len(gpus) == 1 else len(gpus)
    memory, capability = min(gpu.memory for gpu in gpus), min(gpu.capability for gpu in gpus)
    return Cluster(
        gpus=count,
        cpus=cpus,
        external=outer,
        memory=memory,
        gpu=gpus[0].name,
        capability=capability,
        threads=wanted,
        devices=devices,
    )


@dataclass(frozen=True)
class GPU:
    """A GPU as its driver reports it; `memory` in bytes. A MIG instance has the `uuid` of its GPU."""

    index: str
    uuid: str
    memory: int
    name: str
    capability: float = 0.0
    divided: bool = False

    def is_called(self, name: str) -> bool:
        return name == self.index or (name.startswith("GPU-") and self.uuid.startswith(name))


UNKNOWN = GPU("", "", 16 << 30, "")
"""A GPU that the driver does not describe."""


def visible_gpus(environ: Mapping[str, str]) -> list[GPU]:
    """The GPUs that CUDA lets this process use."""
    names = visible(environ)
    nodes = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in FILES.glob("nvidia*"))
    absent = not nodes and not (FILES / WSL).exists()
    if names == [] or (names is None and absent):
        return []
    if names and names[0].startswith("MIG-"):
        instance = _mig_instance(names[0])
        return [instance or UNKNOWN] if instance or not absent else []
    listed = _listed()
    if listed is None and absent:
        return []  # the variable alone is no proof of a GPU
    if listed is None:
        return [UNKNOWN] * (nodes if names is None else len(names))
    if names is not None:
        named = [next((gpu for gpu in listed if gpu.is_called(name)), None) for name in names]
        listed = [gpu for gpu in (named[: named.index(None)] if None in named else named) if gpu]
    # CUDA uses one MIG instance, and no whole GPU beside it: https://docs.nvidia.com/datacenter/tesla/mig-user-guide
    instance = next(filter(None, (_mig_instance(gpu.uuid) for gpu in listed if gpu.divided)), None)
    return [instance] if instance else [gpu for gpu in listed if not gpu.divided]


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it; None if it is not set.

    CUDA stops at the first entry that is no GPU (Slurm's NoDevFiles, -1), uses no GPU if one is named twice, and only
    one MIG instance.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    names = list(takewhile(re.compile(r"\d+|(GPU|MIG)-[\w/-]+").fullmatch, names))
    if len(set(names)) < len(names):
        return []
    return names[:1] if names and names[0].startswith("MIG-") else names


def share(environ: Mapping[str, str], node: int, devices: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for one of several nodes on this host: as many GPUs of its own as it has ranks."""
    first = node * devices
    names = visible(environ)
    own = map(str, range(first, first + devices)) if names is None else names[first : first + devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _listed() -> list[GPU] | None:
    """The GPUs that the driver shows to this process; a control group may hide some. None if it does not answer."""
    fields = "index,uuid,memory.total,name"
    rows = _query(f"{fields},mig.mode.current,compute_cap") or _query(fields)  # for drivers before 2021
    try:
        gpus = [
            GPU(
                index=index,
                uuid=uuid,
                memory=int(memory) << 20,
                name=name,
                capability=float(rest[-1] if rest else 0),
                divided="Enabled" in rest,
            )
            for index, uuid, memory, name, *rest in rows
        ]
        return gpus or None
    except ValueError:  # memory shared with the host is not a number
        return None


def _query(fields: str) -> list[list[str]]:
    rows = _smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [[part.strip() for part in row.split(",")] for row in rows]


def _mig_instance(uuid: str) -> GPU | None:
    """The MIG instance with this UUID, or the first one of the GPU with this UUID. It has its own memory and name."""
    whole = ""
    for row in _smi("-L"):
        whole = match[1] if (match := re.search(r"^GPU .*UUID: (GPU-[\w-]+)", row)) else whole
        if (uuid in row or uuid == whole) and (profile := re.search(r"MIG \S*?(\d+)gb\S*", row)):
            return GPU("", whole, int(profile[1]) * 10**9, profile[0])
    return None


def _smi(*arguments: str) -> list[str]:
    """The lines that nvidia-smi prints; none if it fails."""
    try:
        return subprocess.run(
            [nvidia_smi(), *arguments], capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def nvidia_smi() -> str:
    """The command to run for nvidia-smi."""
    return str(WSL_NVIDIA_SMI) if WSL_NVIDIA_SMI.exists() and not shutil.which("nvidia-smi") else "nvidia-smi"


def _memory() -> int:
    """Bytes of memory that this host, or the control group of this process, has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text("utf-8")))
        except (OSError, ValueError):  # no limit, or no control group
            continue
    return min(limits)
