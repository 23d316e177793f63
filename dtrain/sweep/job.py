"""One job of a sweep, in a process that a zygote forked: a complete run, whose output goes to its engine.

Its folder on the local disk holds `log`, a pipe to the engine, and at the end outcome.json: how it ended.
"""

import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.config.environment import BEGAN
from dtrain.errors import DtrainError, LeaseError, StoreError, first_line
from dtrain.launcher import pages, zygote
from dtrain.launcher.run import finished
from dtrain.launcher.run import run as run_plan
from dtrain.launcher.title import retitle
from dtrain.lifecycle import signals
from dtrain.planned import Plan
from dtrain.result import Result, compared, versions
from dtrain.secrets import screen
from dtrain.storage import options, store

OUT_OF_MEMORY = re.compile(
    r"^(torch\.)?OutOfMemoryError\b|\bout of memory\b|DefaultCPUAllocator: can't allocate memory"
)
"""Errors that half the microbatch may avoid."""


def prepare(modules: Sequence[str]) -> None:
    """In the zygote: import what every job would, of dtrain's own modules and of what they load late."""
    for name in modules:
        module = importlib.import_module(name)
        getattr(module, "preload", int)()
    store.children(os.curdir)  # loads what every storage needs
    versions()
    pages.collapse()


def run(plan: Mapping[str, Any], config: str, environment: Mapping[str, str], storage: str, scratch: str) -> None:
    """Run `plan` and write what came of it to <scratch>/outcome.json. `config`: its config.yaml; `environment`:
    variables of its slot; `storage`: as `dtrain.storage.options.hand_over` gives it.
    """
    folder = Path(scratch)
    _print_to(folder / "log")
    options.take_over(storage)
    job = Plan.from_dict(plan)
    retitle(f"dtrain-job {job.out}")
    os.environ.update({**environment, BEGAN: str(time.monotonic())})
    outcome = _run(job, config)
    (folder / "new").write_text(json.dumps(outcome), "utf-8")
    (folder / "new").rename(folder / "outcome.json")


def _print_to(pipe: Path) -> None:
    descriptor = os.open(pipe, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        getattr(sys, name).reconfigure(line_buffering=True)


def _run(plan: Plan, config: str) -> dict[str, Any]:
    try:
        with signals.ending(), zygote.kept():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
            if plan.world > 1:
                zygote.begin()
            result = run_plan(plan, config) or finished(plan)
            assert result
            return _of_result(result)
    except DtrainError as error:
        screen.complain(str(error))
        cause = str(error.facts.get("error") or first_line(error))
        return {"status": "failed", "kind": _kind(error), "error": cause, "exit_code": error.exit_code}
    except KeyboardInterrupt as error:  # StopRequested too
        code = error.exit_code if isinstance(error, signals.StopRequested) else 130
        return {"status": "stopped", "kind": "preempted", "error": first_line(error), "exit_code": code}
    except Exception as error:
        screen.say(secrets.masked(traceback.format_exc().rstrip()), error=True)
        return {
            "status": "failed",
            "kind": "error",
            "error": secrets.masked(f"{type(error).__name__}: {first_line(error)}"),
            "exit_code": 1,
        }


def _of_result(result: Result) -> dict[str, Any]:
    status = "finished" if result.status == "finished" else "stopped"
    by_signal = result.reason.startswith("SIG")
    kind, error = ("preempted", f"stopped by {result.reason}") if by_signal else ("", "")
    return {
        "status": status,
        "kind": kind,
        "error": error,
        "exit_code": result.exit_code,
        "step": result.step,
        "loss": result.loss,
        "metrics": _numbers(compared(result.to_dict())),
        "last": _numbers(result.metrics),
    }


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if type(value) in (int, float)}


def _kind(error: DtrainError) -> str:
    if isinstance(error, LeaseError):
        return "lease"
    if isinstance(error, StoreError):
        return "storage"
    kind = str(error.facts.get("kind") or {2: "words", 3: "preflight"}.get(error.exit_code, "error"))
    return "memory" if kind == "error" and OUT_OF_MEMORY.search(str(error.facts.get("error"))) else kind
