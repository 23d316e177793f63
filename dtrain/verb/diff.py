"""`dtrain diff A B ...`: compares runs, recipes or lists of words: their words, plans, code, results and speeds.

    dtrain diff runs/a s3://bucket/b out_options.key=...         two runs, wherever they lie; nothing is written there
    dtrain diff digits "recipe=digits optim.lr=1e-2"             a recipe, and words
    dtrain diff runs/a "strategy=fsdp devices=2"                 a run, and words that have not been run
    dtrain diff runs/a runs/b runs/c                             three of them, or more: distances are from the first

Exit code 0: no difference; 1: some. Time, speed and memory are shown, measured of runs and predicted of words, and are
no difference.
"""

import json
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dtrain import recipe
from dtrain.cluster import detect
from dtrain.compose import compose, connect, provenance
from dtrain.config.structure import TEXT, Each, fault
from dtrain.errors import StoreError, WordsError
from dtrain.launcher import apart
from dtrain.planned import SHAPE as PLAN
from dtrain.planned import Plan
from dtrain.predict import report
from dtrain.predict.prediction import predict
from dtrain.resolve import resolve
from dtrain.result import OF_THE_MACHINE, SHAPE, note_code, versions
from dtrain.secrets import masked, redact_arg, screen
from dtrain.storage import store
from dtrain.verb.shapes import shapes_of

BESIDE = ("out_options", "trust", "hydra")
"""Words that apply to all sides."""
ITS_OWN = ("out", "resume", "trust")
"""Fields of a plan that identify a run."""
NO_RESULTS = {*OF_THE_MACHINE, "seen", "step"}
"""Columns of metrics.jsonl that are not results: counters, and measurements of the machine."""
APART = 0.05
"""The smallest relative difference of a measured figure that is shown."""

FIGURES = "predicted", "measured"
"""Parts of the table that are no difference."""

Rows = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Side:
    """`words`: dotted key -> (value, source); `plan`: in the same keys; `rows`: by step; `predicted`: time and memory
    of words. A side that is no run has no results.
    """

    name: str
    words: Mapping[str, tuple[Any, str]]
    plan: Mapping[str, Any]
    code: Mapping[str, str]
    result: Mapping[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One difference: the value of each side, and a remark."""

    key: str
    values: Sequence[str]
    note: str = ""


@store.starting()
def run(words: Sequence[str]) -> int:
    beside = [word for word in words if word.split("=")[0].split(".")[0] in BESIDE and "=" in word]
    named = [word for word in words if word not in beside]
    if len(named) < 2:
        raise WordsError(
            f"diff takes two or more, not {len(named)}. Type dtrain diff runs/a runs/b, or dtrain diff digits "
            '"recipe=digits seed=1".'
        )
    sides = [_named(text, beside) for text in named]
    differences = {
        name: [*compare(sides)]
        for name, compare in (("words", _words), ("plan", _plan), ("code", _code), ("results", _results))
    }
    figures = {"predicted": [*_predicted(sides)], "measured": [*_measured(sides)]}
    screen.say(_table(sides, {**differences, **figures}))
    return 1 if any(differences.values()) else 0


# the sides


def _named(text: str, beside: Sequence[str]) -> Side:
    """The side that `text` names. Raises WordsError, which names the side with the mistake."""
    try:
        return _side(text, beside)
    except WordsError as error:
        hint = "" if "=" in text else f' To add words, put all in quotes: "recipe={redact_arg(text)} <key>=<value>".'
        raise WordsError(*(f"{redact_arg(text)}: {problem}{hint}" for problem in error.problems)) from error


def _side(text: str, beside: Sequence[str]) -> Side:
    """A run, a recipe, or words in quotes. Raises WordsError and StoreError."""
    if re.match(r"[\w.]+=", text) and not (store.is_local(text) and store.exists(text)):
        return _of_words(shlex.split(text), beside)
    options = [word for word in beside if word.startswith("out_options")]
    if options and not store.is_local(text):
        connect(options, text)
    if not text.endswith((".yaml", ".yml")) and (re.search(r"[/.]", text) or store.local_path(text).is_dir()):
        if store.exists(store.join(text, "plan.yaml")):
            return _of_run(text.rstrip("/"))
        if store.is_local(text):
            raise StoreError.during("find a run at", text, "there is no plan.yaml")
    return _of_words([f"recipe={text}"], [word for word in beside if word not in options])


def _of_words(words: Sequence[str], beside: Sequence[str]) -> Side:
    """Words that have not been run, on this machine."""
    config = compose([*words, *beside])
    plan = resolve(config, detect(), apart.shapes_of)
    decided = provenance.decided(json.loads(json.dumps(plan.decided())))
    note_code()
    name, typed = " ".join(map(redact_arg, words)), _words_of(recipe.write(config))
    return Side(name, typed, decided, versions(), predicted=_prediction(plan))


def _prediction(plan: Plan) -> dict[str, float]:
    """Seconds of a step and bytes of the fullest rank, where they are known."""
    prediction = predict(plan, shapes_of(plan))
    seconds = {"step_seconds": prediction.time.seconds} if prediction.time else {}
    return {**seconds, "peak_bytes": prediction.memory.peak} if prediction.memory.known else seconds


def _of_run(url: str) -> Side:
    """A run, read from the files it left."""
    events, result = _lines(store.join(url, "events.jsonl")), _json(store.join(url, "result.json"))
    begun = [event for event in events if event.get("event") == "started"]
    code = result.get("versions") or (begun[-1].get("versions") if begun else None) or {}
    code = {} if fault(code, Each(TEXT, named=True)) else code
    rows = {row["step"]: row for row in _lines(store.join(url, "metrics.jsonl")) if isinstance(row.get("step"), int)}
    words = _words_of(store.read(store.join(url, "config.yaml")).decode())
    return Side(
        name=masked(url),
        words=words,
        plan=provenance.decided(_yaml(store.join(url, "plan.yaml"))),
        code=code,
        result=result,
        rows=rows,
    )


def _words_of(document: str) -> dict[str, tuple[Any, str]]:
    """A config.yaml: each value with its source, from the comment."""
    lines = document.splitlines()
    return {
        key: (value, lines[line - 1].partition("  # ")[2] or "default")
        for key, (value, line) in provenance.marked(document).items()
    }


def _yaml(url: str) -> dict[str, Any]:
    try:
        plan = yaml.safe_load(store.read(url))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError.during("read", url, "it is not YAML") from error
    if wrong := fault(plan, PLAN):
        raise StoreError.during("read", url, f"it is no plan: {wrong}")
    return dict(plan)


def _json(url: str) -> dict[str, Any]:
    """Empty if the run has not written the file yet."""
    try:
        result = json.loads(store.read(url))
    except StoreError as error:
        if error.kind != "missing":
            raise
        return {}
    except (ValueError, RecursionError):
        return {}
    if wrong := fault(result, SHAPE):
        raise StoreError.during("read", url, f"it is no result of a run: {wrong}")
    return dict(result)


def _lines(url: str) -> list[dict[str, Any]]:
    """The complete rows of a file; the run may be writing the next one."""
    rows = []
    for line in store.read(url).decode(errors="replace").splitlines() if store.exists(url) else []:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return [row for row in rows if isinstance(row, dict)]


# what differs


def _all(of: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys of all mappings, each once."""
    return list(dict.fromkeys(key for each in of for key in each))


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _words(sides: Sequence[Side]) -> Iterator[Line]:
    for key in _all(side.words for side in sides):
        if _differ([side.words[key][:1] if key in side.words else None for side in sides]):
            yield Line(key, [_word(key, side.words.get(key)) for side in sides])


def _word(key: str, entry: tuple[Any, str] | None) -> str:
    return "-" if entry is None else f"{provenance.shown(key, entry[0])} ({entry[1]})"


def _plan(sides: Sequence[Side]) -> Iterator[Line]:
    """Decisions that differ, except repetitions of a word that differs, and arguments of another word."""
    for key in _all(side.plan for side in sides):
        group = key.split(".")[0]
        decided, typed = [side.plan.get(key) for side in sides], [side.words.get(key, (None, ""))[0] for side in sides]
        alone = any(key not in side.plan for side in sides) and _differ([side.plan.get(group) for side in sides])
        implied = key.endswith("._target_") and all(
            str(value).startswith("dtrain.") for value in decided
        )  # by the word
        if _differ(decided) and decided != typed and key not in ITS_OWN and not alone and not implied:
            yield Line(key, [_decided(key, side) for side in sides])


def _decided(key: str, side: Side) -> str:
    return provenance.shown(key, side.plan[key]) if key in side.plan else "-"


def _code(sides: Sequence[Side]) -> Iterator[Line]:
    for name in _all(side.code for side in sides) if all(side.code for side in sides) else ():
        if _differ([side.code.get(name) for side in sides]):
            yield Line(name, [side.code.get(name, "-") for side in sides])


def _results(sides: Sequence[Side]) -> Iterator[Line]:
    if not all(side.result or side.rows for side in sides):
        return
    ends = [_end(side) for side in sides]
    for name in _all(ends):
        values = [end.get(name) for end in ends]
        if _differ(values):
            yield Line(name, [*map(_figure, values)], _apart(values))
    shared = [step for step in sides[0].rows if all(step in side.rows for side in sides)]
    for name in _columns(side.rows for side in sides):
        values_at = {step: [side.rows[step].get(name) for side in sides] for step in shared}
        differing = [step for step, values in values_at.items() if _differ(values)]
        if differing:
            worst = max(differing, key=lambda step: _relative(values_at[step]))
            first, many = values_at[differing[0]], f"differs at {len(differing)} of {len(shared)} steps"
            note = f"{_apart(first)}; largest at step {worst}: {_apart(values_at[worst])}; {many}".removeprefix("; ")
            yield Line(f"{name} from step {differing[0]}", [*map(_figure, first)], note)


def _end(side: Side) -> dict[str, Any]:
    """How a run ended, and its results by then."""
    return {
        "status": side.result.get("status", "unfinished"),
        "steps": max(side.rows, default=0),
        **(side.result.get("metrics") or {}),
    }


def _columns(of: Iterable[Rows]) -> list[str]:
    """The columns that are results."""
    return [name for name in _all(row for rows in of for row in [*rows.values()][:1]) if name not in NO_RESULTS]


def _predicted(sides: Sequence[Side]) -> Iterator[Line]:
    """Time and memory of words, which no run has measured yet."""
    for name, shown in (("step_seconds", report.duration), ("peak_bytes", report.size)):
        values = [side.predicted.get(name) for side in sides]
        known = [value for value in values if value]
        if len(known) > 1 and _differ(known):
            times = f"{known[1] / known[0]:.2f}x" if len(known) == 2 else ""
            yield Line(name, [shown(value) if value else "-" for value in values], times)


def _measured(sides: Sequence[Side]) -> Iterator[Line]:
    """Time, speed and memory that differ clearly."""
    figures: dict[str, list[Any]] = {
        name: [_median(side.rows, name) for side in sides]
        for name in ("step_seconds", "samples_per_second", "tokens_per_second")
    }
    figures |= {name: [side.result.get(name) for side in sides] for name in ("wall_seconds", "peak_bytes")}
    for name, values in figures.items():
        if all(values) and max(values) - min(values) > APART * max(values):
            yield Line(name, [*map(_figure, values)], ", ".join(f"{value / values[0]:.2f}x" for value in values[1:]))


def _median(rows: Rows, name: str) -> float | None:
    """The median over all steps but the first, which is slower than others."""
    values = [value for step in sorted(rows)[1:] if isinstance(value := rows[step].get(name), int | float)]
    return statistics.median(values) if values else None


def _relative(values: Sequence[Any]) -> float:
    """The largest distance from the first side; inf for a number against none (nan is null in JSON)."""
    if not all(isinstance(value, int | float) for value in values):
        return float("inf")
    return max(float(abs(values[0] - value) / max(abs(values[0]), abs(value), 1e-300)) for value in values[1:])


def _apart(values: Sequence[Any]) -> str:
    difference = _relative(values)
    return "" if difference == float("inf") else f"{difference:.1e} relative"


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.9g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(sides: Sequence[Side], differences: Mapping[str, Sequence[Line]]) -> str:
    """The parts that differ, aligned; `no difference` if at most measurements differ."""
    empty = [""] * len(sides)
    cells = [["", *(side.name for side in sides), ""]]
    for name, lines in differences.items():
        if lines:
            cells += [[name, *empty, ""], *([f"  {line.key}", *line.values, line.note] for line in lines)]
    text = [screen.table(cells)] * (len(cells) > 1)
    equal = not any(lines for name, lines in differences.items() if name not in FIGURES)
    return "\n".join([*text, *["no difference"] * equal])
