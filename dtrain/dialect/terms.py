"""Terms that several tools share: optimizers of torch, warm-up and decay, types of numbers, places for
output.

Formulas were read in the tools' own documentation; where one of theirs is not exactly ours, the note of the carried key
says by how much.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.dialect.ledger import Ledger, Rule, number, show, text
from dtrain.dialect.rules import chosen, lacking, refused, says, to, unneeded

BEHIND = "theirs begins at 0 and stays a step behind, two in DeepSpeed"
"""transformers, torchtune and DeepSpeed warm up by step / warmup, counted from 0; dtrain by (step + 1) / warmup."""
MATRICES = "here norms, biases and other vectors do not decay"
NO_DATA = (
    "dtrain has no such data. Type data=tokens data.path=<token files>, data=text data.path=<URL>, or "
    "data=dataset data.dataset._target_=<yours> trust=[<its package>]"
)

ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("adamw", {**ADAM, "weight_decay": 0.01}),
    "adam": ("adamw", ADAM),
    "sgd": ("sgd", {"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
}
"""class of torch.optim in lower case -> our word, and its own defaults:
https://docs.pytorch.org/docs/stable/optim.html
"""
SPEED = "speed only; here one fused kernel is used where there is one"
REST: Mapping[str, Rule] = {
    "fused": unneeded(SPEED), "foreach": unneeded(SPEED), "capturable": unneeded(SPEED),
    "differentiable": unneeded(SPEED),
    "amsgrad": lacking("there is no amsgrad. Leave it out, or write a schedule and optimizer of your own: "
        "optim._target_=<yours> trust=[<its package>]."),
    "maximize": lacking("losses are minimised. Turn the sign of the loss in an objective of your own."),
    "dampening": lacking("there is no dampening. Leave it out."),
}  # fmt: skip
"""Arguments of torch's optimizers beside those that carry over."""


def optimizer(ledger: Ledger, name_key: str, prefix: str, name: str, defaults: Mapping[str, Any] | None = None) -> None:
    """An optimizer of torch by the name of its class, its arguments below `prefix`; `defaults` of the tool where they
    are not torch's.
    """
    word, own = DEFAULTS.get(name.lower(), ("", {}))
    arguments = ledger.under(prefix) if prefix else []
    arguments = [key for key in arguments if key != name_key]
    decay = ledger.get(f"{prefix}.weight_decay", 0)
    adds = name.lower() == "adam" and decay != 0 and decay != "auto"
    if not word or adds:
        why = (
            "Adam adds the decay to the gradient, optim=adamw takes it off the weights. Type optim=adamw "
            f"optim.weight_decay={decay} if that is meant."
            if adds
            else f"there is no optimizer {name}. Type optim=adamw, sgd, muon or adafactor, or optim._target_=<yours> "
            "trust=[<its package>]."
        )
        for key in [name_key, *arguments]:
            ledger.refuse(key, why)
        unknown_optimizer(ledger, name, ledger.get(f"{prefix}.lr"))
        return
    ledger.carry(name_key, {"optim": word}, "the same without decay" if name.lower() == "adam" else "")
    known = {f"{prefix}.{argument}": argument for argument in own}
    for key in arguments:
        if key in known:
            note = MATRICES if known[key] == "weight_decay" and ledger.get(key) else ""
            to(f"optim.{known[key]}", _pair if known[key] == "betas" else _plain, note)(ledger, key, ledger.leaves[key])
        elif key.removeprefix(f"{prefix}.") in REST:
            REST[key.removeprefix(f"{prefix}.")](ledger, key, ledger.leaves[key])
    told = {argument for key, argument in known.items() if key in arguments}
    ledger.imply(
        {f"optim.{argument}": value for argument, value in {**own, **(defaults or {})}.items() if argument not in told},
        f"default of {name} in {ledger.tool}",
    )


def unknown_optimizer(ledger: Ledger, name: str, lr: Any) -> None:
    """Another one has to be chosen, and a learning rate for it."""
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
    """Words of a schedule: `shape` is constant, cosine or linear, from the end of `warmup` to the end of the run;
    linear needs its `steps`.
    """
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
    """Where a run lands is said on the command line alone."""
    to("out", text, command=True)(ledger, key, value)


def epochs(word: str = "steps") -> Rule:
    """Epochs mean a number of samples that the file does not say."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        if isinstance(value, str | bool) or not isinstance(value, int | float):
            to(word, number)(ledger, key, value)
        else:
            ledger.ask(word, f"{value} x samples / batch")
            ledger.refuse(
                key,
                f"dtrain counts steps, and how many samples an epoch has is not in this file. Type {word}=<{value} x "
                "samples / batch>.",
            )

    return rule


def precision_rule(table: Mapping[Any, str], other: str) -> Rule:
    """Carried by a table of their names -> ours."""
    return chosen({name: says({"precision": word}) for name, word in table.items()}, refused(other, "precision"))
