"""Lightning's Trainer: its arguments in a Python file, or the YAML of LightningCLI:
https://lightning.ai/docs/pytorch/stable/common/trainer.html

    dtrain import train.py to=mine.yaml

From a Python file only the arguments of Trainer's call are read, and names assigned a literal exactly once.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from dtrain.config.period import EPOCH
from dtrain.integrations.importers import terms, trackers
from dtrain.integrations.importers.callbacks import callbacks, class_of, sections
from dtrain.integrations.importers.configured import configured
from dtrain.integrations.importers.ledger import Ledger, count, names, show, whole
from dtrain.integrations.importers.lightning_strategy import NO_STRATEGY, devices, part, strategy
from dtrain.integrations.importers.made import Made, named
from dtrain.integrations.importers.rules import OFF, chosen, lacking, refused, says, switched, table, to, unneeded, when
from dtrain.integrations.importers.terms import OPTIONS, decaying, epochs, optimizer, passes, unknown_optimizer

TITLE = "Lightning"
MARKS = names(
    "trainer fit seed_everything max_epochs accelerator accumulate_grad_batches gradient_clip_val val_check_interval "
    "enable_checkpointing "
    "num_sanity_val_steps limit_val_batches class_path ckpt_path fast_dev_run enable_progress_bar"
)
SILENT = ("model", "data", "optim", "schedule", "steps", "batch")
YOURS = (
    "a LightningModule contains its own loop. Type model._target_=<the torch.nn.Module in it> trust=[<its "
    "package>], with objective and optim."
)
IN_IT = "Type data=dataset data.dataset._target_=<the dataset in it> trust=[<its package>] batch=<samples per step>."
DATA = f"a DataModule contains its own loaders. {IN_IT}"
CLOCK = re.compile(r"(\d+):(\d\d:\d\d:\d\d)")
"""DD:HH:MM:SS."""
DEFAULT = "default of Lightning"
EVERY = epochs("evaluate.every")
PARTS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def translate(ledger: Ledger) -> None:
    section = ""
    for prefix in ("trainer.", "fit.trainer."):
        if any(key.startswith(prefix) for key in ledger.leaves):
            section = prefix
    outer = "fit." if section == "fit.trainer." else ""
    for tell in (devices, strategy, _steps, _clip, _evaluation, _logger, callbacks):
        tell(ledger, section)
    if section:
        callbacks(ledger, "")
    _optimizer(ledger, outer)
    configured(ledger, tuple(ledger.get(f"{section}{name}") for name in ("max_epochs", "max_steps")))
    _fitted(ledger, outer)
    unseen = [key for key in ledger.open() if key.startswith(f"{section}**")]
    ledger.settle(refused("these arguments are not in this file. Type the equivalent words."), *unseen)
    prefixed = {f"{section}{name}": rule for name, rule in TRAINER.items()}
    ledger.apply(prefixed | {f"{outer}{name}": rule for name, rule in COMMANDS.items()})
    if unseen:
        for word in ("precision", "clip", *(["steps"] if "epochs" not in ledger.words else [])):
            if word not in ledger.words:
                ledger.ask(word)
    ledger.imply({"clip": None}, DEFAULT)
    _parts(ledger, outer)
    if "epochs" in ledger.words:
        ledger.imply({"evaluate.every": EPOCH, "checkpoint.every": EPOCH}, DEFAULT)


def _steps(ledger: Ledger, t: str) -> None:
    """Translate the length of the run: max_steps, epochs, or max_time."""
    steps, passes = ledger.leaves.get(f"{t}max_steps"), ledger.leaves.get(f"{t}max_epochs")
    if isinstance(steps, int) and steps > 0 and passes not in (-1, None):
        both = refused(
            f"Lightning stops at whichever comes first; this recipe stops at max_steps={steps}. Type "
            f"epochs={show(passes)} if the epochs end first."
        )
        ledger.settle(both, f"{t}max_epochs")
    _batches(ledger, t)
    key, note = f"{t}max_time", "covers the whole command, including the last save"
    clock = CLOCK.fullmatch(str(ledger.get(key, "")))
    if clock:
        ledger.carry(key, {"time_limit": f"{int(clock[1])}-{clock[2]}"}, note)
    amounts = {part: ledger.leaves[part] for part in ledger.under(key) if part.rpartition(".")[2] in PARTS}
    if amounts and all(isinstance(amount, int | float) for amount in amounts.values()):
        seconds = sum(PARTS[part.rpartition(".")[2]] * amount for part, amount in amounts.items())
        ledger.settle(says({"time_limit": seconds}, note), *amounts)
        ledger.settle(unneeded("covered by its arguments"), f"{key}.class_path")


BATCHES: Mapping[str, Any] = {"limit_train_batches": None, "max_epochs": None, "accumulate_grad_batches": 1}


def _batches(ledger: Ledger, t: str) -> None:
    """Compute the steps from a number of batches per epoch. An integer 1 is one batch, 1.0 all of them."""
    values = [ledger.get(f"{t}{name}", default) for name, default in BATCHES.items()]
    if ledger.leaves.get(f"{t}max_steps") not in (-1, None) or not all(map(_is_count, values)):
        return
    batches, passes, parts = values
    together = f", {parts} per step" if parts > 1 else ""
    ledger.carry(
        f"{t}limit_train_batches",
        {"steps": passes * math.ceil(batches / parts)},
        f"{passes} x {batches} batches{together}; fewer in Lightning if the data is shorter",
    )
    ledger.skip(f"{t}max_epochs", "covered by limit_train_batches")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _clip(ledger: Ledger, t: str) -> None:
    """Refuse clipping by value: dtrain clips by the norm."""
    key = f"{t}gradient_clip_val"
    if ledger.get(f"{t}gradient_clip_algorithm", "norm") != "norm" and ledger.get(key):
        ledger.refuse(key, "dtrain clips gradients by their norm. Type clip=<largest norm>.")
        ledger.ask("clip")


def _evaluation(ledger: Ledger, t: str) -> None:
    """Convert val_check_interval from loader batches, which are microbatches here, to steps."""
    key, parts = f"{t}val_check_interval", ledger.get(f"{t}accumulate_grad_batches", 1)
    value = ledger.leaves.get(key)
    if value not in (None, 1.0) or isinstance(value, int):
        ledger.settle(chosen({1: unneeded("val_check_interval says when")}, EVERY), f"{t}check_val_every_n_epoch")
    if isinstance(value, float) and value:
        ledger.settle(EVERY, key)
    elif not isinstance(value, int) or isinstance(value, bool) or not _is_count(parts):
        return
    elif value % parts:
        why = f"{value} batches are not a multiple of {parts}, the batches per step. Type evaluate.every=<steps>."
        ledger.refuse(key, why)
    else:
        note = f"{value} batches, {parts} per step" if parts > 1 else ""
        ledger.carry(key, {"evaluate.every": value // parts}, note)


def _logger(ledger: Ledger, t: str) -> None:
    """Translate loggers given as objects or a list of objects; the table handles true and false."""
    for section in sections(ledger, f"{t}logger"):
        name = class_of(ledger, section)
        word = trackers.named(name)
        if word:
            trackers.add(ledger, f"{section}.class_path", word)
            trackers.arguments(ledger, word, f"{section}.init_args")
        rule = unneeded("an option of its client") if word else refused(f"no logger {name}: {trackers.OTHER}")
        ledger.settle(rule, f"{section}.class_path", f"{section}.init_args", f"{section}.init_args.**")


def _optimizer(ledger: Ledger, outer: str) -> None:
    """Translate the optimizer and the schedule that a LightningCLI file may name."""
    section = f"{outer}optimizer"
    name = str(ledger.get(f"{section}.class_path", ""))
    if name.startswith("torch.optim."):
        optimizer(ledger, f"{section}.class_path", f"{section}.init_args", name.rpartition(".")[2])
    elif name:
        unknown_optimizer(ledger, name, {word: ledger.get(f"{section}.init_args.{word}") for word in OPTIONS})
    section = f"{outer}lr_scheduler"
    kind = class_of(ledger, section)
    passes = ledger.get(f"{outer}trainer.max_epochs")
    ends = passes is not None and ledger.get(f"{section}.init_args.T_max") == passes
    if kind == "CosineAnnealingLR" and ends and not ledger.get(f"{section}.init_args.eta_min"):
        ledger.carry(f"{section}.class_path", decaying("cosine", 0), "LightningCLI steps it once an epoch")
        ledger.settle(unneeded("the cosine ends with the run, as with this T_max"), f"{section}.init_args.**")
    elif kind:
        ledger.ask("schedule")
    elif name:
        ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no lr_scheduler in this file")


def _parts(ledger: Ledger, outer: str) -> None:
    """Ask for what the classes of model and data hold, so that no default takes their place."""
    path = str(ledger.get(f"{outer}model.class_path", "<the LightningModule>"))
    package = "<its package>" if path.startswith("<") else path.partition(".")[0]
    model, data = (ledger.leaves.get(f"{outer}{name}") for name in ("model", "data"))
    seen = isinstance(model, Made) and model.target
    typed = named("model", model, ledger) if seen else f"model._target_={path} trust=[{package}]"
    ledger.ask("model")
    ledger.command["model"] = f"<in its place {typed}>"
    ledger.ask("objective", "lightning for its training_step, or another")
    if "optim" not in ledger.words and not ledger.asks("optim"):
        ledger.ask("optim", "lightning for its configure_optimizers, or another")
    if "schedule" not in ledger.words and not ledger.asks("schedule"):
        ledger.ask("schedule", "constant, with schedule.warmup=0, where configure_optimizers has no scheduler")
    own = named("data.dataset", data if isinstance(data, Made) and data.is_loaded else None, ledger)
    terms.ask_for_data(ledger, f"dataset, with {own.replace('<its class>', '<its dataset>')}")
    if "microbatch" in ledger.words:
        ledger.imply({"accumulate": 1}, DEFAULT)
    elif "accumulate" not in ledger.words and not any(map(ledger.asks, ("accumulate", "microbatch"))):
        ledger.ask("batch", "samples of a step, of all ranks")


def _fitted(ledger: Ledger, outer: str) -> None:
    """Name the classes of model and data that a script fits."""
    key = f"{outer}model"
    model, data = ledger.leaves.get(key), ledger.leaves.get(f"{outer}data")
    if isinstance(model, Made) and model.target:
        typed = named("model", model, ledger)
        ledger.settle(refused(f"made by code. Type {typed}, and its other arguments as model.<name>=<value>."), key)
    if isinstance(data, Made) and data.is_loaded:
        typed = named("data.dataset", data, ledger)
        ledger.settle(refused(f"made by code. Type data=dataset {typed}."), f"{outer}data")
    elif isinstance(data, Made) and data.target:
        ledger.settle(refused(f"{data.name(ledger.place)} contains its own loaders. {IN_IT}"), f"{outer}data")


FP8 = "dtrain has fp32, bf16, bf16_true, fp16, and fp8 with torchao. Type precision=bf16."
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

TRAINER_KEYS: Mapping[str, Any] = {
    "accelerator": chosen(
        {"auto": terms.GPUS, "gpu": terms.GPUS, "cuda": terms.GPUS, "cpu": says({"backend": "gloo"})},
        refused("dtrain runs on GPUs with nccl and on CPUs with gloo. Leave it out."),
    ),
    "devices": to("devices", count),
    "gpus": chosen(
        {0: unneeded("no GPUs requested"), -1: unneeded("all available: devices=auto")}, to("devices", count)
    ),
    "num_nodes": to("nodes", count),
    "precision": terms.precision_rule(MIXED, FP8),
    "max_steps": chosen({-1: unneeded("no limit")}, to("steps", count)),
    "max_epochs": chosen({-1: unneeded("no limit")}, passes),
    "min_epochs min_steps": lacking("a run always ends at steps. Leave it out."),
    "max_time max_time.**": refused("time limits are hours:minutes:seconds. Type time_limit=3:55:00."),
    "accumulate_grad_batches": to("accumulate", count),
    "accumulate_grad_batches.*": refused("the batch size is constant. Type accumulate=<number>.", "accumulate"),
    "gradient_clip_val": terms.CLIP,
    "gradient_clip_algorithm": chosen(
        {"norm": unneeded("by the norm, as here")}, refused("dtrain clips gradients by their norm. Type clip=1.0.")
    ),
    "log_every_n_steps": to("log.every", count),
    "val_check_interval": refused("the evaluation interval is counted in steps. Type evaluate.every=<steps>."),
    "check_val_every_n_epoch": chosen({None: unneeded("empty")}, EVERY),
    "num_sanity_val_steps": unneeded("dtrain verify runs a few steps first"),
    "limit_val_batches": chosen(
        {0: says({"evaluate.every": 0}, "but after the last step; data.holdout=0 turns that off too")},
        part(
            unneeded("type evaluate.samples=null for all of them; the default is 256"),
            refused("evaluation counts samples. Type evaluate.samples=<batches x batch size>."),
        ),
    ),
    "limit_train_batches": part(OFF, refused("a run always ends at steps. Type steps=<epochs x batches>.", "steps")),
    "limit_test_batches limit_predict_batches": unneeded("an option of other Lightning commands"),
    "fast_dev_run": lacking("type steps=2, or dtrain verify with the same words."),
    "overfit_batches": lacking("type data.holdout=0 with a dataset of a few samples."),
    "enable_checkpointing": switched(
        unneeded("checkpoints are always saved"),
        refused("the last step is always saved. Type checkpoint.every=0 to save only that one."),
    ),
    "enable_progress_bar": switched(
        unneeded("logger=console draws a bar on a terminal"), refused("type logger=[tensorboard].")
    ),
    "enable_model_summary": unneeded("dtrain plan shows the model"),
    "logger": switched(unneeded("metrics.jsonl and TensorBoard, as here"), says({"logger": ["console"]})),
    "callbacks": lacking("write a hook: hook.mine._target_=<yours> trust=[<its package>]."),
    "callbacks.** logger.** plugins.**": refused(
        "computed in Python, which dtrain does not run. Write a hook: hook.mine._target_=<yours> trust=[<its package>]."
    ),
    "default_root_dir": terms.output,
    "default_root_dir.**": refused("computed in Python, which dtrain does not run. Type out=<URL>."),
    "deterministic": terms.DETERMINISTIC,
    "benchmark": lacking("torch chooses the kernels. Leave it out."),
    "detect_anomaly": lacking("type on_spike=stop to stop the run at a NaN loss."),
    "sync_batchnorm": lacking("use GroupNorm or LayerNorm, which do not depend on how the batch is split."),
    "reload_dataloaders_every_n_epochs": lacking("data is accessed by index and never reloaded. Leave it out."),
    "use_distributed_sampler": unneeded("dtrain distributes samples by index"),
    "inference_mode": unneeded("evaluation always runs without autograd"),
    "resume_from_checkpoint": terms.OWN_CHECKPOINT,
    "auto_lr_find auto_scale_batch_size": lacking(
        "dtrain does not tune these values. Type optim.lr=<value> batch=<samples per step>."
    ),
    "replace_sampler_ddp move_metrics_to_cpu progress_bar_refresh_rate weights_summary terminate_on_nan "
    "track_grad_norm": unneeded(
        "an option of older versions; metrics.jsonl has the gradient norm, and dtrain distributes samples by index"
    ),
    "profiler profiler.**": terms.NO_PROFILER,
    "plugins": lacking("type words for launcher and precision: launcher=external, precision=bf16."),
    "barebones enable_autolog_hparams model_registry": unneeded("an option of Lightning's own loop"),
    "strategy strategy.**": NO_STRATEGY,
    "args.*": refused("positional argument. Write it with its name."),
}
COMMAND_KEYS: Mapping[str, Any] = {
    "seed_everything": when(
        lambda ledger, key, value: isinstance(value, bool),
        unneeded("runs are always seeded: seed=0"),
        to("seed", whole),
    ),
    "model model.**": refused(YOURS, "model"),
    "data data.**": refused(DATA),
    "optimizer.** lr_scheduler.**": refused(
        "type optim=adamw, sgd, muon or adafactor, and schedule=linear, cosine, constant or wsd, with arguments."
    ),
    "evaluation": terms.EVALUATED,
    "DataLoader.batch_size": to("microbatch", count, "of each process"),
    "ckpt_path": terms.OWN_CHECKPOINT,
    "verbose return_predictions weights_only": unneeded("an option of other Lightning commands"),
}
TRAINER, COMMANDS = table(TRAINER_KEYS), table(COMMAND_KEYS)
