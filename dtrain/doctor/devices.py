"""The host's devices: its GPUs and who uses them, the cores and the memory that this process is given, and
shared memory.
"""

import csv
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dtrain.cluster import detect, nvidia_smi, visible_gpus
from dtrain.doctor import Case, Finding

GIB = 1 << 30
SMI = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "driver_version",
)
BUSY_BYTES = 2 * GIB
"""More of a GPU than a driver and its contexts take."""
RANK_BYTES = GIB // 2
"""Memory of a rank before it has a model: torch, and its buffers."""
SHARED_BYTES = GIB
"""Containers have 64 MiB unless they are told otherwise: loading processes and copies in memory need more."""


NO_PROGRAM = "is not there"
MOST = 1 << 20
"""Characters of an answer of nvidia-smi that are read."""


def gpus(case: Case) -> Iterable[Finding]:
    """Each GPU that this process may use, as the driver tells of it."""
    seen = visible_gpus(case.environ)
    rows, error = _smi("gpu", SMI)
    if error and error != NO_PROGRAM and not seen:
        yield Finding("gpu", "note", f"nvidia-smi {error}: ranks compute on the CPU", "run nvidia-smi by hand")
        return
    if error and seen:
        yield Finding(
            "gpu",
            "stop",
            f"{len(seen)} are there, but nvidia-smi {error}",
            "have the driver installed or loaded: nvidia-smi must work",
        )
        return
    if not rows:
        yield Finding("gpu", "ok", "none: ranks compute on the CPU")
        return
    names = {gpu.uuid for gpu in seen}
    users, _ = _smi("compute-apps", ("gpu_uuid", "pid", "process_name", "used_memory"))
    for row in rows:
        if row["uuid"] in names or "" in names:  # the driver has not told which
            yield judged(row, [user for user in users if user["gpu_uuid"] == row["uuid"]])
    if not seen:
        said = case.environ.get("CUDA_VISIBLE_DEVICES")
        why, advice = (
            ("no /dev/nvidia* is", "docker run --gpus all, or what gives a container its GPUs elsewhere")
            if said is None
            else (
                f"CUDA_VISIBLE_DEVICES={said} names none of them",
                "unset CUDA_VISIBLE_DEVICES, unless the CPU is meant",
            )
        )
        yield Finding("gpu", "note", f"{len(rows)} are there, and {why}: ranks compute on the CPU", advice)


def judged(gpu: Mapping[str, str], users: Sequence[Mapping[str, str]]) -> Finding:
    """The verdict on one GPU, as nvidia-smi tells of it and of the processes on it. Memory in MiB."""
    total, used = _number(gpu["memory.total"]) << 20, _number(gpu["memory.used"]) << 20
    text = f"{gpu['index']}: {gpu['name']}, {total / GIB:.0f} GiB, driver {gpu['driver_version']}"
    errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        return Finding(
            "gpu",
            "stop",
            f"{text}: {errors} memory errors that were not corrected",
            "have it reset (nvidia-smi -r) or replaced, or leave it out of CUDA_VISIBLE_DEVICES",
        )
    if gpu["mig.mode.current"] == "Enabled":
        return Finding(
            "gpu",
            "note",
            f"{text}: it is divided (MIG), and NCCL does not connect its parts",
            "devices=1, or nvidia-smi -mig 0",
        )
    if used > BUSY_BYTES:
        who = (
            ", ".join(f"pid {user['pid']} ({Path(user['process_name']).name})" for user in users)
            or "processes that cannot be seen from here"
        )
        return Finding(
            "gpu",
            "note",
            f"{text}: {used / GIB:.1f} GiB are taken by {who}",
            "wait for it, end it, or name other GPUs in CUDA_VISIBLE_DEVICES",
        )
    return Finding("gpu", "ok", f"{text}, free")


def cores(case: Case) -> Iterable[Finding]:
    """Cores that this process may use, against the threads of the ranks of the plan."""
    allowed = float(detect({}).cpus)
    quota = _quota()
    yield threads(
        case.plan.devices,
        case.plan.threads,
        cores=min(allowed, quota or allowed),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        limit=f", of which a control group grants {quota:g}" if quota and quota < allowed else "",
    )


def threads(ranks: int, each: int, *, cores: float, load: float, limit: str = "") -> Finding:
    """The verdict on `ranks` with `each` so many threads, on a host with this load."""
    text = f"{cores:g} core(s){limit}, load {load:.1f}; {ranks} rank(s) of {each} thread(s)"
    if ranks * each > 2 * cores:
        fitting = max(1, int(cores // ranks))
        advice = f"threads={fitting}" if fitting < each else f"devices={max(1, int(cores))}"
        return Finding("cores", "note", f"{text}: more than twice as many as cores", advice)
    if load > cores + 1:
        return Finding("cores", "note", f"{text}: others are computing here", "see them with top")
    return Finding("cores", "ok", text)


def memory(case: Case) -> Iterable[Finding]:
    """Free memory of the host, and of the limit of the control group."""
    free = {
        name: int(line.split()[0]) << 10
        for name, _, line in (each.partition(":") for each in Path("/proc/meminfo").read_text().splitlines())
    }
    limit, used = (
        _cgroup("memory.max", "memory/memory.limit_in_bytes"),
        _cgroup("memory.current", "memory/memory.usage_in_bytes"),
    )
    room = int(limit) - int(used) if limit.isdigit() and used.isdigit() else free["MemAvailable"]
    yield room_for(case.plan.devices, min(room, free["MemAvailable"]), free["MemTotal"])


def room_for(ranks: int, free: int, total: int) -> Finding:
    """The verdict on `free` bytes for ranks that have no model yet."""
    text = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if free < ranks * RANK_BYTES:
        need = f"{ranks} rank(s) take {ranks * RANK_BYTES / GIB:g} GiB before they have a model"
        return Finding("memory", "stop", f"{text}: {need}", "devices=<fewer>, or end what else runs here")
    return Finding("memory", "ok", text)


def shared(case: Case) -> Iterable[Finding]:
    """/dev/shm, through which loading processes hand over samples, and in which copies of a run's state may stand."""
    try:
        place = os.statvfs("/dev/shm")
    except FileNotFoundError:
        yield Finding(
            "shm", "note", "there is no /dev/shm", "docker run --shm-size=8g, or data.workers=0 and checkpoint.memory=0"
        )
        return
    yield shared_room(place.f_frsize * place.f_blocks, place.f_frsize * place.f_bavail)


def shared_room(size: int, free: int) -> Finding:
    text = f"/dev/shm: {free / GIB:.2g} GiB free of {size / GIB:.2g}"
    if free < SHARED_BYTES:
        advice = "docker run --shm-size=8g" if size < SHARED_BYTES else "remove what other programs left in /dev/shm"
        return Finding("shm", "note", f"{text}: little for data.workers and checkpoint.memory", advice)
    return Finding("shm", "ok", text)


def _smi(query: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], str]:
    """Rows of a query of nvidia-smi, and what went wrong."""
    try:
        asked = subprocess.run(
            [nvidia_smi(), f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except FileNotFoundError:
        return [], NO_PROGRAM
    except OSError as error:
        return [], f"cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return [], "has not answered for 20 s"
    if asked.returncode:
        last = (asked.stdout + asked.stderr).strip().splitlines()[-1:] or [f"nothing, exit code {asked.returncode}"]
        return [], f"says: {last[0][:200]}"
    rows = [*csv.reader(asked.stdout[:MOST].splitlines(), skipinitialspace=True)]
    if any(len(row) != len(fields) for row in rows):
        return [], f"answers what cannot be read: {asked.stdout[:40]!r}"
    return [dict(zip(fields, row, strict=True)) for row in rows], ""


def _number(text: str) -> int:
    """0 where nvidia-smi says [N/A]."""
    return int(text) if text.strip().isdigit() else 0


def _quota() -> float | None:
    """Cores that the control group grants, or None."""
    new = _cgroup("cpu.max").split()
    if len(new) == 2 and new[0].isdigit():
        return int(new[0]) / int(new[1])
    old, period = _cgroup("cpu/cpu.cfs_quota_us"), _cgroup("cpu/cpu.cfs_period_us")
    return int(old) / int(period) if old.isdigit() and period.isdigit() else None


def _cgroup(*names: str) -> str:
    """The first of these files of a control group, of version 2 or 1, that is there."""
    for name in names:
        path = Path("/sys/fs/cgroup") / name
        if path.is_file():
            return path.read_text().strip()
    return ""
