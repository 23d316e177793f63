"""Python packages of this host: the versions of what dtrain stands on, whether torch starts and sees the GPUs, and
plugins of Hydra that break every command.

torch and plugins are loaded in processes of their own, which begin at once and are asked last: they take seconds, and
may crash.
"""

import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

from dtrain.doctor import Case, Finding
from dtrain.storage import store
from dtrain.storage.errors import FAMILY

NEEDS = {
    "torch": ("2.11", ""), "hydra-core": ("1.3.8", "1.5"), "numpy": ("", ""), "fsspec": ("", ""),
    "tensorboard": ("", ""), "safetensors": ("", ""),
    "rich": ("", ""),
}  # fmt: skip
"""Package -> the oldest version that is supported, and the first that is not: as pyproject.toml has them."""
PYTHON = (3, 11)
CLIENTS = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "http": "aiohttp"}
SLOW_SECONDS, GIVE_UP_SECONDS = 30.0, 120.0
"""torch is loaded in one to four seconds from a local disk."""
TORCH = """
import json, time
began = time.perf_counter()
import torch, torch.distributed as dist
seconds, cuda = time.perf_counter() - began, torch.version.cuda
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None
said = {"version": torch.__version__, "seconds": seconds, "cuda": cuda, "nccl": nccl, "gloo": dist.is_gloo_available()}
print(json.dumps({**said, "gpus": torch.cuda.device_count() if cuda else 0}))
"""
PLUGINS = """
import importlib, json, pkgutil, hydra_plugins
broken = {}
for _, name, _ in pkgutil.walk_packages(hydra_plugins.__path__, "hydra_plugins.", onerror=lambda name: None):
    try:
        importlib.import_module(name)
    except BaseException as error:
        broken[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(broken))
"""


def begin(code: str) -> Callable[[], Mapping[str, Any]]:
    """Run `code` in a process of its own, now. What is returned waits for the JSON it prints last; `error` stands in it
    when it failed.
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kept: dict[str, Any] = {}

    def answer() -> Mapping[str, Any]:
        if not kept:
            try:
                out, err = process.communicate(timeout=GIVE_UP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                out, err = "", f"it was not done within {GIVE_UP_SECONDS:.0f} s"
            said = (err.strip().splitlines() or [f"it ended with exit code {process.returncode}"])[-1]
            kept.update(json.loads(out.splitlines()[-1]) if process.returncode == 0 and out else {"error": said})
        return kept

    return answer


def packages(case: Case) -> Iterable[Finding]:
    """The versions, all good ones in one line."""
    good = [f"python {platform.python_version()}", f"dtrain {_version('dtrain') or 'from a checkout'}"]
    if sys.version_info < PYTHON:
        yield Finding(
            "python", "stop", f"{platform.python_version()}: dtrain needs {'.'.join(map(str, PYTHON))} or newer"
        )
    for name, (least, below) in NEEDS.items():
        there = _version(name)
        wrong = judged(name, there, least, below)
        if wrong:
            yield wrong
        else:
            good.append(f"{name} {there}")
    yield Finding("packages", "ok", ", ".join(good))


def judged(name: str, there: str | None, least: str, below: str) -> Finding | None:
    """The problem with the version of a package, if any."""
    spec = name + f">={least}" * bool(least) + f",<{below}" * bool(below)
    if there is None:
        return Finding(name, "stop", "is not installed", f"pip install '{spec}'")
    if (least and _number(there) < _number(least)) or (below and _number(there) >= _number(below)):
        return Finding(name, "stop", f"{there} is not supported", f"pip install '{spec}'")
    return None


def client(case: Case) -> Iterable[Finding]:
    """The package that speaks to the storage of `out`."""
    scheme = case.plan.out.split("://")[0]
    if store.is_local(case.plan.out):
        return
    import fsspec

    package = CLIENTS.get(FAMILY.get(scheme, ""), "fsspec")
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = FAMILY.get(scheme)
        yield Finding(
            "client", "stop", f"{scheme}:// cannot be used: {error}", f"pip install 'dtrain[{extra}]'" if extra else ""
        )
    except ValueError as error:
        yield Finding(
            "client",
            "stop",
            f"{scheme}:// cannot be used: {error}",
            "out=<a URL that fsspec knows>, such as s3://bucket/run",
        )
    else:
        yield Finding("client", "ok", f"{scheme}:// by {package} {_version(package) or ''}".rstrip())


def torch(case: Case) -> Iterable[Finding]:
    """Whether torch can be loaded, how long that takes, and whether it sees the GPUs of the plan."""
    said = case.torch()
    if "error" in said:
        yield Finding("torch", "stop", f"cannot be loaded: {said['error']}", "pip install --force-reinstall torch")
        return
    built = f"CUDA {said['cuda']}, NCCL {said['nccl']}" if said["cuda"] else "for the CPU"
    text = f"{said['version']}, {built}, loaded in {said['seconds']:.1f} s"
    if case.plan.device == "cuda" and said["gpus"] < case.plan.devices:
        why = f"it sees {said['gpus']} GPU(s) where the words need {case.plan.devices} on a node"
        yield Finding(
            "torch",
            "stop",
            f"{text}: {why}",
            "install the build of torch for your driver's CUDA, or put CUDA_VISIBLE_DEVICES= before the command",
            said,
        )
    elif not said["gloo"]:
        yield Finding(
            "torch",
            "stop",
            f"{text}: built without gloo, over which ranks agree",
            "pip install --force-reinstall torch",
            said,
        )
    elif said["seconds"] > SLOW_SECONDS:
        yield Finding(
            "torch",
            "note",
            f"{text}: that is slow",
            "install it on a local disk: a network disk is read file by file",
            said,
        )
    else:
        yield Finding("torch", "ok", text, facts=said)


def plugins(case: Case | None = None) -> Iterable[Finding]:
    """Hydra loads every plugin of the environment whenever it is used, and fails with one that fails."""
    if importlib.util.find_spec("hydra_plugins") is None:
        return
    said = begin(PLUGINS)()
    for name, error in said.items():
        yield Finding(
            "plugins",
            "note",
            f"{name} cannot be loaded, and Hydra loads all it finds: {error}",
            f"pip uninstall {_distribution(name)}",
        )
    if not said:
        yield Finding("plugins", "ok", "those of Hydra that are installed can be loaded")


def _distribution(module: str) -> str:
    """The package to uninstall so that a module of `hydra_plugins` is gone."""
    folder = "/".join(module.split(".")[:2])
    owners = (each.name for each in distributions() if any(str(path).startswith(folder) for path in each.files or ()))
    return next(owners, f"the package that brought {folder}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.split("+")[0])[:3]))
