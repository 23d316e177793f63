"""Translation of axolotl's optimizer and schedule."""

from dtrain.dialect.ledger import Ledger, number
from dtrain.dialect.rules import to, unneeded
from dtrain.dialect.terms import BEHIND, decaying, unknown_optimizer

ADAMW = frozenset(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"))


def optimizer_section(ledger: Ledger) -> None:
    name = str(ledger.get("optimizer", "adamw_torch_fused"))
    if name in ADAMW:
        betas = [ledger.get("adam_beta1", 0.9), ledger.get("adam_beta2", 0.999)]
        if "optimizer" in ledger.leaves:
            ledger.carry("optimizer", {"optim": "adamw"})
        for key in ledger.under("adam_beta1", "adam_beta2"):
            ledger.carry(key, {"optim.betas": betas})
        for key in ledger.under("adam_epsilon"):
            to("optim.eps", number)(ledger, key, ledger.leaves[key])
        ledger.imply({"optim": "adamw", "optim.betas": betas, "optim.eps": 1e-8}, "default of transformers' Trainer")
    elif name == "sgd":
        ledger.carry("optimizer", {"optim": "sgd"})
        ledger.imply({"optim.momentum": 0.0, "optim.nesterov": False}, "default of transformers' Trainer")
    else:
        ledger.refuse("optimizer", f"unknown optimizer {name}. Type optim=adamw, sgd, muon or adafactor.")
        unknown_optimizer(ledger, name, ledger.get("learning_rate"))
        for key in ledger.under("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
            ledger.refuse(key, f"an option of {name}. Type it for the optimizer that you choose.")
        return
    ledger.imply({"optim.weight_decay": 0.0}, "default of transformers' Trainer")


def schedule_section(ledger: Ledger) -> None:
    """Translate the schedule. It ends with the run; the warm-up is a number of steps or a fraction of the run."""
    name, steps = str(ledger.get("lr_scheduler", "cosine")), ledger.words.get("steps")
    warmup, floor = warmup_of(ledger, steps), ledger.get("cosine_min_lr_ratio", 0.0)
    shape = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}.get(
        name
    )
    if shape is None or (shape == "linear" and (steps is None or warmup < 1 < warmup * 2)):
        why = f"unknown schedule {name}. Type schedule=cosine, constant or wsd."
        why = (
            "a linear decay needs the number of steps. Type schedule=wsd schedule.decay=<steps without warm-up> "
            "schedule.floor=0."
            if shape
            else why
        )
        if "lr_scheduler" in ledger.leaves:
            ledger.refuse("lr_scheduler", why)
        ledger.ask("schedule")
    else:
        words = decaying(shape, 0 if name == "constant" else warmup, steps, floor)
        if "lr_scheduler" in ledger.leaves:
            ledger.carry("lr_scheduler", {"schedule": words["schedule"]})
        for key in ledger.under("cosine_min_lr_ratio"):
            (to("schedule.floor") if shape == "cosine" else unneeded("only the cosine schedule uses it"))(
                ledger, key, ledger.leaves[key]
            )
        ledger.imply(
            words, "default of axolotl" if "lr_scheduler" not in ledger.leaves else f"default of {name} in transformers"
        )
    for key in ledger.under("warmup_steps", "warmup_ratio"):
        if name == "constant":
            ledger.skip(key, "transformers' constant has no warm-up")
        elif key == "warmup_ratio" and ledger.get("warmup_steps") is not None:
            ledger.skip(key, "warmup_steps takes precedence")
        else:
            note = BEHIND if warmup else ""
            note = f"of {steps} steps; {note}" if key == "warmup_ratio" and steps else note
            ledger.carry(key, {"schedule.warmup": warmup}, note, command="schedule" in ledger.command)
    if "schedule" not in ledger.command:
        ledger.imply({"schedule.warmup": warmup}, "default of axolotl")


def warmup_of(ledger: Ledger, steps: int | None) -> int | float:
    """Return the warm-up in steps, or as a fraction of the run where its length is unknown."""
    given, ratio = ledger.get("warmup_steps"), ledger.get("warmup_ratio")
    if isinstance(given, int | float):
        return 2 if given == 1 else given
    part = ratio if isinstance(ratio, int | float) else 0.03
    if steps is None:
        return part
    return int(part * steps) if ratio is not None else min(int(part * steps), 100)
