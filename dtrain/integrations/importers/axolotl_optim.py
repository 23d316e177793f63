"""Translation of axolotl's optimizer and schedule."""

from typing import Any

from dtrain.integrations.importers.ledger import Ledger
from dtrain.integrations.importers.rules import refused, says, to, unneeded
from dtrain.integrations.importers.terms import BEHIND, ROUNDED, decaying, unknown_optimizer, unknown_schedule

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")
BENT = ("lr_scheduler_kwargs", "lr_quadratic_warmup", "cosine_constant_lr_ratio")
"""Keys that give a schedule another curve."""
CURVE = "its curve is not taken over. Type schedule=linear, cosine, constant or wsd with its words."
DEFAULT = "default of axolotl, where it is at most 100 steps"


def optimizer_section(ledger: Ledger) -> None:
    name, trainer = str(ledger.get("optimizer", "adamw_torch_fused")), "default of transformers' Trainer"
    if name in ADAMW:
        betas = given_of(ledger)["betas"]
        ledger.settle(says({"optim": "adamw"}), "optimizer")
        ledger.settle(says({"optim.betas": betas}), "adam_beta1", "adam_beta2")
        ledger.settle(to("optim.eps"), "adam_epsilon")
        ledger.imply({"optim": "adamw", "optim.betas": betas, "optim.eps": 1e-8}, trainer)
    elif name == "sgd":
        ledger.carry("optimizer", {"optim": "sgd"})
        ledger.imply({"optim.momentum": 0.0, "optim.nesterov": False}, trainer)
    else:
        ledger.refuse("optimizer", f"unknown optimizer {name}. Type optim=adamw, sgd, muon or adafactor.")
        unknown_optimizer(ledger, name, given_of(ledger))
        option = refused(f"an option of {name}. Type it for the optimizer that you choose.")
        ledger.settle(option, "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
        return
    ledger.imply({"optim.weight_decay": 0.0}, trainer)


def given_of(ledger: Ledger, t: str = "") -> dict[str, Any]:
    """The options of an optimizer by their words, from transformers' arguments with the prefix `t`."""
    betas = [ledger.get(f"{t}{name}", default) for name, default in BETAS.items()]
    return {"lr": ledger.get(f"{t}learning_rate"), "weight_decay": ledger.get(f"{t}weight_decay", 0.0), "betas": betas}


def schedule_section(ledger: Ledger) -> None:
    """Translate the schedule. It ends with the run; the warm-up is a number of steps or a fraction of the run."""
    name, steps = str(ledger.get("lr_scheduler", "cosine")), ledger.words.get("steps")
    odd = refused("a warm-up is a number of steps >= 0, or a part of the run below 1.", "schedule.warmup")
    for key in ledger.under("warmup_steps", "warmup_ratio"):
        if "." in key or not is_warmup(ledger.leaves[key], most=1 if key == "warmup_ratio" else None):
            ledger.settle(odd, key)
    warmup, floor = warmup_of(ledger, steps), ledger.get("cosine_min_lr_ratio", 0.0)
    shape = name.removesuffix("_with_warmup")
    if name == "constant":
        ledger.settle(unneeded("transformers' constant has no warm-up"), "warmup_steps", "warmup_ratio")
    if ledger.get("warmup_steps") is not None:
        ledger.settle(unneeded("warmup_steps takes precedence"), "warmup_ratio")
    changed = [key for key in ledger.under(*BENT) if ledger.leaves[key]]
    if name not in SCHEDULES or (changed and shape != "linear"):
        ledger.settle(refused(CURVE if changed else unknown_schedule(name)), "lr_scheduler", *changed)
        ledger.ask("schedule")
    else:
        words = decaying(shape, 0 if name == "constant" else warmup, floor if shape == "cosine" else 0.0)
        default = f"default of {name} in transformers" if "lr_scheduler" in ledger.leaves else "default of axolotl"
        ledger.settle(says({"schedule": words["schedule"]}), "lr_scheduler")
        unused = unneeded("only the cosine schedule uses it")
        ledger.settle(to("schedule.floor") if shape == "cosine" else unused, "cosine_min_lr_ratio")
        ledger.imply({"schedule.warmup": words["schedule.warmup"]}, DEFAULT)
        ledger.imply(words, default)
    note = BEHIND if warmup else ""
    note += f", {ROUNDED.format('down')}" if 0 < warmup < 1 else ""
    for key, part in (("warmup_steps", note), ("warmup_ratio", f"of {steps} steps; {note}" if steps else note)):
        if key in ledger.open():
            ledger.carry(key, {"schedule.warmup": warmup}, part)
    ledger.imply({"schedule.warmup": warmup}, DEFAULT)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_warmup(value: Any, most: float | None = None) -> bool:
    """Whether a value is one of a warm-up, or missing."""
    return value is None or (is_number(value) and value >= 0 and (most is None or value <= most))


def warmup_of(ledger: Ledger, steps: int | None) -> int | float:
    """Return the warm-up in steps, or as a fraction of the run where its length is unknown."""
    given, ratio = ledger.get("warmup_steps"), ledger.get("warmup_ratio")
    if is_warmup(given) and given is not None:
        return 2 if given == 1 else given
    part = ratio if isinstance(ratio, int | float) and is_warmup(ratio, most=1) else 0.03
    if steps is None:
        return part
    return int(part * steps) if ratio is not None else min(int(part * steps), 100)
