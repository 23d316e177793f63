"""Translation of torchtitan's optimizer and lr_scheduler sections."""

from collections.abc import Mapping
from typing import Any

from dtrain.dialect.ledger import Ledger
from dtrain.dialect.terms import optimizer

SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved_1f1b", "loopedbfs": "looped_bfs",
    "interleavedzerobubble": "interleaved_zero_bubble",
    "zbvzerobubble": "zbv", "dualpipev": "dualpipev",
}  # fmt: skip


DECAY = (
    "dtrain decays linearly over the last steps, or by a cosine from the end of the warm-up. Type "
    "schedule=wsd schedule.decay=<steps>, or schedule=cosine."
)


def optimizer_section(ledger: Ledger) -> None:
    """Translate a single optimizer, also given as one parameter group for all weights; refuse several groups."""
    if "optimizer.name" in ledger.leaves:
        betas = [ledger.get("optimizer.beta1", 0.9), ledger.get("optimizer.beta2", 0.95)]
        name = str(ledger.leaves["optimizer.name"])
        for key in ledger.under("optimizer.implementation"):
            ledger.skip(key, "affects speed only; dtrain uses a fused kernel where available")
        for key in ledger.under("optimizer.beta1", "optimizer.beta2"):
            if name == "AdamW":
                ledger.carry(key, {"optim.betas": betas})
        optimizer(ledger, "optimizer.name", "optimizer", name, {"lr": 8e-4, "betas": betas, "weight_decay": 0.1})
    groups = "optimizer.param_groups"
    if ledger.leaves.get(f"{groups}.0.pattern") == ".*" and f"{groups}.0.optimizer_name" in ledger.leaves:
        ledger.skip(f"{groups}.0.pattern", "all weights")
        optimizer(
            ledger,
            f"{groups}.0.optimizer_name",
            f"{groups}.0.optimizer_kwargs",
            str(ledger.get(f"{groups}.0.optimizer_name", "AdamW")),
        )
    for key in ledger.under(groups):
        ledger.refuse(
            key,
            "for optimizers by parameter name, type optim=muon or write your own: optim._target_=<yours> trust=[<its "
            "package>].",
        )
        if "optim" not in ledger.words:
            ledger.ask("optim")
            ledger.ask("optim.lr")


def schedule_section(ledger: Ledger) -> None:
    """Translate the schedule: decay over the last decay_ratio of the run, or from the end of the warm-up."""
    p = "lr_scheduler"
    values = {name: ledger.get(f"{p}.{name}", default) for name, default in SCHEDULER.items()}
    steps, ratio = ledger.get("training.steps", 10000), values["decay_ratio"]
    total = steps if values["total_steps"] is None else values["total_steps"]
    numbers = (steps, total, values["warmup_steps"], values["min_lr_factor"], 0 if ratio is None else ratio)
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return  # the table refuses invalid values
    if total != steps and "training.steps" in ledger.leaves:
        ledger.carry("training.steps", {"steps": total, "stop_after": steps}, "the schedule is longer than the run")
    warmup = min(values["warmup_steps"], total)
    decay = total - warmup if ratio is None else min(round(total * ratio), total - warmup)
    words = {
        "schedule": "wsd",
        "schedule.warmup": warmup,
        "schedule.decay": decay,
        "schedule.floor": values["min_lr_factor"],
    }
    if values["decay_type"] == "cosine" and decay == total - warmup:
        del words["schedule.decay"]
        words["schedule"] = "cosine"
    elif values["decay_type"] != "linear":
        for key in ledger.under(p):
            ledger.refuse(key, DECAY)
        ledger.ask("schedule")
        return
    for name, word in (
        ("warmup_steps", "schedule.warmup"),
        ("decay_ratio", "schedule.decay"),
        ("decay_type", "schedule"),
        ("min_lr_factor", "schedule.floor"),
    ):
        for key in ledger.under(f"{p}.{name}"):
            if ledger.leaves[key] is None or word not in words:
                ledger.skip(key, "from the end of the warm-up to the end of the run")
            else:
                ledger.carry(key, {word: words[word]}, f"of {total} steps" if name == "decay_ratio" else "")
    for key in ledger.under(f"{p}.total_steps"):
        ledger.skip(key, "covered by training.steps")
    ledger.imply(words, "default of torchtitan")


SCHEDULER: Mapping[str, Any] = {
    "warmup_steps": 200,
    "total_steps": None,
    "decay_ratio": None,
    "decay_type": "linear",
    "min_lr_factor": 0.0,
}
