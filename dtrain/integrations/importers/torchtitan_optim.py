"""Translation of torchtitan's optimizer and lr_scheduler sections."""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers.ledger import Ledger
from dtrain.integrations.importers.rules import refused, says, unneeded
from dtrain.integrations.importers.terms import SPEED, decaying, optimizer

SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved_1f1b", "loopedbfs": "looped_bfs",
    "interleavedzerobubble": "interleaved_zero_bubble",
    "zbvzerobubble": "zbv", "dualpipev": "dualpipev",
}  # fmt: skip


DECAY = (
    "dtrain decays linearly, from the end of the warm-up or over the last steps, or by a cosine from the end of the "
    "warm-up. Type schedule=linear, schedule=wsd schedule.decay=<steps>, or schedule=cosine."
)


def optimizer_section(ledger: Ledger) -> None:
    """Translate a single optimizer, also given as one parameter group for all weights; refuse several groups."""
    if "optimizer.name" in ledger.leaves:
        betas = [ledger.get("optimizer.beta1", 0.9), ledger.get("optimizer.beta2", 0.95)]
        name = str(ledger.leaves["optimizer.name"])
        ledger.settle(SPEED, "optimizer.implementation")
        if name == "AdamW":
            ledger.settle(says({"optim.betas": betas}), "optimizer.beta1", "optimizer.beta2")
        optimizer(ledger, "optimizer.name", "optimizer", name, {"lr": 8e-4, "betas": betas, "weight_decay": 0.1})
    group = "optimizer.param_groups.0"
    if ledger.leaves.get(f"{group}.pattern") == ".*" and f"{group}.optimizer_name" in ledger.leaves:
        ledger.skip(f"{group}.pattern", "all weights")
        name = str(ledger.get(f"{group}.optimizer_name", "AdamW"))
        optimizer(ledger, f"{group}.optimizer_name", f"{group}.optimizer_kwargs", name)
    asked = () if "optim" in ledger.words else ("optim", "optim.lr")
    by_name = "for optimizers by parameter name, type optim=muon or write your own: optim._target_=<yours> "
    ledger.settle(refused(f"{by_name}trust=[<its package>].", *asked), "optimizer.param_groups.**")


OF_SCHEDULE = {
    "warmup_steps": "schedule.warmup",
    "decay_ratio": "schedule.decay",
    "decay_type": "schedule",
    "min_lr_factor": "schedule.floor",
}
"""Key of lr_scheduler -> dtrain's word."""


def schedule_section(ledger: Ledger) -> None:
    """Translate the schedule: decay over the last decay_ratio of the run, or from the end of the warm-up."""
    p = "lr_scheduler"
    values = {name: ledger.get(f"{p}.{name}", default) for name, default in SCHEDULER.items()}
    steps, ratio, shape = ledger.get("training.steps", 10000), values["decay_ratio"], values["decay_type"]
    total = steps if values["total_steps"] is None else values["total_steps"]
    numbers = (steps, total, values["warmup_steps"], values["min_lr_factor"], 0 if ratio is None else ratio)
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return  # the table refuses invalid values
    if total != steps and "training.steps" in ledger.leaves:
        ledger.carry("training.steps", {"steps": total, "stop_after": steps}, "the schedule is longer than the run")
    warmup = min(values["warmup_steps"], total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    words = decaying(shape, warmup, values["min_lr_factor"])
    if shape == "linear" and decay != total - warmup:
        words |= {"schedule": "wsd", "schedule.decay": decay}
    elif shape not in ("linear", "cosine") or decay != total - warmup:
        ledger.settle(refused(DECAY, "schedule"), f"{p}.**")
        return
    for name, word in OF_SCHEDULE.items():
        rule = unneeded("from the end of the warm-up to the end of the run")
        if word in words and ledger.get(f"{p}.{name}") is not None:
            rule = says({word: words[word]}, f"of {total} steps" if name == "decay_ratio" else "")
        ledger.settle(rule, f"{p}.{name}")
    ledger.settle(unneeded("covered by training.steps"), f"{p}.total_steps")
    ledger.imply(words, "default of torchtitan")


SCHEDULER: Mapping[str, Any] = {
    "warmup_steps": 200,
    "total_steps": None,
    "decay_ratio": None,
    "decay_type": "linear",
    "min_lr_factor": 0.0,
}
