"""Expected figures of a run against the actual ones: `dtrain verify recipe=digits`.

A figure is expected to lie in a band, [lowest, highest], either of them null. Losses, accuracies and steps depend on
the words alone, so they are judged anywhere; memory and speed depend on the machine, and are judged on the one that
`expect.hardware` names.
"""

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Expect
from dtrain.errors import WordsError
from dtrain.storage import store

OF_A_STEP = ("loss", "accuracy")
HELD_OUT = ("eval_loss", "eval_accuracy")
OF_THE_MACHINE = ("memory", "samples_per_second", "tokens_per_second")
BANDS = (*OF_A_STEP, *HELD_OUT, *OF_THE_MACHINE)
WARM = 5
"""Steps at the beginning that no speed is taken from, of a run that is longer."""
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One figure: what was expected, what was found (None: the run has none), and how it was judged: ok, outside,
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
    """The figures that are expected. Raises WordsError when a band is none."""
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
    """`1.2 to 1.4`, `at most 1.4`, for a person; of what is no band, nothing sensible."""
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (None, None)
    if low is None or high is None:
        return f"{high} or less" if low is None else f"{low} or more"
    return f"{low} to {high}"


def machine(cluster: Cluster) -> str:
    """This machine as `expect.hardware` names one: GPUs by their model, or CPU cores by theirs."""
    if cluster.gpus:
        models = [
            found[1]
            for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
            for found in [_line("Model", path)]
            if found
        ]
        return f"{cluster.gpus} x {models[0] if models else 'GPU'}"
    found = _line("model name", Path("/proc/cpuinfo"))
    return f"{cluster.cpus} x {found[1] if found else 'CPU'}"


def judge(expect: Expect, out: str, *, here: str) -> list[Finding]:
    """The findings on a run under `out`; `here` is this machine. Raises StoreError when it left no rows."""
    rows = [json.loads(line) for line in store.read(store.join(out, "metrics.jsonl")).decode().splitlines()]
    result = json.loads(store.read(store.join(out, "result.json")))
    figures = figures_of(rows, result)
    return [
        _judged(name, getattr(expect, name), figures.get(name), expect.hardware in (None, here))
        for name in asked(expect)
    ]


def figures_of(rows: list[Mapping[str, Any]], result: Mapping[str, Any]) -> dict[str, float]:
    """Every figure that can be expected, of the rows of metrics.jsonl and of result.json: those of the last row, the
    last held-out ones, medians of speeds.
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
        found = "none" if one.found is None else f"{one.found:.5g}"
        verdict = {"absent": "the run has no such figure", "elsewhere": f"not judged: expected on {hardware}"}.get(
            one.verdict, one.verdict
        )
        lines.append(f"{one.figure:<20} {band([one.low, one.high]):<22} {found:<12} {verdict}")
    return "\n".join(lines)


def _judged(name: str, limits: list[Any], found: float | None, same_machine: bool) -> Finding:
    low, high = limits
    if name in OF_THE_MACHINE and not same_machine:
        return Finding(name, low, high, found, "elsewhere")
    if found is None:
        return Finding(name, low, high, None, "absent")
    inside = (low is None or found >= low) and (high is None or found <= high)
    return Finding(name, low, high, found, "ok" if inside else "outside")


def _is_band(expect: Expect, name: str) -> bool:
    limits = getattr(expect, name)
    numbers = [limit for limit in limits if isinstance(limit, int | float) and not isinstance(limit, bool)]
    return len(limits) == 2 and len(numbers) + limits.count(None) == 2 and numbers == sorted(numbers) and bool(numbers)


def _line(name: str, path: Path) -> re.Match[str] | None:
    try:
        return re.search(rf"^{name}\s*:\s*(.+?)\s*$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
