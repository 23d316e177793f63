"""torchtune's YAML (`_component_` trees): https://github.com/meta-pytorch/torchtune/tree/main/recipes/configs

    dtrain import 8B_full.yaml to=mine.yaml

Its distributed recipes shard with FSDP2; the recipe is chosen by `tune run`, not in the file.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import terms, trackers
from dtrain.integrations.importers.ledger import Ledger, count, names, text, whole
from dtrain.integrations.importers.rules import (
    ODD,
    OFF,
    chosen,
    lacking,
    refused,
    says,
    switched,
    table,
    to,
    unneeded,
    when,
)
from dtrain.integrations.importers.terms import BEHIND, NO_DATA, OPTIONS, optimizer, unknown_optimizer, unknown_schedule
from dtrain.integrations.importers.torchtune_data import data_section
from dtrain.integrations.importers.torchtune_model import COMPONENT, model_section, objective_section
from dtrain.secrets import screen

TITLE = "torchtune"
MARKS = names(
    "_component_ enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd max_steps_per_epoch "
    "metric_logger clip_grad_norm"
)
SILENT = ("model", "data", "steps")
INNER = re.compile(r"\$\{([\w.]+)\}")
"""${output_dir}: another key of the same file."""
TINY = (
    "optim=adamw keeps its state in the weights' dtype. Type optim=adamw, and precision=bf16_true or "
    "strategy.offload=cpu to save memory."
)


def translate(ledger: Ledger) -> None:
    _fill_in(ledger)
    for tell in (_steps, model_section, objective_section, data_section, _parts, _optimizer, _schedule, _mesh):
        tell(ledger)
    ledger.apply(RULES)
    ledger.imply({"clip": None}, "torchtune does not clip by default")
    if f"optimizer.{COMPONENT}" in ledger.leaves and not any(key.startswith("lr_scheduler.") for key in ledger.leaves):
        ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no lr_scheduler in this file")


def _fill_in(ledger: Ledger) -> None:
    """Resolve references to other keys of the file; references to the environment stay unresolved."""
    plain = {key: value for key, value in ledger.leaves.items() if not isinstance(value, str) or "${" not in value}
    for key, value in ledger.leaves.items():
        if isinstance(value, str) and "${" in value:
            alone = INNER.fullmatch(value)
            text = INNER.sub(lambda match: str(plain.get(match[1], match[0])), value)
            ledger.leaves[key] = plain[alone[1]] if alone and alone[1] in plain else text


def _steps(ledger: Ledger) -> None:
    """Compute the steps from epochs x max_steps_per_epoch, if both are set."""
    passes, most = ledger.leaves.get("epochs"), ledger.leaves.get("max_steps_per_epoch")
    try:
        steps = count(passes) * count(most)
    except ValueError:
        return
    ledger.carry(
        "max_steps_per_epoch", {"steps": steps}, f"{passes} x {most}; fewer in torchtune if the data is shorter"
    )
    ledger.skip("epochs", "covered by max_steps_per_epoch")


def _parts(ledger: Ledger) -> None:
    """Record the sections that configure torchtune's components; all keys of a section share one outcome."""
    _logger(ledger)
    for section, (why, known) in SECTIONS.items():
        name = str(ledger.get(f"{section}.{COMPONENT}", ""))
        why = terms.QAT if section == "quantizer" and "QAT" in name else why
        outcome = unneeded if name in known or not name else refused
        ledger.settle(outcome(known.get(name, why)), section, f"{section}.**")


DISTILLATION = "distillation is objective=distill: type objective.teacher=<its folder> objective.hard=<1 - kd_ratio>."
PROFILER = refused("there is no profiler during training. Leave it out.")
INITIAL = (
    "weights of Hugging Face are read from the folder, and others by init=. Type model=hf model.name={0}, or init={0} "
    "with a model that has their names."
)
SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "dataset": (NO_DATA, {}),
    "dataset_val": ("type data.holdout=<part> of the rows, or evaluate.sets={val: {path: <files>}}.", {}),
    "tokenizer": ("data=chat takes data.tokenizer=<folder>, data=text data.tokenizer=<tokenizer.json>.", {}),
    "collate_fn": ("data=chat pads the rows; for a dataset of your own type data.collate.", {}),
    "quantizer": ("dtrain does not quantise weights. Quantise the output of dtrain checkpoint export.", {}),
    "tensor_parallel_plan": ("the model defines its own tp_plan: see docs/own-parts.md.", {}),
    "teacher_model": (DISTILLATION, {}),
    "teacher_checkpointer": (DISTILLATION, {}),
    "kd_loss": (DISTILLATION, {}),
    "ref_checkpointer": ("the reference of objective=dpo is the model that the run begins with.", {}),
}
"""section -> why it is refused, and its components that dtrain does not need (with the reason)."""


def _logger(ledger: Ledger) -> None:
    """Translate the logger; torchtune's own files are metrics.jsonl and what the console shows."""
    section, key = "metric_logger", f"metric_logger.{COMPONENT}"
    name = str(ledger.get(key, ""))
    rule = unneeded("metrics.jsonl is always written, and logger=console shows it")
    if word := trackers.named(name):
        trackers.add(ledger, key, word)
        trackers.arguments(ledger, word, section)
    elif name and not name.endswith((".DiskLogger", ".StdoutLogger")):
        rule = refused(f"no logger {name}: {trackers.OTHER}")
    ledger.settle(rule, section, f"{section}.**")


def _optimizer(ledger: Ledger) -> None:
    key = f"optimizer.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if name.startswith("torch.optim."):
        optimizer(ledger, key, "optimizer", name.rpartition(".")[2])
        return
    lr = ledger.get("optimizer.lr")
    ledger.settle(refused(f"Type {screen.typed(f'optim.lr={lr}')} for the optimizer that you choose."), "optimizer.lr")
    ledger.settle(refused(f"unknown optimizer {name}: {TINY}"), "optimizer", "optimizer.**")
    if name:
        unknown_optimizer(ledger, name, {word: ledger.get(f"optimizer.{word}") for word in OPTIONS})


def _schedule(ledger: Ledger) -> None:
    """Translate the schedule: a cosine to 0 at the end of the run."""
    p, key = "lr_scheduler", f"lr_scheduler.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if not name:
        return
    if not name.endswith("get_cosine_schedule_with_warmup") or ledger.get(f"{p}.num_cycles", 0.5) != 0.5:
        ledger.settle(to("schedule.warmup", whole, BEHIND), f"{p}.num_warmup_steps")
        ledger.settle(refused(unknown_schedule(name), "schedule"), f"{p}.**")
        return
    ledger.carry(key, {"schedule": "cosine", "schedule.floor": 0.0})
    ledger.settle(to("schedule.warmup", whole, BEHIND), f"{p}.num_warmup_steps")
    ledger.settle(unneeded("half a cosine period, as here"), f"{p}.num_cycles")
    ledger.imply({"schedule.warmup": 0}, "no warm-up in this file")


DEGREES = {
    "tensor_parallel_dim": "tp",
    "data_parallel_replicate_dim": "dp_replicate",
    "data_parallel_shard_dim": "dp_shard",
    "context_parallel_dim": "cp",
}


def _mesh(ledger: Ledger) -> None:
    """Translate the mesh degrees; keys of torchtune's distributed recipes imply FSDP."""
    distributed = ("custom_sharded_layers", "fsdp_cpu_offload", "fsdp_reshard_after_forward", "data_parallel_shard_dim")
    if any(ledger.leaves.get(key) is not None for key in distributed):
        ledger.imply({"strategy": "fsdp"}, "as in torchtune's distributed recipes")
    for key, axis in DEGREES.items():
        ledger.settle(chosen({-1: unneeded("the remaining ranks")}, terms.degree(axis)), key)
    if ledger.words.get("mesh.dp_replicate", 1) > 1:
        ledger.words["strategy"] = "fsdp" if ledger.words.get("mesh.dp_shard") is None else "hsdp"


def _checkpoint_files(ledger: Ledger, key: str, value: Any) -> None:
    folder = screen.typed(str(ledger.get("checkpointer.checkpoint_dir", "<folder>")))
    (unneeded("empty") if value in (None, "") else refused(INITIAL.format(folder)))(ledger, key, value)


KEYS: Mapping[str, Any] = {
    " ".join(DEGREES): refused(ODD),
    "output_dir": terms.output,
    **{f"{section}.**": refused(why) for section, (why, _) in SECTIONS.items()},
    "checkpointer.output_dir": terms.CHECKPOINTS,
    "checkpointer.**": _checkpoint_files,
    "resume_from_checkpoint": switched(
        says({"resume": "must"}), unneeded("resume=auto resumes if there is a checkpoint")
    ),
    "save_every_n_steps": to("checkpoint.every", count),
    "save_every_n_epochs": terms.epochs("checkpoint.every"),
    "save_adapter_weights_only enable_async_checkpointing use_distributed_state_dict": terms.CHECKPOINTS,
    "keep_last_n_checkpoints": to("checkpoint.keep", count),
    "epochs": terms.passes,
    "max_steps_per_epoch": refused("Type steps=<epochs x it>.", "steps"),
    "batch_size": to("microbatch", count, "samples per forward on one rank"),
    "batch_size_val": unneeded("evaluation uses the microbatch size"),
    "gradient_accumulation_steps": to("accumulate", count),
    "run_val_every_n_steps": to("evaluate.every", count),
    "seed": to("seed", whole),
    "shuffle": switched(
        unneeded("samples are shuffled with the seed"), refused("samples are shuffled with the seed. Leave it out.")
    ),
    "clip_grad_norm": to("clip"),
    "compile compile.model": terms.COMPILE,
    "compile.*": unneeded("dtrain compiles the blocks"),
    "optimizer_in_bwd": lacking("the optimizer steps after the whole backward. Type strategy=fsdp to shard its state."),
    "device": chosen(
        {"cuda": terms.GPUS, "cpu": says({"backend": "gloo"})},
        refused("dtrain runs on GPUs with nccl and on CPUs with gloo. Leave it out."),
    ),
    "enable_activation_checkpointing": switched(says({"remat": "full"}), says({"remat": "none"})),
    "enable_activation_offloading": terms.NO_ACTIVATION_OFFLOAD,
    "ac_mode": chosen(
        {"full": says({"remat": "full"}), "selective": says({"remat": "selective"})},
        refused("type remat=full or remat=selective."),
    ),
    "ac_option": refused("type remat=budget remat.share=0.5 for the share of blocks to recompute."),
    "custom_sharded_layers memory_efficient_fsdp_wrap": unneeded(
        "parameters outside the blocks are sharded separately"
    ),
    "fsdp_cpu_offload": terms.OFFLOAD,
    "fsdp_reshard_after_forward": switched(says({"strategy.reshard": "forward"}), says({"strategy.reshard": "never"})),
    "dtype": chosen(
        {
            "bf16": says({"precision": "bf16_true"}, "bf16 weights, as in torchtune"),
            "fp32": says({"precision": "fp32"}),
        },
        refused("16-bit weights are bf16 only. Type precision=fp16, which keeps fp32 weights.", "precision"),
    ),
    "enable_fp8_training": terms.FP8,
    "fp8_recipe_name": to("precision.recipe", text),
    "log_every_n_steps": to("log.every", count),
    "log_peak_memory_stats": unneeded("metrics.jsonl has all measurements"),
    "log_level": unneeded("there is a single log level"),
    "profiler.**": when(lambda ledger, *_: bool(ledger.get("profiler.enabled")), PROFILER, OFF),
    "cudnn_deterministic_mode": terms.DETERMINISTIC,
    "low_cpu_ram": unneeded("each shard is initialised in place"),
    "kd_ratio": refused(DISTILLATION),
    "fake_quant_after_n_steps": refused(terms.QAT),
}
RULES = table(KEYS)
