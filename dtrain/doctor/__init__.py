"""Checks of a machine, a storage and a set of ranks: small checks, each of which says what it found, and what to type
where something is wrong.

See them with `python -m dtrain doctor`; the table of them is in dtrain/verb/doctor.py.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dtrain.errors import first_line
from dtrain.planned import Plan
from dtrain.secrets import masked

Verdict = Literal["ok", "note", "stop"]
"""`stop` would stop a run; `note` makes one slower or riskier than it need be."""


@dataclass(frozen=True)
class Finding:
    """`check` is the subject in a word; `advice` words or commands to type; `facts` figures for tools."""

    check: str
    verdict: Verdict
    text: str
    advice: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """The subject of the checks: the plan of the user's words, this environment, and what a process of its own said of
    torch (`dtrain.doctor.loading`).
    """

    plan: Plan
    environ: Mapping[str, str]
    torch: Callable[[], Mapping[str, Any]]


Check = Callable[[Case], Iterable[Finding]]


def found(check: Check, case: Case) -> list[Finding]:
    """Findings of a check, without secrets. One that fails itself is a note: it says nothing about the machine."""
    findings = list[Finding]()
    try:
        findings.extend(check(case))
    except Exception as error:
        findings.append(
            Finding(check.__name__, "note", f"this could not be looked at: {type(error).__name__}: {first_line(error)}")
        )
    return [replace(finding, text=masked(finding.text)) for finding in findings]
