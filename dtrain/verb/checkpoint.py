"""`dtrain checkpoint ls|verify|export out=<URL>`: lists checkpoints, verifies their bytes, exports one for other tools;
`import` takes weights of other tools in. Needs no GPU and no model; works on any storage.

    dtrain checkpoint ls out=runs/a                     every attempt to save: valid, damaged or never committed
    dtrain checkpoint verify out=s3://bucket/run        reads every byte; exit code 1 if one is damaged
    dtrain checkpoint export out=runs/a to=runs/hf      as model.safetensors [step=100] [weights=ema] [dtype=bf16]
                                                        [shard=5GB]: in files of at most so many bytes, with an index
                                                        [as=transformers]: gpt and moe as models that AutoModel loads
    dtrain checkpoint export out=runs/lora to=runs/peft adapter=peft       for peft; adapter=merged: as one model
    dtrain checkpoint import hf://gpt2 to=runs/gpt2     weights of others, for init=runs/gpt2 [names=<table>]

`out` is a run, its best checkpoint (runs/a/best), a step's folder or one attempt. No code in a checkpoint is run.
"""

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from dtrain.compose import run_at, value_of
from dtrain.config.constraints import BYTES
from dtrain.config.word import cut
from dtrain.errors import StoreError, WordsError, nearest
from dtrain.predict.report import size
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.storage.attempts import best_step, listed_at
from dtrain.weights import SIZES, plain

if TYPE_CHECKING:
    from dtrain.checkpoint.survey import Attempt

TAKES = {
    "ls": ("out", "step"),
    "verify": ("out", "step"),
    "export": ("out", "step", "to", "weights", "dtype", "shard", "adapter", "as"),
}
UNREAD = "valid: the commit and the sizes of its files are right. dtrain checkpoint verify reads the bytes too."
SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B|B)?")
OTHER_FORMS = {
    "gguf": "Export without as, then type python convert_hf_to_gguf.py {to} of llama.cpp",
    "onnx": "Export without as, then type optimum-cli export onnx --model {to} <place>",
    "diffusers": "Export without as, load the weights into its model and call save_pretrained",
}
"""Form of other tools -> how to get there."""
CHOICES = {"weights": ("model", "ema"), "dtype": ("fp32", "bf16", "fp16"), "adapter": ("peft", "merged"),
           "as": ("transformers",)}  # fmt: skip


def run(words: Sequence[str]) -> int:
    act = words[0] if words else ""
    if act == "import":
        return _import(words[1:])
    if act not in TAKES:
        raise WordsError(
            f"checkpoint {cut(act) or '<what>'}:{nearest(act, [*TAKES, 'import'])} Type dtrain checkpoint ls "
            "out=<a run>."
        )
    options = _read(act, words[1:])
    source = run_at(words[1:], options["out"].rstrip("/"))
    with store.starting():
        listed = listed_at(source)
    chosen = [one for one in listed if "step" not in options or one.step == int(options["step"])]
    if not chosen:
        lacking = f"there is none of step {options['step']}" if listed else "nothing is there"
        raise StoreError.during("find a checkpoint at", source, lacking)
    from dtrain.checkpoint import survey  # imports torch

    attempts = [*survey.attempts(chosen)]
    if act == "ls":
        screen.say(_table(attempts, _policy(source)))
        return 0
    if act == "export" and "step" not in options and (dispute := survey.dispute(attempts)):
        raise StoreError.during("export", source, dispute, "Or type step=<one of them>")
    return _verify(attempts) if act == "verify" else _export(attempts, source, options)


def _read(act: str, words: Sequence[str]) -> dict[str, str]:
    """Option -> value. Raises WordsError with all mistakes."""
    names = list(dict.fromkeys(word.split("=")[0] for word in words))
    problems = [
        f"{name}: checkpoint {act} does not take it.{nearest(name, TAKES[act])}"
        for name in names
        if name not in TAKES[act] and name.split(".")[0] != "out_options"
    ]
    options = {name: value for name in TAKES[act] if (value := value_of(words, name)) is not None}
    problems += [
        f"checkpoint {act} needs {name}. Type {name}=<URL>."
        for name in ("out", "to")
        if name in TAKES[act] and name not in options
    ]
    problems += [
        f"{name}={options[name]}:{_choice(name, options)}"
        for name in CHOICES
        if name in options and options[name] not in CHOICES[name]
    ]
    if not options.get("step", "0").isdecimal():
        problems.append(f"step={options['step']}: a step is a number. Type step=100.")
    if "shard" in options and options.get("adapter") == "peft":
        problems.append("shard: an adapter is exported as one file. Leave shard out.")
    if _bytes(options.get("shard", "1B")) is None:
        problems.append(f"shard={options['shard']}: it is no size. Type shard=5GB.")
    problems += [
        f"{name}=: it is empty. Type {name}=<a folder or URL>."
        for name in ("out", "to")
        if name in options and not options[name]
    ]
    source, target = (options.get(name, "").rstrip("/") for name in ("out", "to"))
    if target and (target == source or f"{target}/".startswith(f"{source}/checkpoints/")):
        problems.append(f"to={options['to']}: the run itself writes there. Type to=<another place>.")
    if problems:
        raise WordsError(*problems)
    return options


def _choice(name: str, options: Mapping[str, str]) -> str:
    """Hint for an option that is none of CHOICES."""
    other = OTHER_FORMS.get(options[name].lower(), "") if name == "as" else ""
    if other:
        return f" dtrain does not write it. {other.format(to=options.get('to', '<the folder>'))}."
    return nearest(options[name], CHOICES[name])


def _import(words: Sequence[str]) -> int:
    """Write weights of others as a checkpoint of dtrain."""
    sources = [word for word in words if "=" not in word.partition("://")[0]]
    others = [word.split("=")[0] for word in words if word not in sources]
    problems = [f"{name}: checkpoint import does not take it.{nearest(name, ('to', 'names'))}"
                for name in others if name not in ("to", "names")]  # fmt: skip
    to, table = value_of(words, "to"), value_of(words, "names")
    if len(sources) != 1 or not to:
        problems.append(
            "checkpoint import needs a place and to. Type dtrain checkpoint import <folder, file or URL> to=<URL>."
        )
    if problems or not to:
        raise WordsError(*problems)
    source = run_at([], sources[0])
    from dtrain.checkpoint.importing import import_weights  # imports torch

    url, weights, ours = import_weights(source, to.rstrip("/"), table)
    total = sum(math.prod(weights.tensors[name].shape) * SIZES[weights.tensors[name].dtype] for name in ours.values())
    lines = [f"{len(ours)} tensors, {size(total)}, of {weights.url}, {weights.kind}", f"  {url}"]
    left = sorted(set(weights.tensors) - set(ours.values()))
    lines += [f"  (without {', '.join(map(plain, left[:3]))}{f' and {len(left) - 3} more' * (len(left) > 3)})"] * bool(
        left
    )
    screen.say(*map(screen.on_one_line, lines))
    return 0


def _bytes(text: str) -> float | None:
    """The size that a text such as 5GB says; None if it is none, or zero."""
    match = SIZE.fullmatch(text)
    return float(match[1]) * BYTES[match[2] or "B"] or None if match else None


def _verify(attempts: Sequence["Attempt"]) -> int:
    """Verify every byte; exit code 1, with the damaged files named, if a checkpoint is damaged."""
    from dtrain.checkpoint import survey

    damaged = 0
    for attempt in attempts:
        faults = [attempt.fault] if attempt.status == "damaged" else []
        if attempt.commit is not None:
            faults += survey.faults(attempt.url, attempt.commit)
        damaged += bool(faults)
        status = "whole" if attempt.commit else attempt.status
        status = "damaged" if faults else status
        screen.say(f"{status:<12} step {attempt.step}  {screen.on_one_line(attempt.url)}  {size(attempt.size)}")
        for fault in faults:
            screen.say(f"             {screen.on_one_line(fault)}")
    screen.say(f"{len(attempts)} checked, {damaged} damaged")
    return 1 if damaged else 0


def _export(attempts: Sequence["Attempt"], source: str, options: Mapping[str, str]) -> int:
    """Export the newest checkpoint whose bytes are intact."""
    from dtrain.checkpoint import companions
    from dtrain.checkpoint.commit import DamagedError, report_damaged
    from dtrain.checkpoint.export import CONFIG, export
    from dtrain.checkpoint.export_adapter import as_peft, merge, written_apart

    faults = list[str]()
    for attempt in attempts:
        if attempt.commit is None:
            faults += filter(None, [attempt.fault])
            continue
        weights, dtype = options.get("weights", "model"), options.get("dtype")
        shard = _bytes(options.get("shard", "")) or math.inf
        beside, lost = companions.of_run(attempt.url)
        ways: dict[str, Callable[..., list[str]]] = {
            "peft": as_peft, "merged": partial(merge, shard=shard, beside=beside),
            "": partial(export, shard=shard, beside=beside),
        }  # fmt: skip
        act = ways[_way(attempt.url, attempt.commit, options)]
        try:
            written = act(
                attempt.url, attempt.commit, options["to"], weights=weights, dtype=dtype, form=options.get("as")
            )
        except DamagedError as error:
            faults.append(str(error))
            continue
        report_damaged(faults, attempt.step)
        lines = [f"step {attempt.step} of {attempt.url}", *(f"  {url}" for url in written)]
        if any(url.endswith(CONFIG) for url in written):
            lines += [f"  (no tokenizer: {fault})" for fault in lost]
        elif act is not as_peft:
            tied = attempt.commit["facts"].get("tied") or {}
            apart = written_apart(attempt.url, attempt.commit) if "adapter" in options else {}
            hint = "; as=transformers makes it one" * bool(attempt.commit["facts"].get("as_transformers"))
            lines.append(f"  (no config.json: the model is not from transformers{hint})")
            lines += [
                f"  ({name} is tied to {saved} and left out: load_state_dict(..., strict=False))"
                for name, saved in tied.items()
                if name not in apart
            ]
        screen.say(*map(screen.on_one_line, lines))
        return 0
    raise StoreError.during("export", source, "; ".join(faults[:3]) or "no checkpoint was committed")


def _way(url: str, commit: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """How an adapter is exported; empty for a model. Raises WordsError if that is not said, or there is none."""
    held, way = commit["facts"].get("adapter"), options.get("adapter", "")
    if held and not way:
        raise WordsError(
            f"{url} holds an adapter ({held['kind']}). Type adapter=merged for one model, or adapter=peft for the "
            "adapter alone, as peft reads it."
        )
    if way and not held:
        raise WordsError(f"adapter={way}: {url} holds a model without an adapter. Leave adapter out.")
    return way


def _policy(source: str) -> Mapping[str, object]:
    """The run's settings for checkpoints; empty when they cannot be read."""
    try:
        plan = yaml.safe_load(store.read(store.join(source.split("/checkpoints/")[0], "plan.yaml")))
        return dict(plan["checkpoint"])
    except (StoreError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _table(attempts: Sequence["Attempt"], policy: Mapping[str, object]) -> str:
    rows = [("step", "attempt", "state", "size", "mesh", "run began", "kept as", "figures")]
    valid = [attempt for attempt in attempts if attempt.commit is not None]
    for attempt in attempts:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in attempt.scores.items())
        now = (str(attempt.step), attempt.name, attempt.status, size(attempt.size))
        rows.append((*now, _mesh(attempt), _age(attempt), _kept(attempt, valid, policy), figures))
    from dtrain.checkpoint import survey

    faults = [f"step {attempt.step}: {attempt.fault}" for attempt in attempts if attempt.fault]
    notes = map(screen.on_one_line, [*faults, *filter(None, [survey.dispute(attempts)])])
    return "\n".join([screen.table(rows), *notes, *[UNREAD] * bool(valid)])


def _kept(attempt: "Attempt", valid: Sequence["Attempt"], policy: Mapping[str, object]) -> str:
    """Why the retention policy keeps this checkpoint."""
    if attempt.commit is None:
        return ""
    every, best = policy.get("keep_every"), str(policy.get("best"))
    first = best_step({one.step: one.scores.get(best, math.nan) for one in valid}, str(policy.get("best_is")))
    reasons = {
        "newest": attempt is valid[0],
        f"every {every}": isinstance(every, int) and every > 0 and attempt.step % every == 0,
        f"best {best}": attempt.step == first,
    }
    return ", ".join(name for name, holds in reasons.items() if holds)


def _mesh(attempt: "Attempt") -> str:
    """Ranks, and the mesh axes larger than 1."""
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
