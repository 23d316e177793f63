"""Translations that several tools share: torch's optimizers, warm-up and decay, precision, and output.

The formulas come from the tools' documentation; where one differs from dtrain's, the note of the carried key says how.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from dtrain.config import files
from dtrain.config.period import EPOCH
from dtrain.integrations.importers.ledger import Code, Ledger, Rule, count, number, positive, show, text
from dtrain.integrations.importers.rules import chosen, lacking, refused, says, switched, table, to, turns_on, unneeded
from dtrain.secrets import screen

BEHIND = "their warm-up starts at 0 and lags one step behind"
"""transformers and torchtune warm up by step / warmup, counted from 0; dtrain by (step + 1) / warmup."""
ROUNDED = "and is rounded {} to whole steps"
"""Of a warm-up that is a part of the run."""
MATRICES = "dtrain does not decay norms, biases and other vectors"
NO_DATA = (
    "dtrain does not read this data format. Type data=chat data.path=<rows>, data=text data.path=<URL>, data=tokens "
    "data.path=<token files>, or data=dataset data.dataset._target_=<yours> trust=[<its package>]"
)

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("adamw", {**ADAM, "weight_decay": 0.01}),
    "adam": ("adamw", ADAM),
    "sgd": ("sgd", {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
}
"""class of torch.optim in lower case -> dtrain's word, and torch's defaults:
https://docs.pytorch.org/docs/stable/optim.html
"""
SPEED = unneeded("affects speed only; dtrain uses a fused kernel where available")
REST = table(
    {
        "fused foreach capturable differentiable": SPEED,
        "amsgrad": lacking(
            "amsgrad is not supported. Leave it out, or write your own optimizer: optim._target_=<yours> trust=[<its "
            "package>]."
        ),
        "maximize": lacking("dtrain minimises the loss. Negate it in your own objective."),
        "dampening": lacking("dampening is not supported. Leave it out."),
    }
)
"""Rules for the arguments of torch's optimizers that do not carry over."""

CHECKPOINTS = unneeded("checkpoints are sharded and any mesh can read them; dtrain checkpoint export writes one file")
CLIP = chosen({0: says({"clip": None}, "0 means none")}, to("clip"))
CHANGES_LOSS = lacking(
    "it changes what is trained, and dtrain has no equivalent. Leave it out and type objective=<the word>, or one of "
    "your own.",
    asked="objective",
)
COMPILE = switched(says({"compile": "blocks"}), says({"compile": "none"}))
DETERMINISTIC = lacking("on GPUs type backend=nccl backend.kernels=deterministic; CPU kernels are deterministic.")
DISK = refused("there is no offload to disk. Type strategy.offload=cpu for host memory, or use more ranks.")
QAT = (
    "there is no training with fake quantization. Train without it and quantise the folder that dtrain checkpoint "
    "export writes, with quantize_ of torchao; or type model._target_=<a function that returns the model after "
    "quantize_(model, QATConfig(...))> trust=[<its package>]."
)
EVALUATED = refused(
    "the evaluation is code. Type evaluate.every=epoch for one after each epoch, on "
    "data.holdout_dataset._target_=<its dataset>, on data.holdout=<a part of the training data>, or on several "
    "evaluate.sets={<name>: {dataset: {_target_: <its dataset>}}}, with evaluate.metrics=[<word>]."
)
FP8 = turns_on({"precision": "fp8"}, "needs torchao and a GPU with fp8")
GPUS = unneeded("GPUs if available, as here")
NO_ACTIVATION_OFFLOAD = lacking("there is no activation offload. Type remat=full.")
NO_PROFILER = lacking("there is no profiler during training. Leave it out.")
NO_TPU = lacking("dtrain does not run on TPUs. Leave it out.")
OFFLOAD = turns_on({"strategy.offload": "cpu"})
OWN_CHECKPOINT = lacking("a run resumes from its own checkpoint. Type init=<the checkpoint> to load weights only.")
REMAT = turns_on({"remat": "full"})
SEQUENCE = to("data.sequence", count, "together with data=..., which you must type", command=True)
output = to("out", text, command=True)


def best(ledger: Ledger, key: str, value: Any) -> None:
    """Keep the best checkpoint, by the metric beside the key: transformers' Trainer ends with its weights."""
    section = key.rpartition(".")[0]
    metric, higher = (
        ledger.get(f"{section}.{name}".removeprefix(".")) for name in ("metric_for_best_model", "greater_is_better")
    )
    name = str(metric or "loss").removeprefix("eval_")
    is_listed = name in files.groups()["metric"]
    words: dict[str, Any] = {"evaluate.metrics": [name]} if is_listed else {}
    words["checkpoint.best"] = f"eval_{name}"
    if isinstance(higher, bool) or not (is_listed or name == "loss"):
        words["checkpoint.best_is"] = "lowest" if higher is False else "highest"
    if any(isinstance(each, Code) for each in (metric, higher)):
        lacking("Type checkpoint.best=eval_<its metric>.", asked="checkpoint.best")(ledger, key, value)
    elif not is_listed and name != "loss":
        typed = " ".join(f"{word}={show(each)}" for word, each in words.items())
        why = f"{name} is computed by code. Type evaluate.metrics=[<it>] {typed}, which keeps <out>/best."
        lacking(why, asked="checkpoint.best")(ledger, key, value)
    else:
        turns_on(words, "commands take <out>/best for its checkpoint, which is no folder")(ledger, key, value)


def of_the_hub(path: str, name: str, split: str) -> str:
    """Return why a dataset of the hub is asked for as files, with the line that writes them."""
    of = ", ".join(json.dumps(part, ensure_ascii=False) for part in (path, name) if part)
    rows = f"f({of}, split={json.dumps(split or 'train', ensure_ascii=False)})"
    load = shlex.quote(f'from datasets import load_dataset as f; {rows}.save_to_disk("<folder>")')
    return f"data.path takes files, or a folder of save_to_disk. Type data.path=<folder> after python -c {load}."


def degree(axis: str, further: Mapping[str, str] | None = None) -> Rule:
    """Carry the degree of a mesh axis over, together with the words `further`."""
    one = unneeded("one, as here")
    return chosen({1: one, None: one}, to(f"mesh.{axis}", count, further=further))


def optimizer(ledger: Ledger, name_key: str, prefix: str, name: str, defaults: Mapping[str, Any] | None = None) -> None:
    """Translate a torch optimizer by its class name, with its arguments below `prefix`; `defaults` are the tool's where
    they differ from torch's."""
    word, own = DEFAULTS.get(name.lower(), ("", {}))
    decay = ledger.get(f"{prefix}.weight_decay", 0)
    why = ""
    if not word:
        why = (
            f"unknown optimizer {name}. Type optim=adamw, sgd, muon or adafactor, or optim._target_=<yours> "
            "trust=[<its package>]."
        )
    elif name.lower() == "adam" and decay not in (0, "auto"):
        why = (
            "Adam adds the decay to the gradient; optim=adamw decays the weights directly. Type optim=adamw "
            f"{screen.typed(f'optim.weight_decay={decay}')} if you want that."
        )
    if why:
        ledger.settle(refused(why), name_key, f"{prefix}.**")
        unknown_optimizer(ledger, name, {word: ledger.get(f"{prefix}.{word}") for word in OPTIONS})
        return
    ledger.carry(name_key, {"optim": word}, "equal to Adam without decay" if name.lower() == "adam" else "")
    silent = {**own, **(defaults or {})}
    for key in ledger.under(prefix):
        argument = key.removeprefix(f"{prefix}.")
        if argument in own:
            note = MATRICES if argument == "weight_decay" and ledger.get(key) else ""
            ledger.settle(to(f"optim.{argument}", _pair if argument == "betas" else _plain, note), key)
            del silent[argument]
        elif argument in REST:
            ledger.settle(REST[argument], key)
    words = {f"optim.{argument}": value for argument, value in silent.items()}
    ledger.imply(words, f"default of {name} in {ledger.tool}")


OPTIONS = ("lr", "weight_decay", "betas")


def unknown_optimizer(ledger: Ledger, name: str, given: Mapping[str, Any]) -> None:
    """Ask for another optimizer and its OPTIONS, of which the file has `given`."""
    ledger.ask("optim")
    for word in OPTIONS if "adam" in name.lower() or isinstance(name, Code) else OPTIONS[:2]:
        value = given.get(word)
        ledger.words.pop(f"optim.{word}", None)
        ledger.ask(f"optim.{word}", "value" if value in (None, "auto") else f"{show(value)} with {name}")


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool) else number(value)


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("two numbers")
    return [number(part) for part in value]


def decaying(shape: str, warmup: float, floor: float = 0.0) -> dict[str, Any]:
    """Return the words of a schedule that is constant, cosine or linear from the end of `warmup` to the end of the run,
    where it is at `floor`."""
    ends = {} if shape == "constant" else {"schedule.floor": floor}
    return {"schedule": shape, "schedule.warmup": warmup, **ends}


def unknown_schedule(name: str) -> str:
    return f"unknown schedule {name}. Type schedule=linear, cosine, constant or wsd."


def epochs(word: str) -> Rule:
    """Carry a period of one epoch over; refuse a number of epochs, since the file does not give the number of
    samples.
    """
    once = says({word: EPOCH})
    return chosen({1: once, EPOCH: once}, of_samples(word, lambda value: f"{value} x samples / batch"))


def passes(ledger: Ledger, key: str, value: Any) -> None:
    """Carry the length of a run in epochs over: they are counted when the data is known."""
    to("epochs", positive, "passes over the training data, the last step filled up")(ledger, key, value)
    if "epochs" in ledger.words:
        ledger.command.pop("steps", None)


def of_samples(word: str, hint: Callable[[Any], str]) -> Rule:
    """Refuse a number that means steps only if one knows the samples of an epoch; `hint` says how it does."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            to(word)(ledger, key, value)
            return
        ledger.ask(word, hint(value))
        ledger.refuse(key, f"this file does not give the samples of an epoch. Type {word}=<{hint(value)}>.")

    return rule


def ask_for_data(ledger: Ledger, what: str) -> None:
    """Ask for the data, also in the recipe, so that no default takes its place."""
    ledger.ask("data", what)
    ledger.words["data"], ledger.implied["data"] = "???", "the data is code, and must be typed"


def precision_rule(table: Mapping[Any, str], other: str) -> Rule:
    """Carry a precision over by a table of the tool's names -> dtrain's."""
    return chosen({name: says({"precision": word}) for name, word in table.items()}, refused(other, "precision"))
