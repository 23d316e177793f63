"""Checks of resource limits, and of environment variables that change what torch, NCCL or the storage do."""

import os
import re
import resource
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from dtrain.doctor import Case, Finding, Verdict
from dtrain.launcher.preflight import fewest_files

RANK_FILES = 256
"""File descriptors of a rank without peers: torch, its threads, streams to a storage."""
ENOUGH_TASKS = 1024
LARGE_DUMP = 1 << 30

Variable = tuple[str, str, Verdict, str, str]
VARIABLES: tuple[Variable, ...] = (
    ("CUDA_LAUNCH_BLOCKING", "1", "note", "the host waits for every kernel: a run is several times slower",
    "unset CUDA_LAUNCH_BLOCKING"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "note", "a second collective checks every collective",
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
    ("NCCL_*", "*", "ok", "changes NCCL", ""),
    ("TORCH*", "*", "ok", "changes torch", ""),
    ("PYTORCH_*", "*", "ok", "changes torch", ""),
    ("GLOO_*", "*", "ok", "changes gloo", ""),
    ("CUDA_VISIBLE_DEVICES", "*", "ok", "a run uses these GPUs only", ""),
)  # fmt: skip
"""(name, value, verdict, effect, advice); the first matching row counts.

Sources: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html,
https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
"""
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def files(case: Case) -> Iterable[Finding]:
    """Limit of open files: a rank has a socket for each other rank of each group, and a server one for each node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield enough_files(soft, hard, case.plan.world)


def enough_files(soft: int, hard: int, world: int) -> Finding:
    """Judge these limits for one rank of `world`."""
    need = RANK_FILES + 4 * world
    if soft == resource.RLIM_INFINITY or soft >= need:
        return Finding("nofile", "ok", f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} open files")
    advice = (
        f"ulimit -n {need}"
        if hard == resource.RLIM_INFINITY or hard >= need
        else "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536"
    )
    verdict: Verdict = "stop" if soft < fewest_files(world) else "note"
    return Finding("nofile", verdict, f"{soft} open files, but one of {world} ranks may need {need}", advice)


def tasks(case: Case) -> Iterable[Finding]:
    """Limit of processes and threads, by control group and by ulimit, which does not apply to root."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    path = Path("/sys/fs/cgroup/pids.max")
    group = path.read_text("utf-8").strip() if path.is_file() else "max"
    limits = [int(group)] if group.isdigit() else []
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        limits.append(soft)
    yield enough_tasks(min(limits, default=-1), case.plan.devices * (case.plan.threads + 16))


def enough_tasks(limit: int, need: int) -> Finding:
    """Judge a limit of processes and threads (-1: none); the ranks here take about `need`."""
    if limit == -1 or limit >= max(ENOUGH_TASKS, 2 * need):
        return Finding("nproc", "ok", f"{'unlimited' if limit == -1 else limit} processes and threads")
    text = f"{limit} processes and threads for this user; the ranks take about {need}"
    return Finding("nproc", "stop" if limit < need else "note", text, "ulimit -u 65536, or docker run --pids-limit=-1")


def locked(case: Case) -> Iterable[Finding]:
    """Limit of locked memory, which InfiniBand needs for its buffers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield enough_locked(soft, fast_network=Path("/dev/infiniband").exists())


def enough_locked(soft: int, *, fast_network: bool) -> Finding:
    text = f"{'unlimited' if soft == resource.RLIM_INFINITY else f'{soft >> 20} MiB of'} locked memory"
    if fast_network and soft != resource.RLIM_INFINITY:
        advice = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
        return Finding("memlock", "note", f"{text}, but InfiniBand locks its buffers", advice)
    return Finding("memlock", "ok", text)


def dumps(case: Case) -> Iterable[Finding]:
    """Limit of core files, which a crashing rank may leave."""
    yield size_of_dumps(resource.getrlimit(resource.RLIMIT_CORE)[0])


def size_of_dumps(soft: int) -> Finding:
    if soft == resource.RLIM_INFINITY or soft > LARGE_DUMP:
        advice = "ulimit -c 0: dtrain still reports the stack"
        return Finding("core", "note", "each crashing rank may write all its memory to a file", advice)
    amount = f"at most {soft >> 20} MiB" if soft else "no core file"
    return Finding("core", "ok", f"a crashing rank writes {amount}")


def variables(case: Case) -> Iterable[Finding]:
    """Environment variables that change what a run does."""
    for name in sorted(case.environ):
        row = next(
            (row for row in VARIABLES if fnmatch(name, row[0]) and fnmatch(case.environ[name].upper(), row[1])), None
        )
        if row:
            yield Finding("variable", row[2], f"{name}={case.environ[name]}: {row[3]}", row[4])
        if name in INTERFACES:
            yield from _interface(name, case.environ[name])


def _interface(name: str, value: str) -> Iterable[Finding]:
    """Check that the interfaces exist. A variable names them by prefix; `=` marks exact names, `^` exclusions."""
    interfaces = [path.name for path in Path("/sys/class/net").glob("*")]
    wanted = [each.split(":")[0] for each in value.lstrip("=").split(",")]
    if (
        interfaces
        and not value.startswith("^")
        and not any(name.startswith(prefix) for name in interfaces for prefix in wanted)
    ):
        advice = f"{name}=<one of {', '.join(sorted(interfaces))}>"
        yield Finding("variable", "stop", f"{name}={value}: there is no such interface", advice)


def proxies(case: Case) -> Iterable[Finding]:
    """A proxy that is also used for storage on this machine."""
    yield from proxied(case.environ)


def proxied(environ: Mapping[str, str]) -> Iterable[Finding]:
    proxies = {
        name.lower(): value
        for name, value in environ.items()
        if re.fullmatch(r"(https?|all|no)_proxy", name, re.IGNORECASE) and value
    }
    proxy = next((name for name in ("https_proxy", "http_proxy", "all_proxy") if name in proxies), None)
    if proxy and not {"localhost", "127.0.0.1", "*"} & set(re.split(r"[,\s]+", proxies.get("no_proxy", ""))):
        text = f"{proxy}={proxies[proxy]} is also used for storage on this machine"
        yield Finding("proxy", "note", text, "no_proxy=localhost,127.0.0.1,<your own hosts> before the command")
    elif proxy:
        yield Finding("proxy", "ok", f"{proxy}={proxies[proxy]}, but not for {proxies['no_proxy']}")
