"""Translations that several tools share: torch's optimizers, warm-up and decay, precision, and output.

The formulas come from the tools' documentation; where one differs from dtrain's, the note of the carried key says how.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.dialect.ledger import Ledger, Rule, number, show, text
from dtrain.dialect.rules import chosen, lacking, refused, says, to, unneeded

BEHIND = "their warm-up starts at 0 and lags one step behind, two in DeepSpeed"
"""transformers, torchtune and DeepSpeed warm up by step / warmup, counted from 0; dtrain by (step + 1) / warmup."""
MATRICES = "dtrain does not decay norms, biases and other vectors"
NO_DATA = (
    "dtrain does not read this data format. Type data=tokens data.path=<token files>, data=text data.path=<URL>, or "
    "data=dataset data.dataset._target_=<yours> trust=[<its package>]"
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
SPEED = "affects speed only; dtrain uses a fused kernel where available"
REST: Mapping[str, Rule] = {
    "fused": unneeded(SPEED), "foreach": unneeded(SPEED), "capturable": unneeded(SPEED),
    "differentiable": unneeded(SPEED),
    "amsgrad": lacking("amsgrad is not supported. Leave it out, or write your own optimizer: "
        "optim._target_=<yours> trust=[<its package>]."),
    "maximize": lacking("dtrain minimises the loss. Negate it in your own objective."),
    "dampening": lacking("dampening is not supported. Leave it out."),
}  # fmt: skip
"""Rules for the arguments of torch's optimizers that do not carry over."""


def optimizer(ledger: Ledger, name_key: str, prefix: str, name: str, defaults: Mapping[str, Any] | None = None) -> None:
    """Translate a torch optimizer by its class name, with its arguments below `prefix`; `defaults` are the tool's where
    they differ from torch's."""
    word, own = DEFAULTS.get(name.lower(), ("", {}))
    arguments = ledger.under(prefix) if prefix else []
    arguments = [key for key in arguments if key != name_key]
    decay = ledger.get(f"{prefix}.weight_decay", 0)
    adds = name.lower() == "adam" and decay != 0 and decay != "auto"
    if not word or adds:
        why = (
            "Adam adds the decay to the gradient; optim=adamw decays the weights directly. Type optim=adamw "
            f"optim.weight_decay={decay} if you want that."
            if adds
            else f"unknown optimizer {name}. Type optim=adamw, sgd, muon or adafactor, or optim._target_=<yours> "
            "trust=[<its package>]."
        )
        for key in [name_key, *arguments]:
            ledger.refuse(key, why)
        unknown_optimizer(ledger, name, ledger.get(f"{prefix}.lr"))
        return
    ledger.carry(name_key, {"optim": word}, "equal to Adam without decay" if name.lower() == "adam" else "")
    known = {f"{prefix}.{argument}": argument for argument in own}
    for key in arguments:
        if key in known:
            note = MATRICES if known[key] == "weight_decay" and ledger.get(key) else ""
            to(f"optim.{known[key]}", _pair if known[key] == "betas" else _plain, note)(ledger, key, ledger.leaves[key])
        elif key.removeprefix(f"{prefix}.") in REST:
            REST[key.removeprefix(f"{prefix}.")](ledger, key, ledger.leaves[key])
    given = {argument for key, argument in known.items() if key in arguments}
    ledger.imply(
        {
            f"optim.{argument}": value
            for argument, value in {**own, **(defaults or {})}.items()
            if argument not in given
        },
        f"default of {name} in {ledger.tool}",
    )


def unknown_optimizer(ledger: Ledger, name: str, lr: Any) -> None:
    """Ask for another optimizer and its learning rate."""
    ledger.ask("optim")
    ledger.words.pop("optim.lr", None)
    ledger.ask("optim.lr", "value" if lr in (None, "auto") else f"{show(lr)} with {name}")


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool) else number(value)


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("two numbers")
    return [number(part) for part in value]


def decaying(shape: str, warmup: float, steps: int | None, floor: float = 0.0) -> dict[str, Any]:
    """Return the words of a schedule that is constant, cosine or linear from the end of `warmup` to the end of the run;
    linear needs `steps`."""
    if shape == "linear" and steps is not None:
        return {
            "schedule": "wsd",
            "schedule.warmup": warmup,
            "schedule.decay": max(0, steps - warmup),
            "schedule.floor": floor,
        }
    ends = {"schedule.floor": floor} if shape == "cosine" else {}
    return {"schedule": shape, "schedule.warmup": warmup, **ends}


def output(ledger: Ledger, key: str, value: Any) -> None:
    """Carry the output folder over to the command line."""
    to("out", text, command=True)(ledger, key, value)


def epochs(word: str = "steps") -> Rule:
    """Refuse epochs, since the file does not give the number of samples."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        if isinstance(value, str | bool) or not isinstance(value, int | float):
            to(word, number)(ledger, key, value)
        else:
            ledger.ask(word, f"{value} x samples / batch")
            ledger.refuse(
                key,
                f"dtrain counts steps, and this file does not give the samples of an epoch. Type {word}=<{value} x "
                "samples / batch>.",
            )

    return rule


def precision_rule(table: Mapping[Any, str], other: str) -> Rule:
    """Carry a precision over by a table of the tool's names -> dtrain's."""
    return chosen({name: says({"precision": word}) for name, word in table.items()}, refused(other, "precision"))
