"""What the lines of the quarter say: rows by cell, and the decisions that were written down before."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NAMES = ("name", "kernels of", "attention", "head", "copy", "card")
"""Keys of a row; the first that it has names it."""
LINES = 15


@dataclass
class Outcome:
    """Of a cell: how its last attempt ended, its seconds, and rows by name: the newest of each, and no error where an earlier attempt has figures."""

    end: str = "cut"
    seconds: float = 0.0
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """The last ones of its last attempt that are no rows."""


Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True)
class Decision:
    """`value` at most `most`: then `then`, else `otherwise`."""

    question: str
    value: Callable[[Outcomes], float | None]
    most: float
    then: str
    otherwise: str

    def answer(self, value: float) -> str:
        return self.then if value <= self.most else self.otherwise


def outcomes(entries: Iterable[dict[str, Any]]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for entry in entries:
        cell = found.setdefault(entry["cell"], Outcome())
        if "begun" in entry:
            cell.end, cell.seconds, cell.lines = "cut", 0.0, []
        elif "end" in entry:
            cell.end, cell.seconds = entry["end"], entry["seconds"]
        elif row := parsed(entry["line"]):
            name = next((str(row[key]) for key in NAMES if key in row), "")
            if "error" not in row or "ms" not in cell.rows.get(name, {}):
                cell.rows[name] = row
        elif entry["line"].strip():
            cell.lines = [*cell.lines, entry["line"]][-LINES:]
    return found


def parsed(line: str) -> dict[str, Any]:
    """A line that is a JSON object; {} for others."""
    try:
        row = json.loads(line) if line.startswith("{") else {}
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def of(found: Outcomes, cell: str, name: str, key: str = "ms") -> float | None:
    """A figure of a row; of the row with the least ms where `name` is fastest."""
    rows = found[cell].rows if cell in found else {}
    if name == "fastest":
        timed = [row for row in rows.values() if "ms" in row and row["name"] != "no clip"]
        row = min(timed, key=lambda row: row["ms"], default={})
    else:
        row = rows.get(name, {})
    value: float | None = row.get(key)
    return value


def ratio(above: tuple[str, str], below: tuple[str, str]) -> Callable[[Outcomes], float | None]:
    """Of the ms of two rows, each (cell, name)."""

    def value(found: Outcomes) -> float | None:
        a, b = of(found, *above), of(found, *below)
        return a / b if a and b else None

    return value


def least_mfu(found: Outcomes) -> float | None:
    mfu = of(found, "dtrain-1B", "fastest", "mfu")
    return 0.55 / mfu if mfu else None


def summed(found: Outcomes) -> float | None:
    """ms of dW added inside of its product / after it, where the ratio is worst."""
    rows = found["card"].rows.values() if "card" in found else ()
    ratios = [row["ms"]["dW added in the product"] / row["ms"]["dW, then added"] for row in rows if "head" in row]
    return max(ratios, default=None)


HAND = "hand-124M"
DECISIONS = (
    Decision("124M: dtrain / the fastest loop by hand", ratio(("dtrain-124M", "fastest"), (HAND, "fastest")), 1.00, "the fourth promise holds here", "the kernels by kind say where to look"),
    Decision("124M: auto / dtrain's fastest chunk", ratio(("dtrain-124M", "auto"), ("dtrain-124M", "fastest")), 1.02, "the rule of the rows stays", "the rule takes the rows of the fastest"),
    Decision("1B: 55% / MFU of dtrain", least_mfu, 1.00, "the goal is reached", "the kernels by kind say where to look"),
    Decision("1B: dtrain / the fastest loop by hand", ratio(("dtrain-1B", "fastest"), ("hand-1B", "fastest")), 1.00, "the fourth promise holds here", "the kernels by kind say where to look"),
    Decision("one chunk in place / whole logits, compiled", ratio((HAND, "one chunk"), (HAND, "bf16")), 1.00, "one path of the loss, rows by the rule", "whole logits are compiled where they fit"),
    Decision("two chunks / one", ratio((HAND, "half"), (HAND, "one chunk")), 1.02, "addmm(out_dtype) and rows by the rule are the default", "one chunk wherever it fits"),
    Decision("dW added in its product / after it", summed, 1.00, "addmm(out_dtype)", "product, then add"),
    Decision("the whole model compiled / blocks", ratio((HAND, "whole"), (HAND, "blocks")), 0.98, "compile=auto is compile=model below width 1,536 on one rank", "blocks stay"),
    Decision("residual in bf16 / in fp32", ratio((HAND, "bf16"), (HAND, "whole")), 0.98, "precision=bf16 has it on every mesh", "fp32 stays where it is"),
    Decision("joined q, k, v and gate, up / apart", ratio((HAND, "blocks"), (HAND, "apart")), 0.985, "they are joined inside the compiled block", "they stay apart"),
    Decision("mlp: defaults / precision=bf16 compile=blocks", ratio(("small-words", "defaults"), ("small-words", "bf16, compiled")), 1.00, "defaults stay", "small models are compiled and bf16 too"),
)  # fmt: skip
"""Written before anything of it was run; docs/benchmarks.md has the table."""


def table(found: Outcomes) -> str:
    """The page figures.md: the card, decisions, then each cell with its rows. A CPU decides nothing."""
    card = next((row for row in found["card"].rows.values() if "card" in row), {}) if "card" in found else {}
    lines = [brief(card) or "card: not run", ""]
    lines += ["| question | at most | seen | so |", "|---|---|---|---|"]
    for each in DECISIONS:
        value = each.value(found)
        seen = "not run" if value is None else f"{value:.3f}"
        so = "" if value is None or card.get("card") == "cpu" else each.answer(value)
        lines.append(f"| {each.question} | {each.most:.3g} | {seen} | {so} |")
    lines += ["", "| cell | end | seconds | figures |", "|---|---|---|---|"]
    for name, cell in found.items():
        printed = [] if cell.rows and cell.end == "done" else cell.lines
        figures = [brief(row) for row in cell.rows.values()] + printed or [""]
        lines += [f"| {name} | {cell.end} | {cell.seconds:.0f} | {figures[0].replace('|', '/')} |"]
        lines += [f"| | | | {figure.replace('|', '/')} |" for figure in figures[1:]]
    return "\n".join(lines) + "\n"


def brief(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items() if key != "words" and value not in ("", None))[:300]
