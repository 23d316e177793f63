"""Translation of DeepSpeed's optimizer and scheduler sections."""

from typing import Any

from dtrain.dialect.ledger import Ledger
from dtrain.dialect.rules import chosen, refused, says, to, unneeded, unread
from dtrain.dialect.terms import BEHIND, decaying, optimizer

LOG = (
    "DeepSpeed's warm-up is logarithmic, dtrain's is linear. Type schedule.warmup={} for a linear one of the same "
    "length, or 0 for none."
)


SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def optimizer_section(ledger: Ledger) -> None:
    """Translate the optimizer. DeepSpeed's Adam is AdamW unless adam_w_mode is false; its kernels default to no
    decay.
    """
    name, params = str(ledger.get("optimizer.type", "")), "optimizer.params"
    if not name or unread(ledger, "optimizer.type", name, "optim"):
        return
    adam = name.lower() in ("adam", "adamw")
    decoupled = name.lower() == "adamw" or ledger.get(f"{params}.adam_w_mode", True) is True
    for key in ledger.under(*(f"{params}.{own}" for own in ("torch_adam", "adam_w_mode", "fp32_optimizer_states"))):
        ledger.skip(key, "selects a kernel only; optimizer.type selects the algorithm")
    for key in ledger.under(f"{params}.bias_correction"):
        chosen(
            {True: unneeded("Adam's bias is corrected, as here")},
            refused("Adam's bias is corrected here. Leave it out."),
        )(ledger, key, ledger.leaves[key])
    for key in ledger.under(f"{params}.lr"):
        if "optim.lr" in ledger.words:
            ledger.skip(key, "the scheduler's warmup_max_lr overrides it, as in DeepSpeed")
    own = adam and ledger.get(f"{params}.torch_adam", False) is not True
    if adam:
        name = "AdamW" if decoupled else "Adam"
    optimizer(ledger, "optimizer.type", params, name, {"weight_decay": 0.0} if own else None)


def schedule_section(ledger: Ledger) -> None:
    """Translate the schedule; total_num_steps is the length of the run."""
    p, name = "scheduler.params", str(ledger.get("scheduler.type", ""))
    if not name:
        if ledger.get("optimizer.type"):  # otherwise the script creates both
            ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no scheduler in this file")
        return
    for key, word in (
        ("total_num_steps", "steps"),
        ("warmup_num_steps", "schedule.warmup"),
        ("warmup_max_lr", "optim.lr"),
    ):
        if f"{p}.{key}" in ledger.leaves:
            unread(ledger, f"{p}.{key}", ledger.leaves[f"{p}.{key}"], word)
    if ledger.leaves.get(f"{p}.warmup_min_lr") == "auto":
        ledger.skip(f"{p}.warmup_min_lr", "it becomes 0, as here")
    if ledger.leaves.get(f"{p}.total_num_steps") == "auto" and name == "WarmupDecayLR" and not ledger.auto:
        ledger.carry(
            "scheduler.type",
            {"schedule": "wsd", "schedule.floor": 0.0},
            "linear decay from the end of the warm-up to the end of the run",
        )
        ledger.ask("schedule.decay", "steps - schedule.warmup")
        ledger.ask("schedule.warmup")
        return
    values = {
        key.removeprefix(f"{p}."): ledger.leaves[key] for key in ledger.under(p) if ledger.leaves[key] is not None
    }
    steps = [values.get(key, 0) for key in ("warmup_num_steps", "total_num_steps")]
    wrong = next((value for value in steps if isinstance(value, bool) or not isinstance(value, int)), None)
    shape = SHAPES.get(name)
    why = (
        "a linear decay needs the number of steps. Type steps=<total> schedule=wsd schedule.warmup=<some> "
        "schedule.decay=<the rest>."
    )
    if shape is None:
        why = f"unknown schedule {name}. Type schedule=cosine, constant or wsd."
    elif wrong is not None:
        why = f"{wrong!r} is not a number of steps. Type schedule=cosine schedule.warmup=<steps>."
    if shape is None or wrong is not None or (shape == "linear" and "total_num_steps" not in values):
        for key in ledger.under("scheduler.type", p):
            ledger.refuse(key, why)
        ledger.ask("schedule")
    else:
        warmup_of(ledger, name, shape, values)


def warmup_of(ledger: Ledger, name: str, shape: str, values: dict[str, Any]) -> None:
    """Translate the keys of a schedule that has a counterpart; `values` are those in the file."""
    p = "scheduler.params"
    log, warm, total = (
        values.get("warmup_type", "log") != "linear",
        values.get("warmup_num_steps", 1000),
        values.get("total_num_steps"),
    )
    words = decaying(shape, warm, total, values.get("cos_min_ratio", 1e-4) if shape == "cosine" else 0.0)
    silent = (
        log
        and warm > 1
        and not {"warmup_type", "warmup_num_steps"} & set(values)
        and not ledger.asks("schedule.warmup")
    )
    if log and warm > 1:
        ledger.ask("schedule.warmup", f"{warm} for a linear warm-up of that length, or 0")
    ledger.carry(
        "scheduler.type", {"schedule": words["schedule"]}, f"without its warm-up: {LOG.format(warm)}" if silent else ""
    )
    lr = values.get("warmup_max_lr", 1e-3 if name == "WarmupDecayLR" else None)
    if lr is not None and "warmup_max_lr" not in values:
        ledger.imply({"optim.lr": lr}, "default of WarmupDecayLR, which overrides the optimizer's")
    for part, value in values.items():
        if part == "warmup_num_steps":
            linear = says({"schedule.warmup": warm}, BEHIND if warm else "")
            (refused(LOG.format(warm)) if log and warm > 1 else linear)(ledger, f"{p}.{part}", value)
        elif part == "warmup_type":
            (refused(LOG.format(warm)) if log and warm > 1 else unneeded("linear, as here"))(
                ledger, f"{p}.{part}", value
            )
        elif part == "total_num_steps":
            ledger.carry(
                f"{p}.{part}", {"steps": total} | {word: words[word] for word in ("schedule.decay",) if word in words}
            )
        elif part == "cos_min_ratio" and shape == "cosine":
            to("schedule.floor")(ledger, f"{p}.{part}", value)
        elif part == "warmup_max_lr" and shape != "cosine":
            to("optim.lr")(ledger, f"{p}.{part}", value)
    ledger.imply(
        {word: value for word, value in words.items() if word != "schedule"},
        f"default of {name}",
    )
