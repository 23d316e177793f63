"""Checks of a machine, a storage and a set of ranks. Each check yields findings, with advice if something is wrong.

Run them with `python -m dtrain doctor`; dtrain/verb/doctor.py lists them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dtrain.errors import first_line
from dtrain.planned import Plan
from dtrain.secrets import masked

Verdict = Literal["ok", "note", "stop"]
"""`stop`: would prevent a run; `note`: may slow it down or endanger it."""


@dataclass(frozen=True)
class Finding:
    """`check`: the subject in one word; `advice`: words or commands to type; `facts`: figures for tools."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Input of the checks: the plan of the user's words, the environment, and facts about torch, which a separate
    process reports (`dtrain.doctor.loading`).
    """

    plan: Plan
    environ: Mapping[str, str]
    torch: Callable[[], Mapping[str, Any]]


Check = Callable[[Case], Iterable[Finding]]


def found(check: Check, case: Case) -> list[Finding]:
    """Findings of a check, without secrets. If the check itself fails, that is a note."""
    findings = list[Finding]()
    try:
        findings.extend(check(case))
    except Exception as error:
        findings.append(
            Finding(check.__name__, "note", f"this check failed: {type(error).__name__}: {first_line(error)}")
        )
    return [replace(finding, text=masked(finding.text)) for finding in findings]
