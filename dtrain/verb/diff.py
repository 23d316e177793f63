"""`dtrain diff A B`: what differs between two runs, recipes or lists of words: words, plan, code, results, and what was measured.

    dtrain diff runs/a s3://bucket/b out_options.key=...         two runs, wherever they lie; nothing is written there
    dtrain diff digits "recipe=digits optim.lr=1e-2"             a recipe, and words
    dtrain diff runs/a "strategy=fsdp devices=2"                 what another run would have been asked

Exit code 0: no difference; 1: some. Time, speed and memory are shown, and are no difference.
"""

import json
import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dtrain import provenance, recipe, store
from dtrain.cluster import look
from dtrain.compose import compose, connect
from dtrain.errors import StoreError, WordsError
from dtrain.plan import SHAPE as PLAN
from dtrain.resolve import resolve
from dtrain.result import SHAPE, note_code, versions
from dtrain.secrets import masked, shown
from dtrain.shapes import TEXT, Each, fault

BESIDE = ("out_options", "trust", "hydra")
"""Words for both sides."""
ITS_OWN = ("out", "resume", "trust")
"""Of a plan: what tells two runs apart that are the same."""
CLOCKED = re.compile(r"_seconds$|_per_second$|^seen$|^step$")
"""Columns of metrics.jsonl that are no results."""
APART = 0.05
"""Relative difference from which on a measured figure is shown."""

Rows = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Side:
    """`words`: dotted key -> (value, who said it); `plan` in the same keys; `rows` by step. A side that is no run has no results."""

    name: str
    words: Mapping[str, tuple[Any, str]]
    plan: Mapping[str, Any]
    code: Mapping[str, str]
    result: Mapping[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One difference: how the sides say it, and what there is to add."""

    key: str
    one: str
    other: str
    note: str = ""


def run(words: Sequence[str]) -> int:
    beside = [word for word in words if word.split("=")[0].split(".")[0] in BESIDE and "=" in word]
    sides = [word for word in words if word not in beside]
    if len(sides) != 2:
        raise WordsError(f'diff takes two of them, not {len(sides)}. Type dtrain diff runs/a runs/b, or dtrain diff digits "recipe=digits seed=1".')
    one, other = (_named(text, beside) for text in sides)
    found = {"words": [*_words(one, other)], "plan": [*_plan(one, other)], "code": [*_code(one, other)], "results": [*_results(one, other)]}
    print(_table(one, other, {**found, "measured": [*_measured(one, other)]}))
    return 1 if any(found.values()) else 0


# the sides


def _named(text: str, beside: Sequence[str]) -> Side:
    """Raises WordsError that says on which side something is wrong."""
    try:
        return _side(text, beside)
    except WordsError as error:
        hint = "" if "=" in text else f' More words stand with it in quotes: "recipe={shown(text)} <key>=<value>".'
        raise WordsError(*(f"{shown(text)}: {problem}{hint}" for problem in error.problems)) from error


def _side(text: str, beside: Sequence[str]) -> Side:
    """Whatever `text` names. Raises WordsError and StoreError."""
    if re.match(r"[\w.]+=", text) and not (store.is_local(text) and store.exists(text)):
        return _asked(shlex.split(text), beside)
    told = [word for word in beside if word.startswith("out_options")]
    if told and not store.is_local(text):
        connect(told, text)
    if not text.endswith((".yaml", ".yml")) and (re.search(r"[/.]", text) or store.local_path(text).is_dir()):
        if store.exists(store.join(text, "plan.yaml")):
            return _left(text.rstrip("/"))
        if store.is_local(text):
            raise StoreError.during("find a run at", text, "there is no plan.yaml")
    return _asked([f"recipe={text}"], [word for word in beside if word not in told])


def _asked(words: Sequence[str], beside: Sequence[str]) -> Side:
    """Words that nobody has run yet, on this machine."""
    config = compose([*words, *beside])
    plan = json.loads(json.dumps(resolve(config, look()).to_dict()))
    note_code()
    return Side(" ".join(map(shown, words)), _said(recipe.write(config)), provenance.decided(plan), versions())


def _left(url: str) -> Side:
    """What a run left."""
    events, result = _lines(store.join(url, "events.jsonl")), _json(store.join(url, "result.json"))
    begun = [event for event in events if event.get("event") == "started"]
    code = result.get("versions") or (begun[-1].get("versions") if begun else None) or {}
    code = {} if fault(code, Each(TEXT, named=True)) else code
    rows = {row["step"]: row for row in _lines(store.join(url, "metrics.jsonl")) if isinstance(row.get("step"), int)}
    words = _said(store.read(store.join(url, "config.yaml")).decode())
    return Side(masked(url), words, provenance.decided(_yaml(store.join(url, "plan.yaml"))), code, result, rows)


def _said(document: str) -> dict[str, tuple[Any, str]]:
    """A config.yaml: each value with who said it, as its comment tells."""
    lines = document.splitlines()
    return {key: (value, lines[line - 1].partition("  # ")[2] or "default") for key, (value, line) in provenance.marked(document).items()}


def _yaml(url: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(store.read(url))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError.during("read", url, "it is not YAML") from error
    if wrong := fault(found, PLAN):
        raise StoreError.during("read", url, f"it is no plan: {wrong}")
    return dict(found)


def _json(url: str) -> dict[str, Any]:
    """Nothing where the run has not come so far."""
    try:
        found = json.loads(store.read(url))
    except StoreError as error:
        if error.kind != "missing":
            raise
        return {}
    except (ValueError, RecursionError):
        return {}
    if wrong := fault(found, SHAPE):
        raise StoreError.during("read", url, f"it is no result of a run: {wrong}")
    return dict(found)


def _lines(url: str) -> list[dict[str, Any]]:
    """Rows as far as they are whole: the run may be writing the next one."""
    rows = []
    for line in store.read(url).decode(errors="replace").splitlines() if store.exists(url) else []:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return [row for row in rows if isinstance(row, dict)]


# what differs


def _words(one: Side, other: Side) -> Iterator[Line]:
    for key in dict.fromkeys([*one.words, *other.words]):
        here, there = one.words.get(key), other.words.get(key)
        if here is None or there is None or here[0] != there[0]:
            yield Line(key, _word(key, here), _word(key, there))


def _word(key: str, said: tuple[Any, str] | None) -> str:
    return "-" if said is None else f"{provenance.shown(key, said[0])} ({said[1]})"


def _plan(one: Side, other: Side) -> Iterator[Line]:
    """What was decided differently, but for what just repeats a word that differs, and for arguments of another word."""
    for key in dict.fromkeys([*one.plan, *other.plan]):
        group = key.split(".")[0]
        here, there = one.plan.get(key), other.plan.get(key)
        told = one.words.get(key, (None, ""))[0], other.words.get(key, (None, ""))[0]
        alone = (key in one.plan) != (key in other.plan) and one.plan.get(group) != other.plan.get(group)
        said = key.endswith("._target_") and str(here).startswith("dtrain.") and str(there).startswith("dtrain.")  # by the word
        if here != there and (here, there) != told and key not in ITS_OWN and not alone and not said:
            yield Line(key, _decided(key, one), _decided(key, other))


def _decided(key: str, side: Side) -> str:
    return provenance.shown(key, side.plan[key]) if key in side.plan else "-"


def _code(one: Side, other: Side) -> Iterator[Line]:
    for name in dict.fromkeys([*one.code, *other.code]) if one.code and other.code else ():
        if one.code.get(name) != other.code.get(name):
            yield Line(name, one.code.get(name, "-"), other.code.get(name, "-"))


def _results(one: Side, other: Side) -> Iterator[Line]:
    if not (one.result or one.rows) or not (other.result or other.rows):
        return
    here, there = _end(one), _end(other)
    for name in dict.fromkeys([*here, *there]):
        if here.get(name) != there.get(name):
            yield Line(name, _figure(here.get(name)), _figure(there.get(name)), _apart(here.get(name), there.get(name)))
    shared = [step for step in one.rows if step in other.rows]
    for name in _columns(one.rows, other.rows):
        pairs = {step: (one.rows[step].get(name), other.rows[step].get(name)) for step in shared}
        differing = [step for step, pair in pairs.items() if pair[0] != pair[1]]
        if differing:
            worst = max(differing, key=lambda step: _relative(*pairs[step]))
            first, many = pairs[differing[0]], f"differs at {len(differing)} of {len(shared)} steps"
            note = f"{_apart(*first)}; largest at step {worst}: {_apart(*pairs[worst])}; {many}".removeprefix("; ")
            yield Line(f"{name} from step {differing[0]}", _figure(first[0]), _figure(first[1]), note)


def _end(side: Side) -> dict[str, Any]:
    """How a run ended, and what it had learnt by then."""
    return {"status": side.result.get("status", "unfinished"), "steps": max(side.rows, default=0), **(side.result.get("metrics") or {})}


def _columns(one: Rows, other: Rows) -> list[str]:
    """Of both, those that are results."""
    names = dict.fromkeys(name for rows in (one, other) for row in [*rows.values()][:1] for name in row)
    return [name for name in names if not CLOCKED.search(name)]


def _measured(one: Side, other: Side) -> Iterator[Line]:
    """Figures of the machine that are clearly apart: the median step, the whole, the memory."""
    pairs = {name: [_median(side.rows, name) for side in (one, other)] for name in ("step_seconds", "samples_per_second", "tokens_per_second")}
    pairs |= {name: [side.result.get(name) for side in (one, other)] for name in ("wall_seconds", "peak_bytes")}
    for name, (here, there) in pairs.items():
        if here and there and abs(here - there) > APART * max(here, there):
            yield Line(name, _figure(here), _figure(there), f"{there / here:.2f}x")


def _median(rows: Rows, name: str) -> float | None:
    """Over all steps but the first, which is no step's usual time."""
    found = [value for step in sorted(rows)[1:] if isinstance(value := rows[step].get(name), int | float)]
    return statistics.median(found) if found else None


def _relative(here: Any, there: Any) -> float:
    """A number against none (nan has no word in JSON) is as far as can be."""
    if isinstance(here, int | float) and isinstance(there, int | float):
        return float(abs(here - there) / max(abs(here), abs(there), 1e-300))
    return float("inf")


def _apart(here: Any, there: Any) -> str:
    difference = _relative(here, there)
    return "" if difference == float("inf") else f"{difference:.1e} relative"


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.9g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _table(one: Side, other: Side, found: Mapping[str, Sequence[Line]]) -> str:
    """The parts that have differences, aligned; `no difference` where there are none but what was measured."""
    cells = [("", one.name, other.name, "")]
    for name, lines in found.items():
        if lines:
            cells += [(name, "", "", ""), *((f"  {line.key}", line.one, line.other, line.note) for line in lines)]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    text = ["  ".join([*(part.ljust(width) for part, width in zip(cell, widths, strict=False)), cell[3]]).rstrip() for cell in cells]
    equal = not any(lines for name, lines in found.items() if name != "measured")
    return "\n".join([*(text if len(text) > 1 else []), *["no difference"] * equal])
