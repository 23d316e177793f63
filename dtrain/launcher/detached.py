"""Runs that a job serves on its first node: the command writes the plan under `out`, submits the job and follows it.

    <out>/submitted.json      the plan, signed with the secret that the job has in its environment
    <out>/engine.json         the job, and how a user ended it
    <out>/starts.json         the newest step at each of its starts
    <out>/submission/         the lease of the command that is submitting it

`dtrain run <out>` runs the plan there and reads no word. Who can write to `out` but does not know the secret cannot
change what it runs.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dtrain.build import build
from dtrain.config import files
from dtrain.config.environment import HANDED, LEASE, LEASE_OWNER, SECRET
from dtrain.config.facts import fact
from dtrain.config.word import cut
from dtrain.errors import (
    FOR_GOOD,
    DtrainError,
    LeaseError,
    PreflightError,
    RankError,
    Status,
    StoreError,
    WordsError,
)  # fmt: skip
from dtrain.launcher import Detached
from dtrain.launcher.queued import Watch
from dtrain.lifecycle import failure, signals
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.secrets import screen
from dtrain.storage import attempts, lease, options, store

LOOK_SECONDS = (1.0, 10.0)
"""Shortest and longest time between two questions to the scheduler, which become rarer as the job grows older."""
SUBMIT_SECONDS = 600.0
"""The longest wait for another command that submits the run's job."""
MOST_BYTES = 1 << 20
"""The most of a log that is read at once."""
HOW: tuple[Status, ...] = ("interrupted", "stopped")
"""How a user ends the run of a job: by Ctrl-C where it is followed, or by dtrain stop."""
RESULT, ENGINE, STARTS, FAILURE = "result.json", "engine.json", "starts.json", "failure.json"


def name_of(out: str) -> str:
    """The name of the job of a run: one for each `out`."""
    where = str(store.local_path(out).absolute()) if store.is_local(out) else out
    last = re.sub(r"[^\w.-]", "", where.rstrip("/").rpartition("/")[2])[:30]
    return f"dtrain-{last}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def log_file(out: str, name: str) -> Path:
    """Where what a job says is kept on this host."""
    folder = store.local_path(out) / "logs" if store.is_local(out) else Path()
    return folder.absolute() / f"{name}.log"


@contextmanager
def submitting(out: str) -> Iterator[None]:
    """Be the only command that submits a job for `out`; another one waits, and then finds the job. Raises LeaseError if
    that takes too long.
    """
    deadline = time.monotonic() + SUBMIT_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lease.hold(store.join(out, "submission")))
                break
            except LeaseError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_SECONDS[0])
        for name in (LEASE, LEASE_OWNER):  # the job has a lease of its own
            os.environ.pop(name, None)
        yield


def write(plan: Plan) -> dict[str, str]:
    """Write submitted.json. Returns the environment for the job."""
    secret = os.environ.get(SECRET) or secrets.token_hex(16)
    text = json.dumps(plan.to_dict())
    for name in (ENGINE, STARTS):
        store.remove(store.join(plan.out, name))
    store.write(_url(plan.out), json.dumps({"signature": _sign(secret, text), "plan": text}).encode())
    return {SECRET: secret, HANDED: options.hand_over()}


def read(out: str) -> Plan:
    """The plan that was submitted for `out`. Raises PreflightError in a process that is not part of its job."""
    secret, handed = os.environ.get(SECRET, ""), os.environ.pop(HANDED, "")
    if not secret:
        raise PreflightError(
            f"dtrain run {out}: {SECRET} is not set. A job executes this command with the secret of whoever submitted "
            f"it; to go on with a run yourself, type dtrain "
            f"{screen.typed(f'recipe={out}/config.yaml')} {screen.typed(f'out={out}')}"
        )
    if handed:
        options.take_over(handed)
    try:
        saved = json.loads(store.read(_url(out)))
        text, signature = str(saved["plan"]), str(saved["signature"])
        if not hmac.compare_digest(signature, _sign(secret, text)):
            raise PreflightError(
                f"{_url(out)} was written by a submission with another {SECRET}. Submit the run again."
            )
        return Plan.from_dict(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError.during("read", _url(out), "it is damaged", "Submit the run again") from error


def refuse_other(plan: Plan, job: str) -> None:
    """Raises PreflightError if the run's job was submitted with other words."""
    try:
        saved = dict(json.loads(_contents(plan.out, "submitted.json")["plan"]))
    except (KeyError, TypeError, ValueError):
        saved = {}
    if _submitted(saved) != _submitted(json.loads(json.dumps(plan.to_dict()))):
        raise PreflightError(
            f"out={plan.out} belongs to job {job}, which was submitted with other words or code. Type dtrain stop "
            f"{screen.typed(plan.out)} first, or out=<another place>."
        )


def _submitted(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """A plan without what its command does once it is submitted."""
    return {**plan, "launcher": {**plan.get("launcher", {}), "detach": None}, "why": None}


def note_job(out: str, launcher: Mapping[str, Any], job: str) -> None:
    """Record the job of a run."""
    arguments = {name: value for name, value in launcher.items() if name != "_about_"}
    _note(out, ENGINE, {"launcher": arguments, "job": job})


def note_start(out: str) -> None:
    """Record a start of the job. Raises RankError at the third without a new step: the next would be no better."""
    saved = [attempt.step for attempt in attempts.listed(out) if attempt.is_committed]
    steps = [*_contents(out, STARTS).get("steps", ()), max(saved, default=0)]
    _note(out, STARTS, {"steps": steps})
    if len(steps) < 3 or len(set(steps[-3:])) > 1:
        return
    facts = _contents(out, FAILURE)
    cause = str(facts.get("message", "")) or (
        "Its time limit is too short for a step and a save, or it is preempted too often. Submit it again with a "
        "longer time."
    )
    error = RankError(f"the last two starts of this job ended at step {steps[-1]}, where they began. {cause}")
    error.facts = {**(facts or failure.facts_of(error, 0)), "message": str(error)}
    error.exit_code = FOR_GOOD
    raise error


def would_repeat(error: DtrainError) -> bool:
    """Whether another start of the job would fail alike: with an error of the program that ranks were started again
    after, in vain, or a spike.
    """
    return error.facts.get("kind") in ("error", "spike") and not error.facts.get("victim")


def job_of(out: str) -> tuple[Detached, str]:
    """The launcher and the job of the run at `out`. Raises WordsError if it has none, or not by a word of dtrain's:
    whoever can write to `out` names no other class here. Raises StoreError.
    """
    noted = _contents(out, ENGINE) if store.exists(store.join(out, ENGINE)) else {}
    launcher, job = noted.get("launcher"), noted.get("job")
    if not isinstance(launcher, dict) or not isinstance(job, str):
        raise WordsError(f"stop: no job was submitted for {out}. A run on this host ends by Ctrl-C where it was typed.")
    words = [files.node("launcher", word) for word in files.groups()["launcher"]]
    schedulers = [word["_target_"] for word in words if fact(word, "detached")]
    if launcher.get("_target_") not in schedulers:
        raise WordsError(f"stop: {out} is run by job {cut(job)} of another launcher. Stop it by that one's command.")
    return build(launcher), job


def _note(out: str, name: str, contents: Mapping[str, Any]) -> None:
    store.write(store.join(out, name), json.dumps(contents).encode())


def ask_to_stop(launcher: Detached, out: str, job: str, how: Status) -> None:
    """Ask the run of a job to save and stop, and record `how` a user did: its ranks see the signal of a preemption."""
    with suppress(StoreError):  # it is stopped nevertheless
        _note(out, ENGINE, {**_contents(out, ENGINE), "ended": how})
    launcher.cancel(job, save=True)


def ended(out: str, status: str) -> str:
    """The status of a run as its user knows it."""
    how = _contents(out, ENGINE).get("ended") if status == "preempted" else status
    return how if how in HOW else status


def has_begun(out: str) -> bool:
    """Whether the run of the job at `out` was started on its first node."""
    return bool(_contents(out, STARTS))


def job_there(out: str) -> str:
    """The job of the run at `out` that is queued or runs, as far as its scheduler answers; empty if there is none."""
    try:
        launcher, job = job_of(out)
        return job if job in launcher.jobs(out) else ""
    except DtrainError:
        return ""


def follow(plan: Plan, launcher: Detached, job: str, stop: Sequence[int]) -> Result:
    """Show what the job says, and why it waits, until it has ended. The first signal in `stop` asks its run to save and
    stop, the second ends it at once.

    Raises RankError with the root cause if the run has failed, and PreflightError if its nodes have refused it.
    """
    before = _contents(plan.out, RESULT)
    log, begun, watch = _Log(launcher.log(plan.out, job)), time.monotonic(), Watch(launcher, plan.out, job)
    screen.say(f"job {job} runs it · {log.path}")
    with launcher.reading(plan.out, job):
        asked = 0
        while watch.is_there():
            log.show()
            if asked < min(len(stop), 2):
                asked += 1
                if asked == 1 and stop[0] == signal.SIGINT:
                    ask_to_stop(launcher, plan.out, job, "interrupted")
                else:
                    launcher.cancel(job, save=asked == 1)
            time.sleep(min(max(LOOK_SECONDS[0], (time.monotonic() - begun) / 60), LOOK_SECONDS[1]))
    log.show()
    after, facts = _contents(plan.out, RESULT), _contents(plan.out, FAILURE)
    if stop and (len(stop) > 1 or after == before):
        raise signals.StopRequested(stop[0])
    if facts or not after or after == before:
        raise _failure(plan.out, job, facts, log)
    result = Result(**after)
    how: Status = next((each for each in HOW if each == ended(plan.out, result.status)), result.status)
    return replace(result, status=how)


def _failure(out: str, job: str, facts: Mapping[str, Any], log: "_Log") -> DtrainError:
    """Why a job has no result, as an error."""
    if facts:
        message, is_refused = str(facts.get("message", "")), facts.get("exit_code") == PreflightError.exit_code
    else:
        is_refused = not has_begun(out)
        when = "before its run began" if is_refused else "without a result"
        last = f": {cut(log.last)}" if log.last else ""
        message = f"job {job} ended {when}{last}. Its log: {log.path}"
    error = PreflightError(message) if is_refused else RankError(message)
    error.facts = facts
    return error


class _Log:
    """Shows the lines that a file gets."""

    def __init__(self, path: Path) -> None:
        self.path, self._shown = path, path.stat().st_size if path.exists() else 0
        self.last = ""
        """The last line that was shown."""

    def show(self) -> None:
        """Show whole lines that are new; a file that became shorter is shown from its begin."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._shown > size:
                    self._shown = 0
                while self._shown < size:
                    file.seek(self._shown)
                    text = file.read(MOST_BYTES)
                    # a line that is longer than this is shown in parts
                    text = text if len(text) == MOST_BYTES and b"\n" not in text else text[: text.rfind(b"\n") + 1]
                    if not text:
                        break
                    self._shown += len(text)
                    shown = text.decode(errors="replace")
                    self.last = next((line for line in reversed(shown.splitlines()) if line.strip()), self.last)
                    screen.say(shown, end="")
        except OSError:  # the job has not begun, or its file system hangs
            return


def _contents(out: str, name: str) -> dict[str, Any]:
    """A JSON file under `out`; empty if there is none."""
    try:
        return dict(json.loads(store.read(store.join(out, name))))
    except (StoreError, ValueError):
        return {}


def _url(out: str) -> str:
    return store.join(out, "submitted.json")


def _sign(secret: str, text: str) -> str:
    return hmac.digest(secret.encode(), b"dtrain plan " + text.encode(), "sha256").hex()
