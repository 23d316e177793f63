"""`dtrain doctor [json] [words]`: checks this machine, the storage of `out` and the ranks of these words, and says what
to type if something is wrong.

    dtrain doctor                                        this machine; measures its cores for `dtrain plan`
    dtrain doctor out=s3://bucket/run                    also that storage: writes, measures, cleans up
    dtrain doctor strategy=fsdp nodes=2 devices=4        also these ranks: starts and measures them
    dtrain doctor json devices=2                         the same for tools

Exit code 0: nothing would stop a run; 3: something would; 2: the words are wrong.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.doctor import Case, Check, Finding, devices, found, host, limits, loading, machine, ranks, storage
from dtrain.errors import DtrainError, PreflightError, WordsError
from dtrain.launcher import apart, preflight
from dtrain.resolve import resolve
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.storage import store


def needed(case: Case) -> Iterable[Finding]:
    """Files, packages and services that the words name but that are missing."""
    with store.patience(storage.LOOK_SECONDS):
        sentences = preflight.missing(case.plan)
    for sentence in sentences:
        yield Finding("words", "stop", sentence)


CHECKS: tuple[Check, ...] = (
    loading.packages, loading.client, loading.plugins, needed,
    devices.gpus, devices.cores, devices.memory, devices.shared,
    limits.files, limits.tasks, limits.locked, limits.dumps, limits.variables, limits.proxies,
    host.loopback, host.door, host.name, host.clock, host.scratch, host.left,
    storage.held, storage.storage, storage.space,
    loading.torch, ranks.exchange,
)  # fmt: skip
"""In the order of the report; the slowest are last."""


def run(words: Sequence[str]) -> int:
    for_tools = bool(words) and words[0] == "json"
    findings = list[Finding]()
    for finding in _findings(words[1:] if for_tools else words):
        findings.append(finding)
        if not for_tools:
            screen.say(line(finding))
    code = PreflightError.exit_code if any(finding.verdict == "stop" for finding in findings) else 0
    screen.say(
        json.dumps(clean({"exit_code": code, "findings": [asdict(finding) for finding in findings]}), indent=1)
        if for_tools
        else _last(findings)
    )
    return code


def _findings(words: Sequence[str]) -> Iterator[Finding]:
    """Run all checks. Raises WordsError for wrong words."""
    cluster = detect()
    if cluster.external and cluster.external.world:
        raise WordsError(
            "doctor starts its own ranks, but another launcher started this process as one of its ranks. Start doctor "
            "without torchrun, or unset RANK and WORLD_SIZE."
        )
    try:
        plan = resolve(compose(words), cluster, apart.shapes_of)
    except DtrainError:
        raise
    except Exception:  # raised by a plugin
        broken = [replace(finding, verdict="stop") for finding in loading.plugins() if finding.verdict != "ok"]
        if not broken:
            raise
        yield from broken
        return
    case = Case(plan, dict(os.environ), loading.begin(loading.TORCH))
    for check in CHECKS if words else (*CHECKS, machine.machine):
        yield from found(check, case)


def line(finding: Finding) -> str:
    """A finding as text."""
    head = f"{finding.verdict.upper() if finding.verdict == 'stop' else finding.verdict:<5} {finding.check:<12} "
    return ("\n" + " " * len(head)).join(
        [*(head + finding.text).splitlines(), *([f"-> {finding.advice}"] if finding.advice else [])]
    )


def _last(findings: Sequence[Finding]) -> str:
    stops, notes = (sum(finding.verdict == verdict for finding in findings) for verdict in ("stop", "note"))
    return (
        f"{len(findings)} findings: {f'{stops} would stop a run' if stops else 'nothing would stop a run'}"
        + f", {notes} to know" * bool(notes)
    )
