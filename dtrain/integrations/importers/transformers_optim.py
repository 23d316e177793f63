"""Translation of the optimizer and the schedule of Hugging Face's TrainingArguments."""

from dtrain.integrations.importers.axolotl_optim import BETAS, given_of, is_number, is_warmup
from dtrain.integrations.importers.ledger import Code, Ledger
from dtrain.integrations.importers.rules import refused, says, unneeded
from dtrain.integrations.importers.terms import BEHIND, ROUNDED, decaying, unknown_optimizer, unknown_schedule
from dtrain.integrations.importers.transformers_trainer import own_optimizer

TRAINER = "default of the class"
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")


def optimizer_section(ledger: Ledger, t: str) -> None:
    """Translate the optimizer and its schedule, but for what code gives in their place."""
    is_own = own_optimizer(ledger, t)
    for own, tell in zip(is_own, (_named_optimizer, _schedule), strict=True):
        if not own:
            tell(ledger, t)


def _named_optimizer(ledger: Ledger, t: str) -> None:
    old = [f"{t}adafactor"] * (ledger.get(f"{t}adafactor") is True)
    said = ledger.get(f"{t}optim", "adamw_torch_fused")
    name = said if isinstance(said, Code) else str(said)
    name = "adafactor" if old else name
    if name not in (*ADAMW, "sgd"):
        unknown = refused(f"unknown optimizer {name}. Type optim=adamw, sgd, muon or adafactor.")
        ledger.settle(unknown, f"{t}optim", *old)
        unknown_optimizer(ledger, name, given_of(ledger, t))
        option = refused(f"an option of {name}. Type it for the optimizer that you choose.")
        ledger.settle(option, *(f"{t}{key}" for key in ("learning_rate", "weight_decay", *BETAS, "adam_epsilon")))
        return
    ledger.imply({"optim": name.partition("_")[0], "optim.weight_decay": 0.0}, TRAINER)
    ledger.settle(says({"optim": name.partition("_")[0]}), f"{t}optim")
    if name == "sgd":
        ledger.settle(unneeded("sgd has none"), *(f"{t}{key}" for key in (*BETAS, "adam_epsilon")))
        ledger.imply({"optim.momentum": 0.0, "optim.nesterov": False}, TRAINER)
        return
    betas = given_of(ledger, t)["betas"]
    ledger.settle(says({"optim.betas": betas}), *(f"{t}{key}" for key in BETAS))
    ledger.imply({"optim.betas": betas, "optim.eps": 1e-8}, TRAINER)


def _schedule(ledger: Ledger, t: str) -> None:
    """Translate the schedule, which is linear by default; a warm-up below 1 is a part of the run."""
    name = str(ledger.get(f"{t}lr_scheduler_type", "linear"))
    keys = [f"{t}{key}" for key in ("warmup_steps", "warmup_ratio")]
    given_keys = [ledger.get(key) for key in keys]
    warmup = next((value for value in given_keys if value and not isinstance(value, Code)), 0)
    shape, curve = name.removesuffix("_with_warmup"), ledger.under(f"{t}lr_scheduler_kwargs")
    if not is_warmup(warmup):
        odd = "a warm-up is a number of steps >= 0, or a part of the run below 1. Type schedule.warmup=<it>."
        ledger.settle(refused(odd, "schedule.warmup"), *keys)
        warmup = 0
    floor = _floor(ledger, t) if name == MIN_LR else 0.0
    if any(ledger.leaves[key] for key in curve) and name != MIN_LR:
        floor = None
    if floor is None or shape not in ("cosine", "linear", "constant", MIN_LR):
        why = "its arguments are not taken over. Type schedule=linear, cosine, constant or wsd with its words."
        ledger.settle(refused(why if curve else unknown_schedule(name)), f"{t}lr_scheduler_type", *curve)
        ledger.ask("schedule")
        words = {"schedule.warmup": warmup}
    else:
        words = decaying("cosine" if name == MIN_LR else shape, 0 if name == "constant" else warmup, floor)
        ledger.settle(says({"schedule": words["schedule"]}), f"{t}lr_scheduler_type")
        ledger.settle(says({"schedule.floor": floor}), *curve)
    note = f"{BEHIND}, {ROUNDED.format('up')}" if warmup < 1 else BEHIND
    for key in keys:
        if key in ledger.open() and ledger.get(key) == warmup and warmup and name != "constant":
            ledger.carry(key, {"schedule.warmup": warmup}, note)
        elif key in ledger.open():
            ledger.skip(key, "no warm-up, or another key gives it")
    ledger.imply(words, TRAINER)


MIN_LR = "cosine_with_min_lr"


def _floor(ledger: Ledger, t: str) -> float | None:
    """The floor of a cosine that ends at a rate of its own; None where it is not in the file."""
    given = {key.rpartition(".")[2]: ledger.leaves[key] for key in ledger.under(f"{t}lr_scheduler_kwargs")}
    rate, least = ledger.get(f"{t}learning_rate"), given.get("min_lr")
    if list(given) == ["min_lr_rate"] and is_number(given["min_lr_rate"]):
        return float(given["min_lr_rate"])
    if list(given) == ["min_lr"] and is_number(least) and is_number(rate) and rate > 0:
        return float(f"{least / rate:.12g}")
    return None
