"""Checks of Python packages: versions of dependencies, torch and its view of the GPUs, and Hydra plugins that break
every command.

torch and plugins take seconds to load and may crash, so separate processes load them: torch starts to load at once and
is checked last.
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import distributions
from typing import Any

from dtrain.config.installed import python, version
from dtrain.doctor import Case, Finding
from dtrain.storage import store
from dtrain.storage.clients import SAME
from dtrain.storage.errors import EXTRA

NEEDS = {
    "torch": ("2.11", ""), "hydra-core": ("1.3.8", "1.5"), "numpy": ("", ""), "fsspec": ("", ""),
    "tensorboard": ("", ""), "safetensors": ("", ""),
    "rich": ("", ""),
}  # fmt: skip
"""Package -> (oldest supported version, first unsupported one), as in pyproject.toml."""
PYTHON = (3, 11)
CLIENTS = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs", "http": "aiohttp"}
SLOW_SECONDS, GIVE_UP_SECONDS = 30.0, 120.0
"""From a local disk torch loads in one to four seconds."""
TORCH = """
import json, time
began = time.perf_counter()
import torch, torch.distributed as dist
seconds, cuda = time.perf_counter() - began, torch.version.cuda
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None
facts = {"version": torch.__version__, "seconds": seconds, "cuda": cuda, "nccl": nccl, "gloo": dist.is_gloo_available()}
print(json.dumps({**facts, "gpus": torch.cuda.device_count() if cuda else 0}))
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
    """Start `code` in a new process. The returned function waits for the JSON on its last line, or returns `error`."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    facts: dict[str, Any] = {}

    def answer() -> Mapping[str, Any]:
        if not facts:
            try:
                out, err = process.communicate(timeout=GIVE_UP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                out, err = "", f"it did not finish within {GIVE_UP_SECONDS:.0f} s"
            last = (err.strip().splitlines() or [f"it ended with exit code {process.returncode}"])[-1]
            facts.update(json.loads(out.splitlines()[-1]) if process.returncode == 0 and out else {"error": last})
        return facts

    return answer


def packages(case: Case) -> Iterable[Finding]:
    """Versions of dtrain's dependencies; all supported ones in one finding."""
    good = [f"python {python()}", f"dtrain {version('dtrain') or 'from a checkout'}"]
    if sys.version_info < PYTHON:
        yield Finding("python", "stop", f"{python()}: dtrain needs {'.'.join(map(str, PYTHON))} or newer")
    for name, (least, below) in NEEDS.items():
        installed = version(name)
        wrong = judged(name, installed, least, below)
        if wrong:
            yield wrong
        else:
            good.append(f"{name} {installed}")
    yield Finding("packages", "ok", ", ".join(good))


def judged(name: str, installed: str, least: str, below: str) -> Finding | None:
    """The problem with the version of a package; None if it is supported."""
    spec = name + f">={least}" * bool(least) + f",<{below}" * bool(below)
    if not installed:
        return Finding(name, "stop", "is not installed", f"pip install '{spec}'")
    if (least and _number(installed) < _number(least)) or (below and _number(installed) >= _number(below)):
        return Finding(name, "stop", f"{installed} is not supported", f"pip install '{spec}'")
    return None


def client(case: Case) -> Iterable[Finding]:
    """The fsspec client for the storage of `out`."""
    scheme = case.plan.out.split("://")[0]
    if store.is_local(case.plan.out):
        return
    import fsspec

    extra = EXTRA.get(SAME.get(scheme, scheme), "")
    package = CLIENTS.get(extra, "fsspec")
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        yield Finding(
            "client", "stop", f"{scheme}:// cannot be used: {error}", f"pip install 'dtrain[{extra}]'" if extra else ""
        )
    except ValueError as error:
        advice = "out=<a URL that fsspec knows>, such as s3://bucket/run"
        yield Finding("client", "stop", f"{scheme}:// cannot be used: {error}", advice)
    else:
        yield Finding("client", "ok", f"{scheme}:// by {package} {version(package)}".rstrip())


def torch(case: Case) -> Iterable[Finding]:
    """Whether torch loads, how long that takes, and whether it sees the GPUs of the plan."""
    facts = case.torch()
    if "error" in facts:
        yield Finding("torch", "stop", f"cannot be loaded: {facts['error']}", "pip install --force-reinstall torch")
        return
    built = f"CUDA {facts['cuda']}, NCCL {facts['nccl']}" if facts["cuda"] else "for the CPU"
    text = f"{facts['version']}, {built}, loaded in {facts['seconds']:.1f} s"
    if case.plan.device == "cuda" and facts["gpus"] < case.plan.devices:
        why = f"it sees {facts['gpus']} GPU(s) where the words need {case.plan.devices} on a node"
        advice = "install the build of torch for your driver's CUDA, or put CUDA_VISIBLE_DEVICES= before the command"
        yield Finding("torch", "stop", f"{text}: {why}", advice, facts)
    elif not facts["gloo"]:
        advice = "pip install --force-reinstall torch"
        yield Finding("torch", "stop", f"{text}: built without gloo, which ranks need", advice, facts)
    elif facts["seconds"] > SLOW_SECONDS:
        advice = "install it on a local disk: a network disk is read file by file"
        yield Finding("torch", "note", f"{text}: that is slow", advice, facts)
    else:
        yield Finding("torch", "ok", text, facts=facts)


def plugins(case: Case | None = None) -> Iterable[Finding]:
    """Whether every Hydra plugin can be imported: Hydra imports all of them, and fails if one fails."""
    if importlib.util.find_spec("hydra_plugins") is None:
        return
    broken = begin(PLUGINS)()
    for name, error in broken.items():
        advice = f"pip uninstall {_distribution(name)}"
        yield Finding("plugins", "note", f"{name} cannot be imported, and Hydra imports every plugin: {error}", advice)
    if not broken:
        yield Finding("plugins", "ok", "all installed Hydra plugins can be imported")


def _distribution(module: str) -> str:
    """The package that installed a module of `hydra_plugins`."""
    folder = "/".join(module.split(".")[:2])
    owners = (each.name for each in distributions() if any(str(path).startswith(folder) for path in each.files or ()))
    return next(owners, f"the package that brought {folder}")


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.split("+")[0])[:3]))
