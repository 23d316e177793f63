"""Reports of a failed run, and the rank that is the cause: told once, in one paragraph and in failure.json.

A folder holds what the ranks of one start had to say, a file each:

    began-<rank>.json  done-<rank>                  it runs; its loop has returned
    failure-<rank>-<ns>.json                        why it ended (kind: error, gpu, words, stopped, hung, lost, timeout)
    report-<rank>.json stack-<rank>.txt step-<rank> where it was when asked (SIGUSR2); its stack; its last step
    loading-<pid>.txt                               the stack of a loading process, when its rank asked
    ended-<rank>.json  lost-<ns>.json               seen by its agent: exit code, signal, a stopped or lost process
    gpu-<rank>.json    xids-<rank>.json             bus address of its GPU; Xid errors meanwhile
"""

import json
import os
import signal
import socket
import struct
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.cluster import visible
from dtrain.errors import DtrainError, LeaseError, MovedError, PreflightError, RankError, WordsError
from dtrain.lifecycle import kernel_log
from dtrain.lifecycle.gpu_faults import fault_of
from dtrain.lifecycle.root_cause import Evidence, find, is_aborted, is_victim, kind_of
from dtrain.lifecycle.signals import StopRequested, asked
from dtrain.lifecycle.stacks import collective, lines, microbatch, own, sent
from dtrain.result import Result
from dtrain.storage import store

STEP = struct.Struct("<qqq")
"""step-<rank>: the number of the step, the position of its first sample, and how many it takes: none once it is
done.
"""

KINDS = ("began", "done", "failure", "report", "stack", "step", "ended", "gpu", "xids")
KIND_OF = {WordsError: "words", LeaseError: "words", MovedError: "lost"}
"""Kinds of dtrain's own errors after which a restart is of no use, or always is."""
SILENT = "said nothing"

_known: dict[str, Any] = {}
_left: list[BaseException] = []
_gpus: dict[int, int] = {}
"""pid -> the GPU that it computes on: what a fork inherits is not its own."""


@dataclass(frozen=True)
class Failure:
    """`line` says who, where and what; `paragraph` also what the other ranks were doing, and the stack; `facts` are
    failure.json.
    """

    line: str
    paragraph: str
    facts: dict[str, Any]


# on a rank


def know(**facts: Any) -> None:
    """Facts that `leave` adds: step, samples, groups."""
    _known.update(facts)


def forget() -> None:
    """A run begins."""
    _known.clear()
    _left.clear()


def facts_of(error: BaseException, rank: int) -> dict[str, Any]:
    """Facts about the end of this process."""
    message, code = "".join(traceback.format_exception(error)), 1
    if isinstance(error, DtrainError):
        kind, message, code = KIND_OF.get(type(error), "error"), str(error), error.exit_code
    elif isinstance(error, StopRequested):
        kind, message, code = "stopped", str(error), error.exit_code
    else:
        kind = kind_of(error, message)
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    said = (
        str(error)
        if isinstance(error, (DtrainError, StopRequested))
        else f"{type(error).__name__}: {error}".rstrip(": ")
    )
    said = said.splitlines()[0] if said else ""
    if kind in ("error", "gpu") and not isinstance(error, DtrainError) and (fault := fault_of(message)):
        said = f"{f'GPU {_gpu()}: ' * fault.broken}{said} ({fault.said})"
    return {
        **_who(rank), "step": 0, "kind": kind, "error": said, "message": message, "exit_code": code, **_known,
        "where": sent(error) or own(frames), "microbatch": microbatch(frames), "collective": collective(frames),
        "stack": lines(frames),
    }  # fmt: skip


def computes_on(gpu: int) -> None:
    """This rank has that one of the GPUs that it sees."""
    _gpus[os.getpid()] = gpu


def _gpu() -> str:
    """The GPU of this rank: as CUDA_VISIBLE_DEVICES calls it, mostly by its number on the host, or its number among
    those that the rank sees.
    """
    names, own = visible(os.environ) or [], _gpus.get(os.getpid(), int(os.environ.get("LOCAL_RANK", 0)))
    return names[own] if own < len(names) else str(own)


def leave(folder: Path, rank: int, error: BaseException) -> None:
    """Say on a rank what went wrong, once, with the time: the earliest is the cause. Raises StoreError when there is no
    room for it.
    """
    error = asked() or error
    if error not in _left:
        _write(folder, f"failure-{rank}-{time.monotonic_ns()}.json", facts_of(error, rank))
        _left[:] = [error]


def tell(folder: Path, rank: int | None, kind: str, message: str, **facts: Any) -> None:
    """A report that is no exception: of a watchdog of its own rank, an agent of a node that is lost (then `rank`
    is None).
    """
    name = "lost" if rank is None else f"failure-{rank}"
    _write(
        folder,
        f"{name}-{time.monotonic_ns()}.json",
        {
            **_who(rank),
            "step": 0,
            "kind": kind,
            "error": message,
            "message": message,
            "exit_code": 1,
            **_known,
            **facts,
        },
    )


def began(folder: Path, rank: int) -> None:
    _write(folder, f"began-{rank}.json", _who(rank))


def has_gpu(folder: Path, rank: int, address: str) -> None:
    """This rank has the GPU at this address of the PCI bus."""
    _write(folder, f"gpu-{rank}.json", {"host": socket.gethostname(), "bus": kernel_log.bus(address)})


def done(folder: Path, rank: int) -> None:
    """The loop of this rank has returned: whatever it ends with now, it did not leave before."""
    (folder / f"done-{rank}").touch()


# on its agent


def is_done(folder: Path, rank: int) -> bool:
    return (folder / f"done-{rank}").exists()


def of_rank(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The reports of one rank's failure, oldest first."""
    return _failures(folder, str(rank))


def ended_by_others(folder: Path, rank: int, code: int) -> bool:
    """Whether a rank that ended so says only that it had lost another, or that none came."""
    said, stack = of_rank(folder, rank), folder / f"stack-{rank}.txt"
    return is_victim(said[0]) if said else stack.exists() and is_aborted(code, stack.read_text(errors="replace"))


def ended(folder: Path, rank: int, code: int) -> None:
    """A rank ended by itself, with this exit code, or by the signal -code."""
    _write(
        folder, f"ended-{rank}.json", {"rank": rank, "host": socket.gethostname(), "time": time.time(), "code": code}
    )


def heard(folder: Path, rank: int, log: kernel_log.KernelLog) -> None:
    """Report Xid errors of the GPUs of this host, of which `rank` is one rank."""
    if xids := log.xids():
        _write(folder, f"xids-{rank}.json", {"xids": [{**one, "host": socket.gethostname()} for one in xids]})


def look(folder: Path, rank: int, pid: int) -> None:
    """Report a living rank that does not answer, as seen from outside."""
    state = ""
    if Path(f"/proc/{pid}/stat").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    _write(
        folder,
        f"ended-{rank}.json",
        {"rank": rank, "host": socket.gethostname(), "time": time.time(), "code": None, "state": state},
    )


# in the command


def outcome(folder: Path, code: int) -> Result:
    """The result rank 0 left, or the error of the rank that is the cause. `code`: of whoever started the ranks."""
    if (folder / "result.json").exists():
        return Result(**json.loads((folder / "result.json").read_text()))
    failure = explain(folder)
    if failure.facts["kind"] == "stopped":
        raise StopRequested(
            signal.SIGINT if failure.facts["exit_code"] == StopRequested(signal.SIGINT).exit_code else signal.SIGTERM
        )
    raise error_of(failure)


def error_of(failure: Failure) -> DtrainError:
    """The error that ends the command: of its class when dtrain raised it, and with the facts."""
    known = {WordsError.exit_code: WordsError, PreflightError.exit_code: PreflightError}.get(failure.facts["exit_code"])
    error = known(failure.facts["message"]) if known else RankError(failure.paragraph)
    error.facts = failure.facts
    return error


def save(out: str, facts: Mapping[str, Any]) -> None:
    """failure.json. One who only lost a peer does not replace what the cause said."""
    url = store.join(out, "failure.json")
    if not (facts.get("victim") and store.exists(url)):
        store.write(url, json.dumps(facts, indent=1).encode())


def explain(folder: Path) -> Failure:
    """Who is the cause, among all that was left in the folder."""
    evidence = Evidence(
        began=_read(folder, "began"), failures=_failures(folder), reports=_read(folder, "report"),
            ended=_read(folder, "ended"),
        lost=[json.loads(path.read_text()) for path in sorted(folder.glob("lost-*.json"))],
        stacks={int(path.stem.split("-")[1]): path.read_text(errors="replace") for path in folder.glob("stack-*.txt")},
        steps={
            int(path.name.split("-")[1]): STEP.unpack(path.read_bytes())
            for path in folder.glob("step-*") if path.stat().st_size == STEP.size
        },
        gpus=_read(folder, "gpu"), xids=[one for _, said in sorted(_read(folder,
            "xids").items()) for one in said["xids"]],
    )  # fmt: skip
    return told(*find(evidence))


def told(cause: dict[str, Any], ranks: list[dict[str, Any]]) -> Failure:
    """The cause in words, among what each rank was doing."""
    where, rank = cause.get("where"), cause.get("rank")
    samples = cause.get("samples")
    step = f" {'in' if samples else 'after'} step {cause['step']}" if cause.get("step") else ""
    if samples:
        part = "" if cause.get("microbatch") is None else f", microbatch {cause['microbatch']}"
        step += f" (samples {samples[0]} to {samples[1]}{part})"
    who = (
        ""
        if rank is None
        else f" [{cause['host']}, pid {cause['pid']}]"
        if cause.get("pid")
        else f" [{cause['host']}]"
        if cause.get("host")
        else ""
    )
    verb = cause.get("verb", "failed")
    line = f"rank {rank} {verb}{step}: {cause['error']}" if rank is not None else cause["error"]
    line += f", at {where}" * bool(where) + who
    others = [
        f"rank {other['rank']} {_doing(other)}"
        for other in ranks
        if (other["rank"] != rank or cause["kind"] == "hung") and (rank is not None or _doing(other) != SILENT)
    ]
    paragraph = ". ".join([line, *[f"Meanwhile: {'; '.join(others)}"] * bool(others)]) + "."
    stack = (
        cause["message"]
        if rank is not None and cause["kind"] in ("error", "gpu", "lost", "timeout") and cause["exit_code"] == 1
        else "\n".join(cause.get("stack") or [])
    )
    facts = {
        **cause,
        "message": paragraph if cause["exit_code"] == 1 else cause["message"],
        "traceback": stack,
        "ranks": ranks,
    }
    return Failure(line, f"{paragraph}\n{stack}".rstrip(), facts)


def _doing(rank: Mapping[str, Any]) -> str:
    """The last action of a rank, as far as it is known."""
    numbers = ", ".join(
        f"collective {number} of {name}" for name, number in (rank.get("groups") or {}).items() if number
    )
    calls = f"in {rank['collective']}" if rank.get("collective") else f"at {rank['where']}" if rank.get("where") else ""
    device = next(
        (f"its GPU in {call['call']}, collective {call['number']} of {name}" for name,
        told in (rank.get("calls") or {}).items() for call in told
         if call["library"] == "nccl" and call["state"] != "completed"), "",
    )  # fmt: skip
    return (
        ", ".join(filter(None, [" ".join(filter(None, [calls, f"({numbers})" if numbers else ""])), device])) or SILENT
    )


def _who(rank: int | None) -> dict[str, Any]:
    return {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}


def _write(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    store.write(str(folder / name), json.dumps(secrets.redact_tree(facts)).encode())


def _read(folder: Path, what: str) -> dict[int, dict[str, Any]]:
    return {
        int(path.stem.split("-")[1]): _json(path)
        for path in folder.glob(f"{what}-*")
        if path.stem.split("-")[1].isdigit()
    }


def _failures(folder: Path, rank: str = "*") -> list[dict[str, Any]]:
    """The failures that ranks left, oldest first."""
    return sorted(
        (_json(path) for path in folder.glob(f"failure-{rank}-*.json")), key=lambda failure: float(failure["time"])
    )


def _json(path: Path) -> dict[str, Any]:
    """Empty where a file only marks something."""
    text = path.read_text()
    found: dict[str, Any] = json.loads(text) if text else {}
    return found
