"""Translation of DeepSpeed's optimizer and scheduler sections."""

from typing import Any

from dtrain.integrations.importers.ledger import Ledger
from dtrain.integrations.importers.rules import chosen, refused, says, to, unneeded, unread
from dtrain.integrations.importers.terms import decaying, optimizer, unknown_schedule

LOG = (
    "DeepSpeed's warm-up is logarithmic, dtrain's is linear. Type schedule.warmup={} for a linear one of the same "
    "length, or 0 for none."
)
CURVED = "its warm-up is logarithmic, here linear"
BEHIND = "its warm-up starts at 0 and lags two steps behind, a decay one"
SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OF_STEPS = {"total_num_steps": "steps", "warmup_num_steps": "schedule.warmup", "warmup_max_lr": "optim.lr"}
"""Parameter of a scheduler that another program may fill in -> dtrain's word."""


def optimizer_section(ledger: Ledger) -> None:
    """Translate the optimizer. DeepSpeed's Adam is AdamW unless adam_w_mode is false; its kernels default to no
    decay.
    """
    name, p = str(ledger.get("optimizer.type", "")), "optimizer.params"
    if not name or unread(ledger, "optimizer.type", name, "optim"):
        return
    kernel = unneeded("selects a kernel only; optimizer.type selects the algorithm")
    ledger.settle(kernel, f"{p}.torch_adam", f"{p}.adam_w_mode", f"{p}.fp32_optimizer_states")
    corrected = {True: unneeded("Adam's bias is corrected, as here")}
    ledger.settle(chosen(corrected, refused("Adam's bias is corrected here. Leave it out.")), f"{p}.bias_correction")
    if "optim.lr" in ledger.words:
        ledger.settle(unneeded("the scheduler's warmup_max_lr overrides it, as in DeepSpeed"), f"{p}.lr")
    defaults = None
    if name.lower() in ("adam", "adamw"):
        decoupled = name.lower() == "adamw" or ledger.get(f"{p}.adam_w_mode", True) is True
        name = "AdamW" if decoupled else "Adam"
        if ledger.get(f"{p}.torch_adam") is not True:
            defaults = {"weight_decay": 0.0}
    optimizer(ledger, "optimizer.type", p, name, defaults)


def schedule_section(ledger: Ledger) -> None:
    """Translate the schedule; total_num_steps is the length of the run."""
    p, name = "scheduler.params", str(ledger.get("scheduler.type", ""))
    if not name:
        if ledger.get("optimizer.type"):  # otherwise the script creates both
            ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no scheduler in this file")
        return
    for key, word in OF_STEPS.items():
        if f"{p}.{key}" in ledger.leaves:
            unread(ledger, f"{p}.{key}", ledger.leaves[f"{p}.{key}"], word)
    if ledger.leaves.get(f"{p}.warmup_min_lr") == "auto":
        ledger.skip(f"{p}.warmup_min_lr", "it becomes 0, as here")
    if ledger.leaves.get(f"{p}.total_num_steps") == "auto" and name == "WarmupDecayLR" and not ledger.auto:
        ledger.carry("scheduler.type", {"schedule": "linear", "schedule.floor": 0.0}, _curve(ledger))
        ledger.settle(unneeded("see scheduler.type"), f"{p}.warmup_type")
        ledger.ask("schedule.warmup")
        return
    values = {
        key.removeprefix(f"{p}."): ledger.leaves[key] for key in ledger.under(p) if ledger.leaves[key] is not None
    }
    why = ""
    for key in ("total_num_steps", "warmup_num_steps"):
        if isinstance(values.get(key), bool) or not isinstance(values.get(key, 0), int):
            why = f"{values[key]!r} is not a number of steps. Type schedule=cosine schedule.warmup=<steps>."
    if name not in SHAPES:
        why = unknown_schedule(name)
    if why:
        ledger.settle(refused(why), "scheduler.type", f"{p}.**")
        ledger.ask("schedule")
        if warm := values.get("warmup_num_steps"):
            ledger.ask("schedule.warmup", f"{warm} with {name}")
    else:
        warmup_of(ledger, name, values)


def _curve(ledger: Ledger) -> str:
    return "" if ledger.get("scheduler.params.warmup_type") == "linear" else CURVED


def warmup_of(ledger: Ledger, name: str, values: dict[str, Any]) -> None:
    """Translate the keys of a schedule that has a counterpart; `values` are those in the file."""
    p, shape = "scheduler.params", SHAPES[name]
    warm, total = values.get("warmup_num_steps", 1000), values.get("total_num_steps")
    words = decaying(shape, warm, values.get("cos_min_ratio", 1e-4) if shape == "cosine" else 0.0)
    note = ""
    warmup, kind = says({"schedule.warmup": warm}, BEHIND if warm else ""), unneeded("linear, as here")
    filled = {key for key in OF_STEPS if ledger.auto and ledger.leaves.get(f"{p}.{key}") == "auto"}
    if "warmup_num_steps" in filled:  # by the other software, whose words are there
        del words["schedule.warmup"]
        note = _curve(ledger)
    elif values.get("warmup_type", "log") != "linear" and warm > 1:
        if not {"warmup_type", "warmup_num_steps"} & set(values) and not ledger.asks("schedule.warmup"):
            note = f"without its warm-up: {LOG.format(warm)}"
        elif ledger.leaves.get(f"{p}.warmup_num_steps") == "auto":
            note = CURVED
        warmup = kind = refused(LOG.format(warm))
        ledger.ask("schedule.warmup", f"{warm} for a linear warm-up of that length, or 0")
    ledger.carry("scheduler.type", {"schedule": words["schedule"]}, note)
    if name == "WarmupDecayLR" and "warmup_max_lr" not in values:
        ledger.imply({"optim.lr": 1e-3}, "default of WarmupDecayLR, which overrides the optimizer's")
    rules = {"warmup_num_steps": warmup, "warmup_type": kind, "total_num_steps": says({"steps": total})}
    if shape != "constant" and total is None and "total_num_steps" not in filled and not ledger.asks("steps"):
        ledger.ask("steps", f"total_num_steps of {name}")
    if shape == "cosine":
        rules["cos_min_ratio"] = to("schedule.floor")
    else:
        rules["warmup_max_lr"] = to("optim.lr")
    for part in values:
        if part in rules:
            ledger.settle(rules[part], f"{p}.{part}")
    ledger.imply({word: value for word, value in words.items() if word != "schedule"}, f"default of {name}")
