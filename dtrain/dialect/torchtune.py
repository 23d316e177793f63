"""torchtune's YAML (`_component_` trees): https://github.com/meta-pytorch/torchtune/tree/main/recipes/configs

    dtrain import 8B_full.yaml to=mine.yaml

Its distributed recipes shard with FSDP2; the recipe is chosen by `tune run`, not in the file.
"""

import re
from collections.abc import Mapping
from typing import Any

from dtrain.dialect.deepspeed_zero import SHARDS
from dtrain.dialect.ledger import Ledger, Rule, count, names, number, text, whole
from dtrain.dialect.rules import ODD, chosen, every, lacking, refused, says, switched, to, unneeded
from dtrain.dialect.terms import BEHIND, NO_DATA, decaying, epochs, optimizer, output, unknown_optimizer
from dtrain.secrets import screen

TITLE = "torchtune"
MARKS = names(
    "_component_ enable_activation_checkpointing enable_activation_offloading optimizer_in_bwd max_steps_per_epoch "
    "metric_logger clip_grad_norm"
)
SILENT = ("model", "data", "steps")
COMPONENT = "_component_"
INNER = re.compile(r"\$\{([\w.]+)\}")
"""${output_dir}: another key of the same file."""
LOSSES = names(
    "torch.nn.CrossEntropyLoss torchtune.modules.loss.CEWithChunkedOutputLoss "
    "torchtune.modules.loss.LinearCrossEntropyLoss "
    "torchtune.modules.loss.SFTLoss torchtune.modules.loss.cross_entropy_loss.LinearCrossEntropyLoss"
)
TINY = (
    "optim=adamw keeps its state in the weights' dtype. Type optim=adamw, and precision=bf16_true or "
    "strategy.offload=cpu to save memory."
)


def translate(ledger: Ledger) -> None:
    _fill_in(ledger)
    for tell in (_steps, _model, _parts, _optimizer, _schedule, _mesh):
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
    if most is not None and passes is not None:
        try:
            steps = count(passes) * count(most)
        except (ValueError, TypeError):
            return
        ledger.carry(
            "max_steps_per_epoch", {"steps": steps}, f"{passes} x {most}; fewer in torchtune if the data is shorter"
        )
        ledger.skip("epochs", "covered by max_steps_per_epoch")


def _model(ledger: Ledger) -> None:
    """Translate the model: torchtune's builders are functions that return a module, as model._target_ expects."""
    key = f"model.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if not name:
        return
    if (
        "lora" in name
        or "dora" in name
        or any(ledger.get(f"model.{other}") for other in ("lora_rank", "quantize_base"))
    ):
        for other in ledger.under("model"):
            ledger.refuse(
                other,
                "dtrain trains all weights: LoRA is not supported. Type model._target_=<the builder without lora_> "
                "trust=[torchtune].",
            )
        ledger.ask("model")
        return
    if not re.fullmatch(r"torchtune(\.\w+)+", name):  # only the user may trust code, never a file
        for other in ledger.under("model"):
            ledger.refuse(
                other,
                f"{name} is not part of torchtune. If you trust its package, type "
                f"{screen.typed(f'model._target_={name}')} "
                "trust=[<the package>].",
            )
        ledger.ask("model")
        return
    ledger.carry(key, {"model._target_": name}, "needs trust=[torchtune]")
    ledger.command["trust"] = "[torchtune]"
    for other in ledger.under("model"):
        if COMPONENT in other:
            ledger.refuse(other, "this argument is an object. Type model.<argument>._target_=<its class>.")
        else:
            ledger.carry(other, {other: ledger.leaves[other]})


def _parts(ledger: Ledger) -> None:
    """Record the sections that configure torchtune's components; all keys of a section share one outcome."""
    for section, (why, known) in SECTIONS.items():
        name = str(ledger.get(f"{section}.{COMPONENT}", ""))
        for key in ledger.under(section):
            (ledger.skip if name in known or not name else ledger.refuse)(key, known.get(name, why))
    for key in ledger.under("loss"):
        if key == f"loss.{COMPONENT}" and str(ledger.leaves[key]) in LOSSES:
            ledger.carry(key, {"objective": "next_token"})
        elif str(ledger.get(f"loss.{COMPONENT}")) in LOSSES:
            ledger.skip(key, "the chunking of the logits; -100 is ignored, as here")
        else:
            ledger.refuse(key, "unknown loss. Type objective._target_=<yours> trust=[<its package>].")


CHECKPOINTS = (
    "initial weights come from a dtrain run (init=<out>), or from a model that loads its own: "
    "model._target_=transformers.AutoModelForCausalLM.from_pretrained model.pretrained_model_name_or_path={} "
    "trust=[transformers]."
)
LOGGED = (
    "metrics.jsonl and TensorBoard get every row. For another service write a logger: logger.mine._target_=<yours> "
    "trust=[<its package>]."
)
SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "dataset": (NO_DATA, {}),
    "dataset_val": ("the data provides held-out samples: data.holdout, or data.holdout_dataset.", {}),
    "tokenizer": ("token files are already encoded; data=text takes data.tokenizer=<URL of a tokenizer.json>.", {}),
    "collate_fn": ("dtrain stacks the samples. Give them equal lengths in your dataset.", {}),
    "quantizer": ("dtrain does not quantise weights. Quantise the output of dtrain checkpoint export.", {}),
    "metric_logger": (
        LOGGED,
        {
            "torchtune.training.metric_logging.DiskLogger": "metrics.jsonl is always written",
            "torchtune.training.metric_logging.StdoutLogger": "logger=console",
            "torchtune.training.metric_logging.TensorBoardLogger": "logger=tensorboard",
        },
    ),
    "tensor_parallel_plan": ("the model defines its own tp_plan: see docs/own-parts.md.", {}),
    "teacher_model": ("distillation is not built in. Write your own objective.", {}),
    "teacher_checkpointer": ("distillation is not built in. Write your own objective.", {}),
    "kd_loss": ("distillation is not built in. Write your own objective.", {}),
    "ref_checkpointer": ("preference training is not built in. Write your own objective.", {}),
}
"""section -> why it is refused, and its components that dtrain does not need (with the reason)."""


def _optimizer(ledger: Ledger) -> None:
    key = f"optimizer.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if name.startswith("torch.optim."):
        optimizer(ledger, key, "optimizer", name.rpartition(".")[2])
        return
    for other in ledger.under("optimizer"):
        lr = other == "optimizer.lr"
        ledger.refuse(
            other,
            f"Type optim.lr={ledger.leaves[other]} for the optimizer that you choose."
            if lr
            else f"unknown optimizer {name}: {TINY}",
        )
    if name:
        unknown_optimizer(ledger, name, ledger.get("optimizer.lr"))


def _schedule(ledger: Ledger) -> None:
    """Translate the schedule: a cosine to 0 at the end of the run."""
    p, key = "lr_scheduler", f"lr_scheduler.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if not name:
        return
    cosine = name.endswith("get_cosine_schedule_with_warmup") and ledger.get(f"{p}.num_cycles", 0.5) == 0.5
    for other in [key, *(other for other in ledger.under(p) if other != key)]:
        if not cosine:
            ledger.refuse(other, f"unknown schedule {name}. Type schedule=cosine, constant or wsd.")
            ledger.ask("schedule")
        elif other == key:
            ledger.carry(
                key, {word: value for word, value in decaying("cosine", 0, None).items() if word != "schedule.warmup"}
            )
            ledger.imply({"schedule.warmup": 0}, "no warm-up in this file")
        elif other == f"{p}.num_warmup_steps":
            to("schedule.warmup", whole, BEHIND)(ledger, other, ledger.leaves[other])
        elif other == f"{p}.num_cycles":
            ledger.skip(other, "half a cosine period, as here")


def _mesh(ledger: Ledger) -> None:
    """Translate the mesh degrees; keys of torchtune's distributed recipes imply FSDP."""
    if any(
        ledger.leaves.get(key) is not None
        for key in (
            "custom_sharded_layers",
            "fsdp_cpu_offload",
            "fsdp_reshard_after_forward",
            "data_parallel_shard_dim",
        )
    ):
        ledger.imply({"strategy": "fsdp"}, "as in torchtune's distributed recipes")
    for key, axis in (
        ("tensor_parallel_dim", "tp"),
        ("data_parallel_replicate_dim", "dp_replicate"),
        ("data_parallel_shard_dim", "dp_shard"),
        ("context_parallel_dim", "cp"),
    ):
        value: Any = ledger.leaves.get(key)
        if key in ledger.leaves and value in (1, -1, None):
            ledger.skip(key, "the remaining ranks" if value == -1 else "one, as here")
        elif key in ledger.leaves:
            to(f"mesh.{axis}", count)(ledger, key, value)
    if ledger.words.get("mesh.dp_replicate", 1) > 1:
        ledger.words["strategy"] = "fsdp" if ledger.words.get("mesh.dp_shard") is None else "hsdp"


def _checkpointer(ledger: Ledger, key: str, value: Any) -> Rule:
    if key.endswith("output_dir"):
        return SHARDS
    folder = screen.typed(str(ledger.get("checkpointer.checkpoint_dir", "<folder>")))
    return unneeded("empty") if value in (None, "") else refused(CHECKPOINTS.format(folder))


RULES: dict[str, Rule] = {
    **every("tensor_parallel_dim data_parallel_replicate_dim data_parallel_shard_dim context_parallel_dim",
    refused(ODD)),
    "output_dir": output,
    **{f"{section}.**": refused(why) for section, (why, _) in SECTIONS.items()},
    "checkpointer.**": lambda ledger, key, value: _checkpointer(ledger, key, value)(ledger, key, value),
    "resume_from_checkpoint": switched(says({"resume": "must"}), unneeded("resume=auto resumes if there is a "
    "checkpoint")),
    "save_every_n_steps": to("checkpoint.every", count),
    "save_every_n_epochs": epochs("checkpoint.every"),
    **every("save_adapter_weights_only enable_async_checkpointing", SHARDS),
    "keep_last_n_checkpoints": to("checkpoint.keep", count),
    "epochs": epochs(),
    "max_steps_per_epoch": epochs(),
    "batch_size": to("microbatch", count, "samples per forward on one rank"),
    "batch_size_val": unneeded("evaluation uses the microbatch size"),
    "gradient_accumulation_steps": to("accumulate", count),
    "run_val_every_n_steps": to("evaluate.every", count),
    "seed": to("seed", whole),
    "shuffle": switched(unneeded("samples are shuffled with the seed"), refused("samples are shuffled with the seed. "
    "Leave it out.")),
    "clip_grad_norm": to("clip", number),
    "compile": switched(says({"compile": "blocks"}), says({"compile": "none"})),
    "compile.model": switched(says({"compile": "blocks"}), says({"compile": "none"})),
    "compile.*": unneeded("dtrain compiles the blocks"),
    "optimizer_in_bwd": lacking("the optimizer steps after the whole backward. Type strategy=fsdp to shard its state."),
    "device": chosen({"cuda": unneeded("GPUs if available, as here"), "cpu": says({"backend": "gloo"})},
    refused("dtrain runs on GPUs with nccl and on CPUs with gloo. Leave it out.")),
    "enable_activation_checkpointing": switched(says({"remat": "full"}), says({"remat": "none"})),
    "enable_activation_offloading": lacking("there is no activation offload. Type remat=full."),
    "ac_mode": chosen({"full": says({"remat": "full"}), "selective": says({"remat": "selective"})},
    refused("type remat=full or remat=selective.")),
    "ac_option": refused("type remat=budget remat.share=0.5 for the share of blocks to recompute."),
    "custom_sharded_layers": unneeded("parameters outside the blocks are sharded separately"),
    "fsdp_cpu_offload": switched(says({"strategy.offload": "cpu"}), unneeded("off, as here")),
    "fsdp_reshard_after_forward": switched(says({"strategy.reshard": "forward"}), says({"strategy.reshard": "never"})),
    "memory_efficient_fsdp_wrap": unneeded("parameters outside the blocks are sharded separately"),
    "dtype": chosen(
        {"bf16": says({"precision": "bf16_true"}, "bf16 weights, as in "
        "torchtune"), "fp32": says({"precision": "fp32"})},
        refused("16-bit weights are bf16 only. Type precision=fp16, which keeps fp32 weights.", "precision"),
    ),
    "enable_fp8_training": switched(says({"precision": "fp8"}, "needs torchao and a GPU with fp8"),
    unneeded("off, as here")),
    "fp8_recipe_name": to("precision.recipe", text),
    "log_every_n_steps": to("log.every", count),
    "log_peak_memory_stats": unneeded("metrics.jsonl has all measurements"),
    "log_level": unneeded("there is a single log level"),
    "profiler.**": lambda ledger, key, value: (
        (
        refused("there is no profiler during training. Leave it out.")
        if ledger.get("profiler.enabled")
        else unneeded("off, as here")
        )(ledger, key, value)
    ),
    "cudnn_deterministic_mode": lacking("on GPUs type backend=nccl backend.kernels=deterministic; CPU kernels are "
    "deterministic."),
    "low_cpu_ram": unneeded("each shard is initialised in place"),
    "use_distributed_state_dict": SHARDS,
    **every("kd_ratio", refused("distillation is not built in. Write your own objective.")),
}  # fmt: skip
