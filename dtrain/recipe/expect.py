"""Compares expected with actual figures of a run: `dtrain verify recipe=digits`.

A figure is expected in a band, [lowest, highest]; one of them may be null. Losses, accuracies and steps depend on the
words alone and are judged on any machine; memory and speed only on the one that `expect.hardware` names.
"""

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.sections import Expect
from dtrain.errors import WordsError
from dtrain.storage import store

OF_A_STEP = ("loss", "accuracy")
HELD_OUT = ("eval_loss", "eval_accuracy")
OF_THE_MACHINE = ("memory", "samples_per_second", "tokens_per_second")
BANDS = (*OF_A_STEP, *HELD_OUT, *OF_THE_MACHINE)
WARM = 5
"""First steps that are left out of speeds, if the run has more."""
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """A figure with its expected band, its actual value `found` (None: the run has none), and a verdict: ok, outside,
    absent or elsewhere.
    """

    figure: str
    low: float | None
    high: float | None
    found: float | None
    verdict: str

    @property
    def bad(self) -> bool:
        return self.verdict in ("outside", "absent")


def asked(expect: Expect) -> list[str]:
    """The names of the expected figures. Raises WordsError for a malformed band."""
    names = [name for name in BANDS if getattr(expect, name) is not None]
    wrong = [
        f"expect.{name}={getattr(expect, name)}: a band is [lowest, highest], as [1.2, 1.4] or [null, 1.4]."
        for name in names
        if not _is_band(expect, name)
    ]
    if wrong:
        raise WordsError(*wrong)
    return names


def band(limits: Any) -> str:
    """A band as text: `1.2 to 1.4`, `1.4 or less`. Accepts any value, as recipes are listed unchecked."""
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    if low is None or high is None:
        return f"{high} or less" if low is None else f"{low} or more"
    return f"{low} to {high}"


def machine(cluster: Cluster) -> str:
    """This machine in the notation of `expect.hardware`: count and model of its GPUs, or else of its CPU cores."""
    if cluster.gpus:
        models = [
            match[1]
            for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
            for match in [_line("Model", path)]
            if match
        ]
        return f"{cluster.gpus} x {models[0] if models else 'GPU'}"
    match = _line("model name", Path("/proc/cpuinfo"))
    return f"{cluster.cpus} x {match[1] if match else 'CPU'}"


def judge(expect: Expect, out: str, *, here: str) -> list[Finding]:
    """Judge the run under `out`; `here` is this machine. Raises StoreError if the run has no metrics."""
    rows = [json.loads(line) for line in store.read(store.join(out, "metrics.jsonl")).decode().splitlines()]
    result = json.loads(store.read(store.join(out, "result.json")))
    figures = figures_of(rows, result)
    return [
        _judged(name, getattr(expect, name), figures.get(name), expect.hardware in (None, here))
        for name in asked(expect)
    ]


def figures_of(rows: list[Mapping[str, Any]], result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a run that a recipe may expect: losses of the last row, the last held-out metrics, median speeds,
    peak memory. From the rows of metrics.jsonl and from result.json.
    """
    warm = rows[WARM:] or rows
    speeds = {
        name: statistics.median(row[name] for row in warm) for name in OF_THE_MACHINE if rows and name in rows[-1]
    }
    last = {name: rows[-1][name] for name in OF_A_STEP if rows and rows[-1].get(name) is not None}
    memory = {"memory": result["peak_bytes"] / GIB} if result.get("peak_bytes") else {}
    return {
        **last,
        **{name: value for name, value in result["metrics"].items() if value is not None},
        **speeds,
        **memory,
    }


def table(findings: Iterable[Finding], hardware: str | None) -> str:
    lines = [f"{'figure':<20} {'expected':<22} {'found':<12}"]
    for one in findings:
        actual = "none" if one.found is None else f"{one.found:.5g}"
        verdict = {"absent": "the run has no such figure", "elsewhere": f"not judged: expected on {hardware}"}.get(
            one.verdict, one.verdict
        )
        lines.append(f"{one.figure:<20} {band([one.low, one.high]):<22} {actual:<12} {verdict}")
    return "\n".join(lines)


def _judged(name: str, limits: list[Any], actual: float | None, same_machine: bool) -> Finding:
    low, high = limits
    if name in OF_THE_MACHINE and not same_machine:
        return Finding(name, low, high, actual, "elsewhere")
    if actual is None:
        return Finding(name, low, high, None, "absent")
    inside = (low is None or actual >= low) and (high is None or actual <= high)
    return Finding(name, low, high, actual, "ok" if inside else "outside")


def _is_band(expect: Expect, name: str) -> bool:
    limits = getattr(expect, name)
    numbers = [limit for limit in limits if isinstance(limit, int | float) and not isinstance(limit, bool)]
    return len(limits) == 2 and len(numbers) + limits.count(None) == 2 and numbers == sorted(numbers) and bool(numbers)


def _line(name: str, path: Path) -> re.Match[str] | None:
    try:
        return re.search(rf"^{name}\s*:\s*(.+?)\s*$", path.read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
