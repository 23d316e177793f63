"""Finds the root cause in the reports of all ranks: the first rank that failed by itself, else the one that the others
waited for.
"""

import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.errors import EXIT_CODES
from dtrain.lifecycle.gpu_faults import XIDS, fault_of, of_xid
from dtrain.lifecycle.stacks import current, dumped, waited

Facts = dict[str, Any]

LOST_PEER = re.compile(
    "connection (closed|reset|refused)|broken pipe|connectFullMesh|unhandled system error|remote process "
    "exited|communicator was aborted|got 0 bytes|(send|recv)\\w+ failed",
    re.IGNORECASE,
)
"""torch's messages on a rank that lost another."""
TIMED_OUT = re.compile(
    r"timed out waiting \d+ms|application timeout caused pair closure|wait timeout after \d+|caught collective "
    r"operation timeout"
    "|NCCL timeout (in:|when waiting)|collective operation timed out|watchdog detected operation timeout|work timed "
    "out during",
    re.IGNORECASE,
)
"""torch's messages on a rank that timed out waiting for another."""
SEEN_LATE_SECONDS = 0.5
"""How much later than a victim's report an agent may notice that a rank was killed."""
KILLED = {
    signal.SIGKILL: ("was killed", "SIGKILL, from outside or out of memory"),
    signal.SIGSEGV: ("crashed", "SIGSEGV, a segmentation fault in native code"),
    signal.SIGABRT: ("aborted", "SIGABRT, native code called abort()"),
}
OUT_OF_MEMORY = {"kind": "memory", "error": "SIGKILL, by the kernel: out of memory"}
STATES = ("scheduled", "started", "completed")
"""States of a collective on a device, in the flight recorder."""
SAME_SIZE = ("all_reduce", "broadcast")
"""Collectives whose inputs have the same size on all ranks."""
UNREPORTED = {"verb": "ended without a report", "error": "killed from outside, out of memory, or ended by os._exit"}


@dataclass(frozen=True)
class Evidence:
    """Reports by rank, except `failures` (by time), `lost` (nodes) and `xids` (errors of the driver)."""

    began: Mapping[int, Facts]
    failures: list[Facts]
    reports: Mapping[int, Facts]
    ended: Mapping[int, Facts]
    lost: list[Facts]
    stacks: Mapping[int, str]
    steps: Mapping[int, tuple[int, int, int]]
    gpus: Mapping[int, Facts] = field(default_factory=dict)
    xids: list[Facts] = field(default_factory=list)

    @property
    def spoke(self) -> set[int]:
        return {failure["rank"] for failure in self.failures} | set(self.reports)


def find(evidence: Evidence) -> tuple[Facts, list[Facts]]:
    """The root cause, and the known facts of every rank, in the order of ranks."""
    ranks = sorted({*evidence.began, *evidence.spoke, *evidence.ended})
    known = [_known(evidence, rank) for rank in ranks]
    rules: tuple[Callable[[Evidence, list[Facts]], Facts | None], ...] = (_independent, _hung, _unreported, _earliest)
    for rule in rules:
        cause = rule(evidence, known)
        if cause:
            return _with_driver(evidence, cause, known), known
    raise AssertionError("the last rule always has an answer")


def _with_driver(evidence: Evidence, cause: Facts, known: list[Facts]) -> Facts:
    """The cause, with the driver's error about its GPU. Another rank becomes the cause if its GPU is broken, or if its
    program was stopped while the cause only waited.

    An error of the program that is not about a GPU stays as it is.
    """
    if cause["kind"] in ("words", "stopped") or (cause["kind"] == "error" and not fault_of(cause["message"])):
        return cause
    ranks = {(gpu["host"], gpu["bus"]): rank for rank, gpu in evidence.gpus.items()}
    pairs = ((ranks.get((one["host"], one["bus"])), one) for one in evidence.xids if one["xid"] in XIDS)
    xids = [(rank, one) for rank, one in pairs if rank is not None]
    waited = cause["kind"] == "hung" or cause.get("victim")
    preferences: tuple[Callable[[int, str], bool], ...] = (
        lambda rank, whose: whose == "GPU",
        lambda rank, whose: rank == cause["rank"],
        lambda rank, whose: whose == "program" and bool(waited),
    )
    matches = ((rank, one) for prefers in preferences for rank, one in xids if prefers(rank, XIDS[one["xid"]].whose))
    match = next(matches, None)
    if match is None:
        return cause
    rank, one = match
    text, kind = of_xid(one["xid"], one["bus"]), "gpu" if XIDS[one["xid"]].broken else None
    if rank == cause["rank"]:
        return {**cause, "kind": kind or cause["kind"], "error": f"{cause['error']} ({text})"}
    facts = next((facts for facts in known if facts["rank"] == rank), {"rank": rank})
    errors = [each["error"] for each in evidence.failures if each["rank"] == rank and not is_victim(each)]
    error = f"{errors[0]} ({text})" if errors else text
    return {**facts, "kind": kind or "error", "error": error, "message": "", "exit_code": 1}


def kind_of(error: BaseException, message: str) -> str:
    """The kind of an error: `lost` or `timeout` if torch only reports that another rank was lost or kept it waiting,
    `gpu` if a GPU is broken, else `error`.
    """
    if isinstance(error, OSError):  # from the user's own connections
        return "error"
    if fault := fault_of(message):
        return "gpu" if fault.broken else "error"
    if TIMED_OUT.search(message):
        return "timeout"
    return "lost" if LOST_PEER.search(message) else "error"


def is_victim(failure: Mapping[str, Any]) -> bool:
    """Whether a rank ended because of another one."""
    return failure["kind"] in ("lost", "timeout") or (failure["kind"] == "hung" and bool(failure.get("collective")))


def is_aborted(code: int | None, stack: str) -> bool:
    """Whether a rank with this exit code and stack only waited: NCCL's watchdog ends such a rank by SIGABRT."""
    return code == -signal.SIGABRT and waited(stack) is not None


def _aborted(evidence: Evidence, rank: int) -> bool:
    reported = {failure["rank"] for failure in evidence.failures}
    return rank not in reported and is_aborted(evidence.ended.get(rank, {}).get("code"), evidence.stacks.get(rank, ""))


def _independent(evidence: Evidence, known: list[Facts]) -> Facts | None:
    """The earliest error, signal, exit or lost node that no other rank caused; a broken GPU comes before errors that
    report it.
    """
    own = [failure for failure in evidence.failures if failure["kind"] != "hung" and not is_victim(failure)]
    causes = [(report["time"], report) for report in (*own, *evidence.lost)]
    spoke = {failure["rank"] for failure in evidence.failures}
    for facts in known:
        rank = facts["rank"]
        end = evidence.ended.get(rank, {})
        code = end.get("code")
        if code is not None and rank not in spoke and not _aborted(evidence, rank):
            delay = SEEN_LATE_SECONDS if code in (-signal.SIGKILL, -signal.SIGSEGV) else 0.0
            cause = {**facts, "exit_code": 1, "message": "", **_ending(code, evidence.stacks.get(rank, ""))}
            causes.append((end["time"] - delay, cause | (OUT_OF_MEMORY if end.get("for_memory") else {})))
    return min(causes, key=lambda entry: (entry[1]["kind"] != "gpu", float(entry[0])))[1] if causes else None


def _ending(code: int, stack: str) -> Facts:
    if stack.startswith("Timeout ("):  # its watchdog thread could not run
        return {"kind": "hung", "verb": "hung", "error": "native code held the GIL"}
    if code in (EXIT_CODES["preempted"], EXIT_CODES["interrupted"]):
        return {"kind": "stopped", "verb": "ended", "error": "it was asked to", "exit_code": code}
    if code == 0:
        error = "with exit code 0 before the run was done, by os._exit(0) or the exit of native code"
        return {"kind": "exited", "verb": "left", "error": error}
    if code > 0:
        return {"kind": "exited", "verb": "ended", "error": f"with exit code {code} and without a report"}
    verb, error = KILLED.get(signal.Signals(-code), ("was killed", signal.Signals(-code).name))
    return {"kind": "killed", "verb": verb, "error": error, "signal": signal.Signals(-code).name}


def _hung(evidence: Evidence, known: list[Facts]) -> Facts | None:
    """The rank that the others waited for: it does not respond, is behind in a collective, or is in none."""
    late = [failure for failure in evidence.failures if failure["kind"] in ("hung", "timeout")]
    aborted = [facts["rank"] for facts in known if _aborted(evidence, facts["rank"])]
    if not late and not aborted:
        return None
    hung = {"kind": "hung", "verb": "hung", "exit_code": 1, "message": ""}
    for facts in known:
        if facts["rank"] not in evidence.spoke and facts["rank"] not in aborted:
            state = evidence.ended.get(facts["rank"], {}).get("state")
            if state in ("T", "t"):
                return {**facts, **hung, "verb": "was stopped", "error": "SIGSTOP, and the others waited for it"}
            reason = "native code holds the GIL" if state else "nobody could ask it for its state"
            return {**facts, **hung, "error": f"it did not respond: {reason}"}
    culprit = _mismatched(known) or _behind(known) or _unfinished(known)
    if culprit:
        return {**culprit[0], **hung, "error": culprit[1]}
    idle = [facts for facts in known if not facts.get("collective")]
    if idle and (len(idle) < len(known) or len(known) == 1):
        own = [failure["error"] for failure in late if failure["rank"] == idle[0]["rank"]]
        return {**idle[0], **hung, "error": [*own, "it is in no collective, but the others wait in one"][0]}
    if late:
        return {**late[0], **hung, "error": late[0]["error"] + _all_waiting(known)}
    first = min(aborted, key=lambda rank: float(evidence.ended[rank]["time"]))
    facts = next(facts for facts in known if facts["rank"] == first)
    return {**facts, **_ending(-signal.SIGABRT, ""), "exit_code": 1, "message": ""}


def _behind(known: list[Facts]) -> tuple[Facts, str] | None:
    """A rank that never reached a collective that others of its group are in, and the message."""
    # pipeline stages send different numbers of messages
    names = {name for facts in known for name in facts.get("groups") or {} if not name.startswith("pp")}
    for name in sorted(names, key=lambda name: (name != "the world", name)):
        numbers = [(facts["groups"][name], facts) for facts in known if name in (facts.get("groups") or {})]
        reached, first = max(numbers, key=lambda entry: int(entry[0]))
        late, facts = min(numbers, key=lambda entry: int(entry[0]))
        if late < reached:
            running = [call["call"] for call in _calls(first, name) if call["state"] != "completed"]
            waits = first.get("collective") or next(iter(running), None)
            state = f", where rank {first['rank']} waits in {waits}" if waits else f", as rank {first['rank']} did"
            return facts, f"it never reached collective {late + 1} of {name}{state}"
    return None


def _calls(facts: Facts, name: str) -> list[Facts]:
    """The collectives of a group in the flight recorder (see `dtrain.lifecycle.recorder`)."""
    return [call for call in (facts.get("calls") or {}).get(name, []) if not call["between_two"]]


def _by_number(known: list[Facts]) -> Iterator[tuple[str, list[tuple[Facts, Facts]]]]:
    """Each collective of each group as text, oldest first, with (rank, call) of the ranks that recorded it."""
    names = dict.fromkeys(name for facts in known for name in facts.get("calls") or {} if not name.startswith("pp"))
    for name in sorted(names, key=lambda name: (name != "the world", name)):
        by_number: dict[tuple[str, int], list[tuple[Facts, Facts]]] = {}
        for facts in known:
            for call in _calls(facts, name):
                by_number.setdefault((call["library"], call["number"]), []).append((facts, call))
        for _, number in sorted(by_number):
            yield f"collective {number} of {name}", by_number[_, number]


def _mismatched(known: list[Facts]) -> tuple[Facts, str] | None:
    """A rank that called another collective than most ranks, or with other shapes, and the message."""
    for name, calls in _by_number(known):
        for key in ("call", "sizes"):
            most = Counter(str(call[key]) for _, call in calls).most_common(1)[0][0]
            usual = next(facts["rank"] for facts, call in calls if str(call[key]) == most)
            for facts, call in [each for each in calls if str(each[1][key]) != most][-1:]:
                if key == "call":
                    return facts, f"it calls {call['call']} as {name}, where rank {usual} calls {most}"
                if call["call"] in SAME_SIZE:
                    shapes = f"the shapes {call['sizes']}, where rank {usual} has {most}"
                    return facts, f"it calls {call['call']}, {name}, with {shapes}"
    return None


def _unfinished(known: list[Facts]) -> tuple[Facts, str] | None:
    """A rank whose device has not begun, or not ended, a collective that others have; and the message."""
    for name, calls in _by_number(known):
        # gloo records a collective that failed as completed too
        calls = [(facts, call) for facts, call in calls if call["library"] == "nccl"]
        for state, verb in (("scheduled", "begun"), ("started", "ended")):
            here = [(facts, call) for facts, call in calls if call["state"] == state]
            others = [facts for facts, call in calls if STATES.index(call["state"]) > STATES.index(state)]
            if here and others:
                facts, call = here[0]
                elsewhere = f"which has {verb} on the device of rank {others[0]['rank']}"
                return facts, f"its device has not {verb} {call['call']}, {name}, {elsewhere}"
    return None


def _all_waiting(known: list[Facts]) -> str:
    """The message if the devices of all ranks are in the same collective; else empty."""
    for name, calls in _by_number(known):
        states = {(call["library"], call["state"]) for _, call in calls}
        if len(calls) == len(known) > 1 and states == {("nccl", "scheduled")}:
            return (
                f": no device has ended {calls[0][1]['call']}, {name}; TORCH_NCCL_ENABLE_TIMING=1 "
                "would show which one has not begun it"
            )
    return ""


def _unreported(evidence: Evidence, known: list[Facts]) -> Facts | None:
    """A rank that began and reported nothing; among several, one that is known to have ended."""
    silent = [facts for facts in known if facts["rank"] not in evidence.spoke]
    seen = [facts for facts in silent if facts["rank"] in evidence.ended]
    return {**(seen or silent)[0], **UNREPORTED, "kind": "killed", "exit_code": 1, "message": ""} if silent else None


def _earliest(evidence: Evidence, known: list[Facts]) -> Facts:
    if evidence.failures:
        return {**evidence.failures[0], "victim": True}
    error = "the ranks ended before any of them could report why"
    return {"rank": None, "kind": "lost", "exit_code": 1, "error": error, "message": ""}


def _known(evidence: Evidence, rank: int) -> Facts:
    """Everything known about one rank; later reports override earlier ones."""
    facts: Facts = {"rank": rank, **evidence.began.get(rank, {})}
    step, seen, batch = evidence.steps.get(rank, (0, 0, 0))
    if step:
        facts |= {"step": step, "samples": [seen, seen + batch - 1] if batch else None}
    if evidence.stacks.get(rank):
        facts |= {"where": dumped(evidence.stacks[rank]), "stack": current(evidence.stacks[rank])}
    if _aborted(evidence, rank):
        facts["collective"] = waited(evidence.stacks[rank])
    failures = [failure for failure in evidence.failures if failure["rank"] == rank]
    verdict = ("kind", "error", "message", "exit_code")
    for report in (*failures[:1], evidence.reports.get(rank, {})):
        facts |= {key: value for key, value in report.items() if key not in verdict and value is not None}
    return {**facts, "rank": rank}
