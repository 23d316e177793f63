"""The system's limits for a process, and the variables of the environment that change what torch, NCCL or the storage
do.
"""

import os
import re
import resource
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from dtrain.doctor import Case, Finding, Verdict
from dtrain.launcher.preflight import fewest_files

RANK_FILES = 256
"""Descriptors of a rank alone: torch, its threads, streams to a storage."""
ENOUGH_TASKS = 1024
LARGE_DUMP = 1 << 30

Told = tuple[str, str, Verdict, str, str]
VARIABLES: tuple[Told, ...] = (
    ("CUDA_LAUNCH_BLOCKING", "1", "note", "every kernel is waited for: a run is several times slower",
    "unset CUDA_LAUNCH_BLOCKING"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "note", "every collective is checked by another one",
    "unset TORCH_DISTRIBUTED_DEBUG"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1", "note", "the host waits for every collective", "unset TORCH_NCCL_BLOCKING_WAIT"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "note", "a collective that fails hangs", "unset "
        "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCHDYNAMO_DISABLE", "1", "note", "compile=blocks compiles nothing", "unset TORCHDYNAMO_DISABLE"),
    ("TORCH_COMPILE_DISABLE", "1", "note", "compile=blocks compiles nothing", "unset TORCH_COMPILE_DISABLE"),
    ("NCCL_P2P_DISABLE", "1", "note", "GPUs of a host exchange through its memory", "unset NCCL_P2P_DISABLE"),
    ("NCCL_SHM_DISABLE", "1", "note", "GPUs of a host exchange through its network", "unset NCCL_SHM_DISABLE"),
    ("NCCL_IB_DISABLE", "1", "note", "nodes exchange over TCP, where InfiniBand may be there", "unset NCCL_IB_DISABLE"),
    ("NCCL_DEBUG", "INFO", "note", "NCCL writes much to the screen", "NCCL_DEBUG=WARN"),
    ("NCCL_DEBUG", "TRACE", "note", "NCCL writes much to the screen", "NCCL_DEBUG=WARN"),
    ("NCCL_*", "*", "ok", "NCCL is told", ""),
    ("TORCH*", "*", "ok", "torch is told", ""),
    ("PYTORCH_*", "*", "ok", "torch is told", ""),
    ("GLOO_*", "*", "ok", "gloo is told", ""),
    ("CUDA_VISIBLE_DEVICES", "*", "ok", "the GPUs of a run are these", ""),
)  # fmt: skip
"""(name, value, verdict, what it does, advice): the first row that fits speaks.

What they do: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html,
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def files(case: Case) -> Iterable[Finding]:
    """Open files, of which a rank has a socket for each other rank of each group, and a server one for each of its
    nodes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield enough_files(soft, hard, case.plan.world)


def enough_files(soft: int, hard: int, world: int) -> Finding:
    """The verdict on these limits for one rank of `world`."""
    need = RANK_FILES + 4 * world
    if soft == resource.RLIM_INFINITY or soft >= need:
        return Finding("nofile", "ok", f"{_limit(soft)} open files")
    advice = (
        f"ulimit -n {need}"
        if hard == resource.RLIM_INFINITY or hard >= need
        else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    )
    return Finding(
        "nofile",
        "stop" if soft < fewest_files(world) else "note",
        f"{soft} open files, where a rank of {world} may need {need}",
        advice,
    )


def tasks(case: Case) -> Iterable[Finding]:
    """Processes and threads, by ulimit and by control group; root is not held to the first."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    path = Path("/sys/fs/cgroup/pids.max")
    group = path.read_text().strip() if path.is_file() else "max"
    limits = [
        int(each)
        for each, holds in ((group, group.isdigit()), (soft, soft != resource.RLIM_INFINITY and os.getuid() != 0))
        if holds
    ]
    yield enough_tasks(min(limits, default=-1), case.plan.devices * (case.plan.threads + 16))


def enough_tasks(limit: int, need: int) -> Finding:
    """The verdict on a limit of processes and threads, -1 for none, of which the ranks here take about `need`."""
    if limit == -1 or limit >= max(ENOUGH_TASKS, 2 * need):
        return Finding(
            "nproc",
            "ok",
            f"{'as many' if limit == -1 else limit} processes and threads" + " as there is memory for" * (limit == -1),
        )
    text = f"{limit} processes and threads of this user, of which the ranks take about {need}"
    return Finding("nproc", "stop" if limit < need else "note", text, "ulimit -u 65536, or docker run --pids-limit=-1")


def locked(case: Case) -> Iterable[Finding]:
    """Memory that may be locked: InfiniBand needs it for its buffers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield enough_locked(soft, fast_network=Path("/dev/infiniband").exists())


def enough_locked(soft: int, *, fast_network: bool) -> Finding:
    text = (
        f"{_limit(soft if soft == resource.RLIM_INFINITY else soft >> 20)}{' MiB' * (soft != resource.RLIM_INFINITY)} "
        ""
        ""
        ""
        ""
        ""
        "of locked memory"
    )
    if fast_network and soft != resource.RLIM_INFINITY:
        return Finding(
            "memlock",
            "note",
            f"{text}, and there is InfiniBand, whose buffers are locked",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1",
        )
    return Finding("memlock", "ok", text)


def dumps(case: Case) -> Iterable[Finding]:
    """Core files, which a rank that crashes may leave."""
    yield size_of_dumps(resource.getrlimit(resource.RLIMIT_CORE)[0])


def size_of_dumps(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft > LARGE_DUMP:
        return Finding(
            "core",
            "note",
            "each rank that crashes may write all its memory to a file",
            "ulimit -c 0: the stack is told all the same",
        )
    return Finding(
        "core",
        "ok",
        f"files of {soft >> 20} MiB at most from ranks that crash" if soft else "no files from ranks that crash",
    )


def variables(case: Case) -> Iterable[Finding]:
    """The variables that change what a run does."""
    for name in sorted(case.environ):
        row = next(
            (row for row in VARIABLES if fnmatch(name, row[0]) and fnmatch(case.environ[name].upper(), row[1])), None
        )
        if row:
            yield Finding("variable", row[2], f"{name}={case.environ[name]}: {row[3]}", row[4])
        if name in INTERFACES:
            yield from _interface(name, case.environ[name])


def _interface(name: str, value: str) -> Iterable[Finding]:
    """The interfaces a variable names by their beginnings, `=` before whole names and `^` before those to be left
    out.
    """
    there = [path.name for path in Path("/sys/class/net").glob("*")]
    wanted = [each.split(":")[0] for each in value.lstrip("=").split(",")]
    if there and not value.startswith("^") and not any(one.startswith(each) for one in there for each in wanted):
        yield Finding(
            "variable",
            "stop",
            f"{name}={value}: there is no such interface",
            f"{name}=<one of {', '.join(sorted(there))}>",
        )


def proxies(case: Case) -> Iterable[Finding]:
    """A proxy that is also asked for what stands on this machine."""
    yield from proxied(case.environ)


def proxied(environ: Mapping[str, str]) -> Iterable[Finding]:
    said = {
        name.lower(): value
        for name, value in environ.items()
        if re.fullmatch(r"(https?|all|no)_proxy", name, re.IGNORECASE) and value
    }
    proxy = next((name for name in ("https_proxy", "http_proxy", "all_proxy") if name in said), None)
    if proxy and not {"localhost", "127.0.0.1", "*"} & set(re.split(r"[,\s]+", said.get("no_proxy", ""))):
        text = f"{proxy}={said[proxy]} is also asked for storage on this machine"
        yield Finding("proxy", "note", text, "no_proxy=localhost,127.0.0.1,<hosts of your own> before the command")
    elif proxy:
        yield Finding("proxy", "ok", f"{proxy}={said[proxy]}, but not for {said['no_proxy']}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
