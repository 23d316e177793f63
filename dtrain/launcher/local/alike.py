"""Whether a node is like the server's host: it is compared when it joins, and refused by name if the two differ."""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.config.environment import CODE
from dtrain.config.installed import version
from dtrain.errors import StoreError
from dtrain.planned import Plan
from dtrain.result import note_code, source_digest, versions
from dtrain.storage import store

APART_SECONDS = 300.0
"""Clocks that differ by more are refused: storage refuses them too."""


def facts(plan: Plan) -> dict[str, Any]:
    """Those of this host and of the plan that is run."""
    return {
        "host": socket.gethostname(), "python": _python(), "clock": time.time(), "digest": plan.digest,
        "packages": _packages(("dtrain", "torch", *plan.trust)), "code": os.environ.get(CODE, ""),
        "out": _described(plan.out), "source": source_digest("dtrain"),
    }  # fmt: skip


def of_plan(same: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """The differences of `same` that show once the plan is read here."""
    if plan.digest != same["digest"]:
        yield (
            f"the same plan has the digest {plan.digest} here and {same['digest']} on {same['host']}: their code of "
            "dtrain differs. Install the same one."
        )
    if store.is_local(plan.out) and same["out"] and _described(plan.out) != same["out"]:
        yield (
            f"out={plan.out} is another folder here than on {same['host']}. Type out=<a folder that all nodes share, "
            "or a URL>."
        )


def of_host(same: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for each difference of this host from the server's, whose facts are `same`."""
    there = f"on {same['host']}"
    if _python() != same["python"]:
        yield f"Python is {_python()} here and {same['python']} {there}. Use the same one."
    for package, theirs in same["packages"].items():
        ours = _packages((package,))[package]
        if ours != theirs:
            what = f"pip install {package}=={theirs}" if theirs else f"pip uninstall {package}"
            yield f"{package} is {ours or 'not installed'} here and {theirs or 'a folder'} {there}. Type {what}, here."
    if source_digest("dtrain") != same.get("source"):
        yield f"the source of dtrain here differs from that {there}. Install the same one."
    if not os.environ.get(CODE):
        note_code()
    code = os.environ.get(CODE, "")
    if code and same["code"] and code != same["code"]:
        yield f"this folder is at commit {code}, and at {same['code']} {there}. Check out the same commit."
    apart = abs(time.time() - same["clock"])
    if apart > APART_SECONDS:
        yield f"the clocks here and {there} are {apart:.0f} s apart. Type timedatectl set-ntp true, on both."


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def _packages(names: tuple[str, ...]) -> dict[str, str]:
    """Their versions; empty for one that is no installed distribution, such as a folder."""
    known = versions()
    return {name: known.get(name) or version(name) for name in names}


def _described(out: str) -> str:
    """A digest of plan.yaml under a local `out`; empty if there is none."""
    if not store.is_local(out):
        return ""
    try:
        return hashlib.sha256(store.read(store.join(out, "plan.yaml"))).hexdigest()[:12]
    except StoreError:
        return ""
