"""Lightning's Trainer: its arguments in a Python file, or the YAML of LightningCLI:
https://lightning.ai/docs/pytorch/stable/common/trainer.html

    dtrain import train.py to=mine.yaml

Of a Python file only what stands in the call of Trainer is read, and names that are given a plain value once.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from dtrain.dialect.callbacks import callbacks, class_of
from dtrain.dialect.ledger import Ledger, Rule, count, names, number, whole
from dtrain.dialect.lightning_strategy import NO_STRATEGY, OFF, devices, part, strategy
from dtrain.dialect.rules import chosen, every, lacking, refused, says, switched, to, unneeded
from dtrain.dialect.terms import decaying, epochs, optimizer, output, precision_rule, unknown_optimizer

TITLE = "Lightning"
MARKS = names(
    "trainer fit seed_everything max_epochs accelerator accumulate_grad_batches gradient_clip_val val_check_interval "
    "enable_checkpointing "
    "num_sanity_val_steps limit_val_batches class_path ckpt_path fast_dev_run enable_progress_bar"
)
SILENT = ("model", "data", "optim", "schedule", "steps", "batch")
YOURS = (
    "a LightningModule holds its own loop. Type model._target_=<the torch.nn.Module in it> trust=[<its "
    "package>], with objective and optim."
)
DATA = (
    "a DataModule holds its own loaders. Type data=dataset data.dataset._target_=<the dataset in it> trust=[<its "
    "package>] batch=<samples per step>."
)
CLOCK = re.compile(r"(\d+):(\d\d:\d\d:\d\d)")
"""DD:HH:MM:SS."""
PARTS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def translate(ledger: Ledger) -> None:
    section = next(
        (prefix for prefix in ("fit.trainer.", "trainer.") if any(key.startswith(prefix) for key in ledger.leaves)), ""
    )
    outer = "fit." if section == "fit.trainer." else ""
    for tell in (devices, strategy, _steps, _clip, _evaluation, _logger, callbacks):
        tell(ledger, section)
    _optimizer(ledger, outer)
    unseen = ledger.under(*(key for key in ledger.leaves if key.startswith(f"{section}**")))
    for key in unseen:
        ledger.refuse(key, "arguments that are not in this file. Type the words for what they say.")
    ledger.apply(
        {f"{section}{name}": rule for name, rule in TRAINER.items()}
        | {f"{outer}{name}": rule for name, rule in COMMANDS.items()}
    )
    if unseen:
        for word in ("precision", "clip", "steps"):
            if word not in ledger.words:
                ledger.ask(word)
    ledger.imply({"clip": None}, "Lightning does not clip unless told to")


def _steps(ledger: Ledger, t: str) -> None:
    """max_steps ends a run; epochs alone need the number of samples; the clock may end it sooner."""
    steps, key = ledger.leaves.get(f"{t}max_steps"), f"{t}max_time"
    if isinstance(steps, int) and steps > 0:
        for other in ledger.under(f"{t}max_epochs"):
            if ledger.leaves[other] in (-1, None):
                ledger.skip(other, "no limit")
            else:
                ledger.refuse(
                    other,
                    f"whichever comes first ends a run there, max_steps={steps} here. Type a smaller "
                    f"steps=<{ledger.leaves[other]} x samples / batch> if epochs are meant.",
                )
    _batches(ledger, t)
    found = CLOCK.fullmatch(str(ledger.get(key, "")))
    if found:
        ledger.carry(
            key, {"time_limit": f"{int(found[1])}-{found[2]}"}, "of the whole command, the last save within it"
        )
    parts = ledger.under(key)
    amounts = {part.rpartition(".")[2]: ledger.leaves[part] for part in parts if part.rpartition(".")[2] in PARTS}
    if amounts and all(isinstance(amount, int | float) for amount in amounts.values()):
        seconds = sum(PARTS[name] * amount for name, amount in amounts.items())
        for part in parts:
            if part.rpartition(".")[2] in PARTS:
                ledger.carry(part, {"time_limit": seconds}, "of the whole command, the last save within it")
            elif part.endswith("class_path"):
                ledger.skip(part, "told with its arguments")


BATCHES: Mapping[str, Any] = {"limit_train_batches": None, "max_epochs": None, "accumulate_grad_batches": 1}


def _batches(ledger: Ledger, t: str) -> None:
    """A number of batches of each epoch makes the steps; 1 is one batch, and 1.0 all of them."""
    key, most = f"{t}limit_train_batches", ledger.leaves.get(f"{t}max_steps", -1)
    batches, passes, parts = (ledger.get(f"{t}{name}", default) for name, default in BATCHES.items())
    if most not in (-1, None) or not all(
        isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in (batches, passes, parts)
    ):
        return
    steps = passes * math.ceil(batches / parts)
    ledger.carry(
        key,
        {"steps": steps},
        f"{passes} x {batches} batches{f', {parts} in a step' if parts > 1 else ''}; fewer there when the data has "
        "not as many",
    )
    ledger.skip(f"{t}max_epochs", "told with limit_train_batches")


def _clip(ledger: Ledger, t: str) -> None:
    """By the norm; by each value it is another training, with another number."""
    key = f"{t}gradient_clip_val"
    if ledger.get(f"{t}gradient_clip_algorithm", "norm") != "norm" and ledger.get(key):
        ledger.refuse(key, "gradients are clipped by their norm. Type clip=<the largest norm>.")
        ledger.ask("clip")


def _evaluation(ledger: Ledger, t: str) -> None:
    """val_check_interval counts batches of the loader, which are microbatches here."""
    key, parts = f"{t}val_check_interval", ledger.get(f"{t}accumulate_grad_batches", 1)
    value = ledger.leaves.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and isinstance(parts, int) and parts > 0:
        if value % parts:
            ledger.refuse(
                key, f"{value} batches are no whole number of steps of {parts} each. Type evaluate.every=<steps>."
            )
        else:
            ledger.carry(
                key, {"evaluate.every": value // parts}, f"{value} batches, {parts} in a step" if parts > 1 else ""
            )
    elif isinstance(value, float) and value:
        epochs("evaluate.every")(ledger, key, value)


def _logger(ledger: Ledger, t: str) -> None:
    """true, false, an object, or a list of objects."""
    key = f"{t}logger"
    names = {"TensorBoardLogger": "tensorboard", "CSVLogger": ""}
    for section in [key, *(f"{key}.{index}" for index in range(20))]:
        name = class_of(ledger, section)
        for other in ledger.under(f"{section}.class_path", f"{section}.init_args"):
            if name not in names:
                ledger.refuse(
                    other,
                    f"there is no {name}. The rows are in metrics.jsonl; or write a logger: "
                    "logger.mine._target_=<yours> trust=[<its package>].",
                )
            elif other.endswith("class_path") and names[name]:
                ledger.carry(other, {"logger": ["console", "tensorboard"]})
            else:
                ledger.skip(other, "metrics.jsonl is always written; all is under <out>")


def _optimizer(ledger: Ledger, outer: str) -> None:
    """LightningCLI may name an optimizer and a schedule beside the trainer."""
    section = f"{outer}optimizer"
    name = str(ledger.get(f"{section}.class_path", ""))
    if name.startswith("torch.optim."):
        optimizer(ledger, f"{section}.class_path", f"{section}.init_args", name.rpartition(".")[2])
    elif name:
        unknown_optimizer(ledger, name, ledger.get(f"{section}.init_args.lr"))
    section = f"{outer}lr_scheduler"
    kind = class_of(ledger, section)
    most, steps = (
        ledger.get(f"{section}.init_args.T_max"),
        ledger.words.get("steps", ledger.leaves.get(f"{outer}trainer.max_steps")),
    )
    if (
        kind == "CosineAnnealingLR"
        and most is not None
        and most == steps
        and not ledger.get(f"{section}.init_args.eta_min")
    ):
        ledger.carry(f"{section}.class_path", decaying("cosine", 0, None))
        for key in ledger.under(f"{section}.init_args"):
            ledger.skip(key, "the cosine ends with the run, as T_max says")
    elif kind:
        ledger.ask("schedule")
    elif name:
        ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no lr_scheduler in this file")


FP8 = "there are fp32, bf16, bf16_true, fp16, and fp8 by torchao. Type precision=bf16."
MIXED = {
    "32-true": "fp32",
    "32": "fp32",
    32: "fp32",
    "16-mixed": "fp16",
    "16": "fp16",
    16: "fp16",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "bf16-true": "bf16_true",
}

TRAINER: dict[str, Rule] = {
    "accelerator": chosen(
        {
            "auto": unneeded("GPUs where there are any, as here"),
            "gpu": unneeded("GPUs where there are any, as here"),
            "cuda": unneeded("GPUs where there are any, as here"),
            "cpu": says({"backend": "gloo"}),
        },
        refused("there are GPUs with nccl, and CPUs with gloo. Leave it out."),
    ),
    "devices": to("devices", count),
    "gpus": chosen(
        {0: unneeded("none are asked for"), -1: unneeded("all that are there: devices=auto")}, to("devices", count)
    ),
    "num_nodes": to("nodes", count),
    "precision": precision_rule(MIXED, FP8),
    "max_steps": chosen({-1: unneeded("no limit")}, to("steps", count)),
    "max_epochs": chosen({-1: unneeded("no limit")}, epochs()),
    "min_epochs": lacking("a run ends at its steps. Leave it out."),
    "min_steps": lacking("a run ends at its steps. Leave it out."),
    "max_time": refused("hours:minutes:seconds. Type time_limit=3:55:00."),
    "max_time.**": refused("hours:minutes:seconds. Type time_limit=3:55:00."),
    "accumulate_grad_batches": to("accumulate", count),
    "accumulate_grad_batches.*": refused(
        "the batch is the same in every step. Type accumulate=<number>.", "accumulate"
    ),
    "gradient_clip_val": chosen({0: says({"clip": None}, "0 means none")}, to("clip", number)),
    "gradient_clip_algorithm": chosen(
        {"norm": unneeded("by the norm, as here")}, refused("gradients are clipped by their norm. Type clip=1.0.")
    ),
    "log_every_n_steps": to("log.every", count),
    "val_check_interval": refused("held-out losses are counted in steps. Type evaluate.every=<steps>."),
    "check_val_every_n_epoch": chosen(
        {1: unneeded("evaluate.every counts steps"), None: unneeded("empty")}, epochs("evaluate.every")
    ),
    "num_sanity_val_steps": unneeded("dtrain verify runs a few steps before"),
    "limit_val_batches": part(
        unneeded("all of them: evaluate.samples=null, else 256"),
        refused("held-out samples are counted. Type evaluate.samples=<batches x their size>."),
    ),
    "limit_train_batches": part(OFF, refused("a run ends at its steps. Type steps=<epochs x batches>.", "steps")),
    **every("limit_test_batches limit_predict_batches", unneeded("of other commands of Lightning")),
    "fast_dev_run": lacking("type steps=2, or dtrain verify with the same words."),
    "overfit_batches": lacking("type data.holdout=0 with a dataset of a few samples."),
    "enable_checkpointing": switched(
        unneeded("a run is always saved"),
        refused("the last step is always saved. Type checkpoint.every=0 for that one alone."),
    ),
    "enable_progress_bar": switched(
        unneeded("logger=console draws a bar on a terminal"), refused("type logger=[tensorboard].")
    ),
    "enable_model_summary": unneeded("dtrain plan tells what is built"),
    "logger": switched(unneeded("metrics.jsonl and TensorBoard, as here"), says({"logger": ["console"]})),
    "callbacks": lambda ledger, key, value: (
        unneeded("empty")
        if value in ([], {})
        else refused("write a hook: hook.mine._target_=<yours> trust=[<its package>].")
    )(ledger, key, value),
    **every(
        "callbacks.** logger.** plugins.**",
        refused(
            "computed in Python, which is not run. Write a hook: hook.mine._target_=<yours> trust=[<its package>]."
        ),
    ),
    "default_root_dir": output,
    "default_root_dir.**": refused("computed in Python, which is not run. Type out=<URL>."),
    "deterministic": lacking("on GPUs type backend=nccl backend.kernels=deterministic; the CPU's kernels are."),
    "benchmark": lacking("kernels are torch's own. Leave it out."),
    "detect_anomaly": lacking("a loss that is no number stops the run at its step: on_spike=stop."),
    "sync_batchnorm": lacking("use GroupNorm or LayerNorm, whose numbers do not depend on how the batch is split."),
    "reload_dataloaders_every_n_epochs": lacking("data is addressed by index, and never loaded again. Leave it out."),
    "use_distributed_sampler": unneeded("samples are shared out by their position"),
    "inference_mode": unneeded("nothing is kept for a backward in evaluation"),
    "resume_from_checkpoint": lacking("a run goes on from its own checkpoint; init=<run of dtrain> takes weights."),
    **every(
        "auto_lr_find auto_scale_batch_size",
        lacking("nothing is searched for. Type optim.lr=<value> batch=<samples of a step>."),
    ),
    **every(
        "replace_sampler_ddp move_metrics_to_cpu progress_bar_refresh_rate weights_summary terminate_on_nan "
        "track_grad_norm",
        unneeded(
            "of older versions: metrics.jsonl has the norm of the gradients, samples are shared out by their position"
        ),
    ),
    "profiler": lacking("nothing is profiled while training goes on. Leave it out."),
    "profiler.**": refused("nothing is profiled while training goes on. Leave it out."),
    "plugins": lacking("launchers and precisions are words: launcher=external, precision=bf16."),
    **every("barebones enable_autolog_hparams model_registry", unneeded("of Lightning's own loop")),
    **every("strategy strategy.**", NO_STRATEGY),
    "args.*": refused("given by position. Write its name before it."),
}
COMMANDS: dict[str, Rule] = {
    "seed_everything": lambda ledger, key, value: (
        unneeded("runs are seeded: seed=0") if isinstance(value, bool) else to("seed", whole)
    )(ledger, key, value),
    **every("model model.**", refused(YOURS, "model")),
    **every("data data.**", refused(DATA)),
    **every(
        "optimizer.** lr_scheduler.**",
        refused(
            "type optim=adamw, sgd, muon or adafactor, and schedule=cosine, constant or wsd, with their arguments."
        ),
    ),
    "ckpt_path": lacking("a run goes on from its own checkpoint; init=<run of dtrain> takes weights."),
    **every("verbose return_predictions weights_only", unneeded("of other commands of Lightning")),
}
