"""Checks of the devices of this host: GPUs and their users, CPU cores, memory and shared memory."""

import csv
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dtrain.cluster import detect, nvidia_smi, visible_gpus
from dtrain.doctor import Case, Finding

GIB = 1 << 30
SMI = "index,uuid,name,memory.total,memory.used,mig.mode.current,ecc.errors.uncorrected.volatile.total,driver_version"
BUSY_BYTES = 2 * GIB
"""More memory of a GPU than its driver and idle contexts use."""
RANK_BYTES = GIB // 2
"""Memory of a rank without a model: torch and its buffers."""
SHARED_BYTES = GIB
"""Containers have 64 MiB by default; data workers and checkpoints in memory need more."""


NO_PROGRAM = "is not installed"
MOST = 1 << 20
"""Most characters of output of nvidia-smi that are read."""


def gpus(case: Case) -> Iterable[Finding]:
    """Each GPU that this process may use, from nvidia-smi."""
    visible = visible_gpus(case.environ)
    rows, error = _smi("gpu", SMI)
    if error and visible:
        advice = "have the driver installed or loaded: nvidia-smi must work"
        yield Finding("gpu", "stop", f"this host has {len(visible)}, but nvidia-smi {error}", advice)
        return
    if error and error != NO_PROGRAM:
        yield Finding("gpu", "note", f"nvidia-smi {error}: ranks compute on the CPU", "run nvidia-smi by hand")
        return
    if not rows:
        yield Finding("gpu", "ok", "none: ranks compute on the CPU")
        return
    names = {gpu.uuid for gpu in visible}
    users, _ = _smi("compute-apps", "gpu_uuid,pid,process_name,used_memory")
    for row in rows:
        if row["uuid"] in names or "" in names:  # unknown UUID
            yield judged(row, [user for user in users if user["gpu_uuid"] == row["uuid"]])
    if not visible:
        names_here = case.environ.get("CUDA_VISIBLE_DEVICES")
        why, advice = "no /dev/nvidia* is", "docker run --gpus all, or the same for another container runtime"
        if names_here is not None:
            why = f"CUDA_VISIBLE_DEVICES={names_here} names none of them"
            advice = "unset CUDA_VISIBLE_DEVICES, unless you want the CPU"
        yield Finding("gpu", "note", f"this host has {len(rows)}, but {why}: ranks compute on the CPU", advice)


def judged(gpu: Mapping[str, str], users: Sequence[Mapping[str, str]]) -> Finding:
    """Judge one GPU from rows of nvidia-smi for it and for its processes. Memory in MiB."""
    total, used = _number(gpu["memory.total"]) << 20, _number(gpu["memory.used"]) << 20
    text = f"{gpu['index']}: {gpu['name']}, {total / GIB:.0f} GiB, driver {gpu['driver_version']}"
    errors = _number(gpu["ecc.errors.uncorrected.volatile.total"])
    if errors:
        advice = "have it reset (nvidia-smi -r) or replaced, or leave it out of CUDA_VISIBLE_DEVICES"
        return Finding("gpu", "stop", f"{text}: {errors} uncorrected memory errors", advice)
    if gpu["mig.mode.current"] == "Enabled":
        advice = "devices=1, or nvidia-smi -mig 0"
        return Finding("gpu", "note", f"{text}: MIG is enabled, and NCCL does not connect MIG instances", advice)
    if used > BUSY_BYTES:
        who = (
            ", ".join(f"pid {user['pid']} ({Path(user['process_name']).name})" for user in users)
            or "processes that cannot be seen from here"
        )
        advice = "wait for it, end it, or name other GPUs in CUDA_VISIBLE_DEVICES"
        return Finding("gpu", "note", f"{text}: {used / GIB:.1f} GiB are used by {who}", advice)
    return Finding("gpu", "ok", f"{text}, free")


def cores(case: Case) -> Iterable[Finding]:
    """Cores that this process may use, and the threads of the ranks."""
    allowed = float(detect({}).cpus)
    quota = _quota()
    yield threads(
        case.plan.devices,
        case.plan.threads,
        cores=min(allowed, quota or allowed),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        limit=f", limited to {quota:g} by a control group" if quota and quota < allowed else "",
    )


def threads(ranks: int, each: int, *, cores: float, load: float, limit: str = "") -> Finding:
    """Judge `ranks` of `each` threads on a host with this load."""
    text = f"{cores:g} core(s){limit}, load {load:.1f}; {ranks} rank(s) of {each} thread(s)"
    if ranks * each > 2 * cores:
        fitting = max(1, int(cores // ranks))
        advice = f"threads={fitting}" if fitting < each else f"devices={max(1, int(cores))}"
        return Finding("cores", "note", f"{text}: more than two threads per core", advice)
    if load > cores + 1:
        return Finding("cores", "note", f"{text}: other processes use the cores", "see them with top")
    return Finding("cores", "ok", text)


def memory(case: Case) -> Iterable[Finding]:
    """Free memory of the host, or of its control group."""
    free = {
        name: int(line.split()[0]) << 10
        for name, _, line in (each.partition(":") for each in Path("/proc/meminfo").read_text("utf-8").splitlines())
    }
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    used = _cgroup("memory.current", "memory/memory.usage_in_bytes")
    room = int(limit) - int(used) if limit.isdigit() and used.isdigit() else free["MemAvailable"]
    yield room_for(case.plan.devices, min(room, free["MemAvailable"]), free["MemTotal"])


def room_for(ranks: int, free: int, total: int) -> Finding:
    """Judge `free` bytes for ranks that have no model yet."""
    text = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    if free < ranks * RANK_BYTES:
        need = f"{ranks} rank(s) take {ranks * RANK_BYTES / GIB:g} GiB before they have a model"
        return Finding("memory", "stop", f"{text}: {need}", "devices=<fewer>, or end other programs")
    return Finding("memory", "ok", text)


def shared(case: Case) -> Iterable[Finding]:
    """/dev/shm: data workers pass samples through it, and it may hold checkpoints in memory."""
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


def _smi(query: str, names: str) -> tuple[list[dict[str, str]], str]:
    """(rows, error) of a query of nvidia-smi; `names`: the fields, with commas."""
    fields = names.split(",")
    try:
        answer = subprocess.run(
            [nvidia_smi(), f"--query-{query}={names}", "--format=csv,noheader,nounits"],
            capture_output=True,
            encoding="utf-8",
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
    if answer.returncode:
        last = (answer.stdout + answer.stderr).strip().splitlines()[-1:] or [f"nothing, exit code {answer.returncode}"]
        return [], f"says: {last[0][:200]}"
    rows = [*csv.reader(answer.stdout[:MOST].splitlines(), skipinitialspace=True)]
    if any(len(row) != len(fields) for row in rows):
        return [], f"gives unreadable output: {answer.stdout[:40]!r}"
    return [dict(zip(fields, row, strict=True)) for row in rows], ""


def _number(text: str) -> int:
    """The number; 0 for [N/A]."""
    return int(text) if text.strip().isdigit() else 0


def _quota() -> float | None:
    """Cores that the control group allows; None without a limit."""
    new = _cgroup("cpu.max").split()
    if len(new) == 2 and new[0].isdigit():
        return int(new[0]) / int(new[1])
    old, period = _cgroup("cpu/cpu.cfs_quota_us"), _cgroup("cpu/cpu.cfs_period_us")
    return int(old) / int(period) if old.isdigit() and period.isdigit() else None


def _cgroup(*names: str) -> str:
    """Content of the first of these control group files (version 2 or 1) that exists; empty if none does."""
    for name in names:
        path = Path("/sys/fs/cgroup") / name
        if path.is_file():
            return path.read_text("utf-8").strip()
    return ""
