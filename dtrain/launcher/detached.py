"""Runs that a job serves on its first node: the command writes the plan under `out`, submits the job and follows it.

    <out>/submitted.json      the plan, signed with the secret that the job has in its environment

`dtrain run <out>` runs it there and reads no word. Who can write to `out` but does not know the secret cannot change
what it runs.
"""

import hmac
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from dtrain.config.environment import HANDED, SECRET
from dtrain.errors import PreflightError, RankError, StoreError
from dtrain.launcher import Detached
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.storage import options, store

LOOK_SECONDS = 1.0


def write(plan: Plan) -> dict[str, str]:
    """Write submitted.json. Returns the environment for the job."""
    secret = os.environ.get(SECRET) or secrets.token_hex(16)
    text = json.dumps(plan.to_dict())
    store.write(_url(plan.out), json.dumps({"signature": _sign(secret, text), "plan": text}).encode())
    return {SECRET: secret, HANDED: options.hand_over()}


def read(out: str) -> Plan:
    """The plan that was submitted for `out`. Raises PreflightError in a process that is not part of its job."""
    secret, handed = os.environ.get(SECRET, ""), os.environ.pop(HANDED, "")
    if not secret:
        raise PreflightError(
            f"dtrain run {out}: {SECRET} is not set. A job executes this command with the secret of whoever submitted "
            f"it; to go on with a run yourself, type dtrain recipe={out}/config.yaml out={out}"
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


def submit(plan: Plan, engine: Detached, environment: Mapping[str, str]) -> Result:
    """Start the job, and wait until it has ended. It ends with this command's stop request too.

    Raises RankError with the root cause if the run has failed.
    """
    before = _contents(plan.out, "result.json")
    try:
        command = [sys.executable, "-m", "dtrain", "run", plan.out]
        engine.start([*range(plan.nodes)], command, environment)
        while engine.alive():
            time.sleep(LOOK_SECONDS)
    except BaseException:
        engine.stop()
        raise
    after, facts = _contents(plan.out, "result.json"), _contents(plan.out, "failure.json")
    if facts or not after or after == before:
        message = facts.get("message", "the job ended without a result: see its own output")
        error = RankError(str(message))
        error.facts = facts
        raise error
    return Result(**after)


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
