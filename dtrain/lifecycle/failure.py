"""Reports of a failed run and its root cause, in one paragraph and in failure.json.

A folder holds the reports of the ranks of one start:

    began-<rank>.json  done-<rank>                  the rank has started; its loop has returned
    failure-<rank>-<ns>.json                        why it ended (kind: error, gpu, words, stopped, hung, lost, timeout)
    report-<rank>.json stack-<rank>.txt step-<rank> its position on SIGUSR2; its stacks; its last step
    loading-<pid>.txt                               the stack of a loading process, requested by its rank
    ended-<rank>.json  lost-<ns>.json               from its agent: exit code, signal, a stopped or lost process
    gpu-<rank>.json    xids-<rank>.json             bus address of its GPU; Xid errors during the run
"""

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception, walk_tb
from typing import Any

from dtrain import secrets
from dtrain.cluster import visible
from dtrain.errors import (
    ChangedError,
    DtrainError,
    LeaseError,
    MovedError,
    PreflightError,
    RankError,
    WordsError,
    first_line,
    sample_of,
    text_of,
)
from dtrain.lifecycle import kernel_log
from dtrain.lifecycle.gpu_faults import fault_of
from dtrain.lifecycle.root_cause import Evidence, find, is_aborted, is_victim, kind_of
from dtrain.lifecycle.signals import StopRequested, asked
from dtrain.lifecycle.stacks import collective, lines, microbatch, own, sent
from dtrain.result import Result
from dtrain.storage import store

STEP = struct.Struct("<qqq")
"""step-<rank>: number of the step, position of its first sample, number of its samples (0 once the step is done)."""

KINDS = ("began", "done", "failure", "report", "stack", "step", "ended", "gpu", "xids")
KIND_OF = {WordsError: "words", LeaseError: "words", ChangedError: "words", MovedError: "lost"}
"""dtrain's own errors -> the kinds that decide about a restart."""
SILENT = "reported nothing"

_known: dict[str, Any] = {}
_left: list[BaseException] = []
_gpus: dict[int, int] = {}
"""pid -> its GPU; a fork inherits the table, but not the GPU"""


@dataclass(frozen=True)
class Failure:
    """A failure for the user. `line`: rank, place and error; `paragraph`: also the state of the other ranks, and the
    stack; `facts`: the content of failure.json.
    """

    line: str
    paragraph: str
    facts: dict[str, Any]


# on a rank


def set_context(**facts: Any) -> None:
    """Record facts for later reports: step, samples, groups."""
    _known.update(facts)


def clear_context() -> None:
    """Forget all facts at the start of a run."""
    _known.clear()
    _left.clear()


def facts_of(error: BaseException, rank: int) -> dict[str, Any]:
    """The report of an error that ends this process."""
    text = message = text_of(error)
    if isinstance(error, DtrainError):
        kind, code = KIND_OF.get(type(error), "error"), error.exit_code
    elif isinstance(error, StopRequested):
        kind, code = "stopped", error.exit_code
    else:
        text, message, code = f"{type(error).__name__}: {text}".rstrip(": "), "".join(format_exception(error)), 1
        kind = kind_of(error, message)
        if sample := sample_of(error):
            text = f"{text.splitlines()[0]}, {sample}"
        if kind in ("error", "gpu") and (fault := fault_of(message)):
            text = f"{f'GPU {_gpu()}: ' * fault.broken}{text.splitlines()[0]} ({fault.meaning})"
    frames = list(walk_tb(error.__traceback__))
    sentence = text.splitlines()[0] if text else ""
    return {
        **_who(rank),
        "step": 0,
        "kind": kind,
        "error": sentence,
        "message": message,
        "exit_code": code,
        **_known,
        "where": sent(error) or own(frames),
        "microbatch": microbatch(frames),
        "collective": collective(frames),
        "stack": lines(frames),
    }


def computes_on(gpu: int) -> None:
    """Record the GPU of this rank, by its number among the visible ones."""
    _gpus[os.getpid()] = gpu


def _gpu() -> str:
    """The GPU of this rank as CUDA_VISIBLE_DEVICES names it, or its number among the visible ones."""
    names, own = visible(os.environ) or [], _gpus.get(os.getpid(), int(os.environ.get("LOCAL_RANK", 0)))
    return names[own] if own < len(names) else str(own)


def report_exception(folder: Path, rank: int, error: BaseException) -> None:
    """Report the error of this rank, once, with its time: the earliest is the root cause. Raises StoreError."""
    error = asked() or error
    if error not in _left:
        _write(folder, f"failure-{rank}-{time.monotonic_ns()}.json", facts_of(error, rank))
        _left[:] = [error]


def report_detected(folder: Path, rank: int | None, kind: str, message: str, **facts: Any) -> None:
    """Report a failure that a watchdog or an agent detected. `rank` None: a node or process was lost."""
    name = "lost" if rank is None else f"failure-{rank}"
    report = {**_who(rank), "step": 0, "kind": kind, "error": message, "message": message, "exit_code": 1}
    _write(folder, f"{name}-{time.monotonic_ns()}.json", {**report, **_known, **facts})


def mark_started(folder: Path, rank: int) -> None:
    _write(folder, f"began-{rank}.json", _who(rank))


def has_gpu(folder: Path, rank: int, address: str) -> None:
    """Record the PCI bus address of this rank's GPU."""
    _write(folder, f"gpu-{rank}.json", {"host": socket.gethostname(), "bus": kernel_log.bus(address)})


def mark_done(folder: Path, rank: int) -> None:
    """Report that the loop of this rank has returned: its exit code no longer matters."""
    (folder / f"done-{rank}").touch()


# on its agent


def is_done(folder: Path, rank: int) -> bool:
    return (folder / f"done-{rank}").exists()


def ended_by_others(folder: Path, rank: int, code: int) -> bool:
    """Whether a rank with this exit code failed only because another rank was lost or kept it waiting."""
    reports, stack = failures(folder, rank), folder / f"stack-{rank}.txt"
    if reports:
        return is_victim(reports[0])
    return stack.exists() and is_aborted(code, stack.read_text("utf-8", errors="replace"))


def report_exit(folder: Path, rank: int, code: int, log: kernel_log.KernelLog) -> None:
    """Report a rank that ended with this exit code, or by the signal -code."""
    for_memory = code == -signal.SIGKILL and log.has_freed_memory()
    _write(folder, f"ended-{rank}.json", {**_seen(rank), "code": code, "for_memory": for_memory})


def log_xids(folder: Path, rank: int, log: kernel_log.KernelLog) -> None:
    """Report Xid errors of the GPUs of this host, in a file named by one of its ranks."""
    if xids := log.xids():
        _write(folder, f"xids-{rank}.json", {"xids": [{**one, "host": socket.gethostname()} for one in xids]})


def report_unresponsive(folder: Path, rank: int, pid: int) -> None:
    """Report a living rank that does not respond, with its state in /proc."""
    stat = Path(f"/proc/{pid}/stat")
    state = stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()[0] if stat.exists() else ""
    _write(folder, f"ended-{rank}.json", {**_seen(rank), "code": None, "state": state})


# in the command


def outcome(folder: Path) -> Result:
    """The result of rank 0. Raises the error of the root cause if there is none."""
    if (folder / "result.json").exists():
        return Result(**json.loads((folder / "result.json").read_text("utf-8")))
    failure = explain(folder)
    if failure.facts["kind"] == "stopped":
        by_user = failure.facts["exit_code"] == StopRequested(signal.SIGINT).exit_code
        raise StopRequested(signal.SIGINT if by_user else signal.SIGTERM)
    raise error_of(failure)


def error_of(failure: Failure) -> DtrainError:
    """The error that ends the command: of the class that dtrain raised on the rank, and with its facts."""
    known = {WordsError.exit_code: WordsError, PreflightError.exit_code: PreflightError}.get(failure.facts["exit_code"])
    error = known(failure.facts["message"]) if known else RankError(failure.paragraph)
    error.facts = failure.facts
    return error


def save(out: str, facts: Mapping[str, Any]) -> None:
    """Write failure.json, but do not replace a root cause by the report of a rank that lost a peer."""
    url = store.join(out, "failure.json")
    if not (facts.get("victim") and store.exists(url)):
        store.write(url, json.dumps(facts, indent=1).encode())


def of_spike(result: Result) -> dict[str, Any]:
    """failure.json of a run that a spike ended."""
    return {
        **_who(0),
        "step": result.step,
        "kind": "spike",
        "error": result.reason,
        "message": result.reason,
        "exit_code": result.exit_code,
    }


def explain(folder: Path) -> Failure:
    """The root cause among the reports of a folder. Those of another host may be malformed: it is then unknown."""
    try:
        return _explain(folder)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        sentence = f"the reports of the ranks cannot be read ({type(error).__name__}: {first_line(error)})"
        return describe({**_who(None), "kind": "lost", "error": sentence, "message": sentence, "exit_code": 1}, [])


def _explain(folder: Path) -> Failure:
    evidence = Evidence(
        began=_read(folder, "began"),
        failures=failures(folder),
        reports=_read(folder, "report"),
        ended=_read(folder, "ended"),
        lost=[json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("lost-*.json"))],
        stacks={
            int(path.stem.split("-")[1]): path.read_text("utf-8", errors="replace")
            for path in folder.glob("stack-*.txt")
        },
        steps={
            int(path.name.split("-")[1]): STEP.unpack(path.read_bytes())
            for path in folder.glob("step-*")
            if path.stat().st_size == STEP.size
        },
        gpus=_read(folder, "gpu"),
        xids=[one for _, report in sorted(_read(folder, "xids").items()) for one in report["xids"]],
    )
    return describe(*find(evidence))


def describe(cause: dict[str, Any], ranks: list[dict[str, Any]]) -> Failure:
    """The root cause as a message, with the state of each rank."""
    where, rank = cause.get("where"), cause.get("rank")
    samples = cause.get("samples")
    step = f" {'in' if samples else 'after'} step {cause['step']}" if cause.get("step") else ""
    if samples:
        part = "" if cause.get("microbatch") is None else f", microbatch {cause['microbatch']}"
        step += f" (positions {samples[0]} to {samples[1]} of the order{part})"
    pid = f", pid {cause['pid']}" if cause.get("pid") else ""
    who = f" [{cause['host']}{pid}]" if rank is not None and cause.get("host") else ""
    verb = cause.get("verb", "failed")
    line = f"rank {rank} {verb}{step}: {cause['error']}" if rank is not None else cause["error"]
    line += f", at {where}" * bool(where) + who
    doing = {other["rank"]: _doing(other) for other in ranks if other["rank"] != rank or cause["kind"] == "hung"}
    others = [f"rank {other} {text}" for other, text in doing.items() if rank is not None or text != SILENT]
    paragraph = ". ".join([line, *[f"Meanwhile: {'; '.join(others)}"] * bool(others)]) + "."
    stack = "\n".join(cause.get("stack") or [])
    if rank is not None and cause["kind"] in ("error", "gpu", "lost", "timeout") and cause["exit_code"] == 1:
        stack = cause["message"]
    message = paragraph if cause["exit_code"] == 1 else cause["message"]
    facts = {**cause, "message": message, "traceback": stack, "ranks": ranks}
    return Failure(line, f"{paragraph}\n{stack}".rstrip(), facts)


def _doing(rank: Mapping[str, Any]) -> str:
    """The last known action of a rank."""
    groups = (rank.get("groups") or {}).items()
    numbers = ", ".join(f"collective {number} of {name}" for name, number in groups if number)
    line = f"at {rank['where']}" if rank.get("where") else ""
    host = f"in {rank['collective']}" if rank.get("collective") else line
    running = (
        f"its GPU in {call['call']}, collective {call['number']} of {name}"
        for name, calls in (rank.get("calls") or {}).items()
        for call in calls
        if call["library"] == "nccl" and call["state"] != "completed"
    )
    host = " ".join(filter(None, [host, f"({numbers})" if numbers else ""]))
    return ", ".join(filter(None, [host, next(running, "")])) or SILENT


def _seen(rank: int | None) -> dict[str, Any]:
    return {"rank": rank, "host": socket.gethostname(), "time": time.time()}


def _who(rank: int | None) -> dict[str, Any]:
    return {**_seen(rank), "pid": os.getpid()}


def _write(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    store.write(str(folder / name), json.dumps(secrets.redact_tree(facts)).encode())


def _read(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    numbers = {path: path.stem.split("-")[1] for path in folder.glob(f"{kind}-*")}
    return {int(number): _json(path) for path, number in numbers.items() if number.isdigit()}


def failures(folder: Path, rank: int | str = "*") -> list[dict[str, Any]]:
    """The reported failures, oldest first: of one rank, or of all."""
    reports = [_json(path) for path in folder.glob(f"failure-{rank}-*.json")]
    return sorted(reports, key=lambda report: float(report["time"]))


def silent_ranks(folder: Path) -> dict[int, int]:
    """Rank -> process, of those of this host that have begun and have told nothing yet."""
    told = {int(path.stem.split("-")[1]) for kind in ("failure", "report") for path in folder.glob(f"{kind}-*.json")}
    return {
        rank: int(facts["pid"])
        for rank, facts in _read(folder, "began").items()
        if rank not in told and facts["host"] == socket.gethostname() and not is_done(folder, rank)
    }


def _json(path: Path) -> dict[str, Any]:
    """The content of a report; empty for a marker file."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8") or "{}")
    return content
