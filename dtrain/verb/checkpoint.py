"""`dtrain checkpoint ls|verify|export out=<URL>`: what was saved, whether it is whole, and as a file for others. No
GPU, no model, any storage.

    dtrain checkpoint ls out=runs/a                     every attempt to save: valid, damaged or never committed
    dtrain checkpoint verify out=s3://bucket/run        every byte; exit code 1 when one is not what was saved
    dtrain checkpoint export out=runs/a to=runs/hf      as model.safetensors [step=100] [weights=ema] [dtype=bf16]

`out` is a run, a step's folder or one attempt. Nothing that a checkpoint says is run.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import yaml

from dtrain.compose import connect, value_of
from dtrain.config.word import cut
from dtrain.errors import StoreError, WordsError, nearest
from dtrain.secrets import screen
from dtrain.storage import store

if TYPE_CHECKING:
    from dtrain.checkpoint.survey import Attempt

TAKES = {"ls": ("out", "step"), "verify": ("out", "step"), "export": ("out", "step", "to", "weights", "dtype")}
CHOICES = {"weights": ("model", "ema"), "dtype": ("fp32", "bf16", "fp16")}


def run(words: Sequence[str]) -> int:
    act = words[0] if words else ""
    if act not in TAKES:
        raise WordsError(
            f"checkpoint {cut(act) or '<what>'}:{nearest(act, TAKES)} Type dtrain checkpoint ls out=<a run>."
        )
    said = _read(act, words[1:])
    source = said["out"].rstrip("/")
    connect(words[1:], source)
    from dtrain.checkpoint import survey  # with torch: this is where it is needed

    found = [attempt for attempt in survey.attempts(source) if "step" not in said or attempt.step == int(said["step"])]
    if not found:
        raise StoreError.during(
            "find a checkpoint at", source, f"there is none{' of step ' + said['step'] if 'step' in said else ''}"
        )
    if act == "ls":
        screen.say(_table(found, _policy(source)))
        return 0
    if act == "export" and "step" not in said and (dispute := survey.dispute(found)):
        raise StoreError.during("export", source, dispute, "Or type step=<one of them>")
    return _verify(found) if act == "verify" else _export(found, source, said)


def _read(act: str, words: Sequence[str]) -> dict[str, str]:
    """The words by name. Raises WordsError with all mistakes."""
    names = list(dict.fromkeys(word.split("=")[0] for word in words))
    problems = [
        f"{name}: checkpoint {act} does not take it.{nearest(name, TAKES[act])}"
        for name in names
        if name not in TAKES[act] and name.split(".")[0] != "out_options"
    ]
    said = {name: value for name in TAKES[act] if (value := value_of(words, name)) is not None}
    problems += [
        f"checkpoint {act} needs {name}. Type {name}=<URL>."
        for name in ("out", "to")
        if name in TAKES[act] and name not in said
    ]
    problems += [
        f"{name}={said[name]}:{nearest(said[name], CHOICES[name])}"
        for name in CHOICES
        if name in said and said[name] not in CHOICES[name]
    ]
    if not said.get("step", "0").isdecimal():
        problems.append(f"step={said['step']}: a step is a number. Type step=100.")
    problems += [
        f"{name}=: it is empty. Type {name}=<a folder or URL>."
        for name in ("out", "to")
        if name in said and not said[name]
    ]
    source, target = (said.get(name, "").rstrip("/") for name in ("out", "to"))
    if target and (target == source or f"{target}/".startswith(f"{source}/checkpoints/")):
        problems.append(f"to={said['to']}: the run itself writes there. Type to=<another place>.")
    if problems:
        raise WordsError(*problems)
    return said


def _verify(found: Sequence["Attempt"]) -> int:
    """Verify every byte; exit code 1, with the damaged files named, if a checkpoint is damaged."""
    from dtrain.checkpoint import survey

    damaged = 0
    for attempt in found:
        faults = [attempt.fault] if attempt.status == "damaged" else []
        if attempt.commit is not None:
            faults += survey.faults(attempt.url, attempt.commit)
        damaged += bool(faults)
        status = "whole" if attempt.commit else attempt.status
        status = "damaged" if faults else status
        screen.say(f"{status:<12} step {attempt.step}  {screen.on_one_line(attempt.url)}  {_bytes(attempt.size)}")
        for fault in faults:
            screen.say(f"             {screen.on_one_line(fault)}")
    screen.say(f"{len(found)} looked at, {damaged} damaged")
    return 1 if damaged else 0


def _export(found: Sequence["Attempt"], source: str, said: Mapping[str, str]) -> int:
    """The newest valid one."""
    from dtrain.checkpoint.export import CONFIG, export

    attempt = next((attempt for attempt in found if attempt.commit is not None), None)
    if attempt is None or attempt.commit is None:
        raise StoreError.during(
            "export", source, next((one.fault for one in found if one.fault), "no checkpoint was committed")
        )
    written = export(
        attempt.url, attempt.commit, said["to"], weights=said.get("weights", "model"), dtype=said.get("dtype")
    )
    screen.say(*map(screen.on_one_line, [f"step {attempt.step} of {attempt.url}", *(f"  {url}" for url in written)]))
    if not any(url.endswith(CONFIG) for url in written):
        screen.say("  (no config.json: the model is none of transformers')")
    return 0


def _policy(source: str) -> Mapping[str, object]:
    """The run's settings for checkpoints; empty when they cannot be read."""
    try:
        plan = yaml.safe_load(store.read(store.join(source.split("/checkpoints/")[0], "plan.yaml")))
        return dict(plan["checkpoint"])
    except (StoreError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _table(found: Sequence["Attempt"], policy: Mapping[str, object]) -> str:
    rows = [("step", "attempt", "state", "size", "mesh", "run began", "kept as", "figures")]
    valid = [attempt for attempt in found if attempt.commit is not None]
    for attempt in found:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in attempt.scores.items())
        rows.append(
            (
                str(attempt.step),
                attempt.name,
                attempt.status,
                _bytes(attempt.size),
                _mesh(attempt),
                _age(attempt),
                _kept(attempt, valid, policy),
                figures,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    from dtrain.checkpoint import survey

    faults = [f"step {attempt.step}: {attempt.fault}" for attempt in found if attempt.fault]
    return "\n".join(map(screen.on_one_line, [*lines, *faults, *filter(None, [survey.dispute(found)])]))


def _kept(attempt: "Attempt", valid: Sequence["Attempt"], policy: Mapping[str, object]) -> str:
    """Why retention keeps it."""
    if attempt.commit is None:
        return ""
    every, best = policy.get("keep_every"), str(policy.get("best"))
    scored = [one.scores[best] for one in valid if math.isfinite(one.scores.get(best, math.nan))]
    reasons = {
        "newest": attempt is valid[0],
        f"every {every}": isinstance(every, int) and every > 0 and attempt.step % every == 0,
        f"best {best}": bool(scored)
        and attempt.scores.get(best) == (max if policy.get("best_is") == "highest" else min)(scored),
    }
    return ", ".join(name for name, holds in reasons.items() if holds)


def _mesh(attempt: "Attempt") -> str:
    """Ranks, and the axes that are longer than one."""
    commit = attempt.commit or {}
    shape = commit.get("mesh")
    axes = [f"{axis}={degree}" for axis, degree in shape.items() if degree != 1] if isinstance(shape, Mapping) else []
    return f"{commit.get('world', '?')} rank(s) {' '.join(axes)}".rstrip() if commit else ""


def _age(attempt: "Attempt") -> str:
    if attempt.begun is None:
        return ""
    seconds = (datetime.datetime.now(datetime.UTC) - attempt.begun).total_seconds()
    unit, length = next((pair for pair in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= pair[1]), ("s", 1))
    return f"{seconds / length:.0f} {unit} ago"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
