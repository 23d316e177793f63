"""torchtune's YAML (`_component_` trees): https://github.com/meta-pytorch/torchtune/tree/main/recipes/configs

    dtrain import 8B_full.yaml to=mine.yaml

Its recipes for several devices shard with FSDP2; which one is meant is said to `tune run`, not in the file.
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
    "optim=adamw has its state in the type of the weights. Type optim=adamw, and precision=bf16_true or "
    "strategy.offload=cpu to save memory."
)


def translate(ledger: Ledger) -> None:
    _fill_in(ledger)
    for tell in (_steps, _model, _parts, _optimizer, _schedule, _mesh):
        tell(ledger)
    ledger.apply(RULES)
    ledger.imply({"clip": None}, "torchtune does not clip unless told to")
    if f"optimizer.{COMPONENT}" in ledger.leaves and not any(key.startswith("lr_scheduler.") for key in ledger.leaves):
        ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no lr_scheduler in this file")


def _fill_in(ledger: Ledger) -> None:
    """Keys that stand for others of the file. What reads the environment stays as it is written."""
    plain = {key: value for key, value in ledger.leaves.items() if not isinstance(value, str) or "${" not in value}
    for key, value in ledger.leaves.items():
        if isinstance(value, str) and "${" in value:
            alone = INNER.fullmatch(value)
            said = INNER.sub(lambda found: str(plain.get(found[1], found[0])), value)
            ledger.leaves[key] = plain[alone[1]] if alone and alone[1] in plain else said


def _steps(ledger: Ledger) -> None:
    """epochs x max_steps_per_epoch, where both are said; epochs alone need the number of samples."""
    passes, most = ledger.leaves.get("epochs"), ledger.leaves.get("max_steps_per_epoch")
    if most is not None and passes is not None:
        try:
            steps = count(passes) * count(most)
        except (ValueError, TypeError):
            return
        ledger.carry(
            "max_steps_per_epoch", {"steps": steps}, f"{passes} x {most}; fewer there when the data has not as many"
        )
        ledger.skip("epochs", "told with max_steps_per_epoch")


def _model(ledger: Ledger) -> None:
    """A builder of torchtune is a function that gives a module, which is what model._target_ takes."""
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
                "dtrain trains all weights: there is no LoRA. Type model._target_=<the builder without lora_> "
                "trust=[torchtune].",
            )
        ledger.ask("model")
        return
    if not re.fullmatch(r"torchtune(\.\w+)+", name):  # whose code runs is the user's to say, never the file's
        for other in ledger.under("model"):
            ledger.refuse(
                other,
                f"{name} is not of torchtune. If you trust its package, type {screen.typed(f'model._target_={name}')} "
                "trust=[<the package>].",
            )
        ledger.ask("model")
        return
    ledger.carry(key, {"model._target_": name}, "needs trust=[torchtune]")
    ledger.command["trust"] = "[torchtune]"
    for other in ledger.under("model"):
        if COMPONENT in other:
            ledger.refuse(other, "an argument that is built itself. Type model.<argument>._target_=<what it is>.")
        else:
            ledger.carry(other, {other: ledger.leaves[other]})


def _parts(ledger: Ledger) -> None:
    """Sections that are components of torchtune's own; all of a section goes one way."""
    for section, (why, known) in SECTIONS.items():
        name = str(ledger.get(f"{section}.{COMPONENT}", ""))
        for key in ledger.under(section):
            (ledger.skip if name in known or not name else ledger.refuse)(key, known.get(name, why))
    for key in ledger.under("loss"):
        if key == f"loss.{COMPONENT}" and str(ledger.leaves[key]) in LOSSES:
            ledger.carry(key, {"objective": "next_token"})
        elif str(ledger.get(f"loss.{COMPONENT}")) in LOSSES:
            ledger.skip(key, "how the logits are cut into pieces; -100 is left out, as here")
        else:
            ledger.refuse(key, "there is no such loss. Type objective._target_=<yours> trust=[<its package>].")


CHECKPOINTS = (
    "weights come from a run of dtrain (init=<out>), or a model that loads its own: "
    "model._target_=transformers.AutoModelForCausalLM.from_pretrained model.pretrained_model_name_or_path={} "
    "trust=[transformers]."
)
LOGGED = (
    "metrics.jsonl and TensorBoard have every row; for others write a logger: logger.mine._target_=<yours> "
    "trust=[<its package>]."
)
SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "dataset": (NO_DATA, {}),
    "dataset_val": ("held-out samples are a part of the data: data.holdout, or data.holdout_dataset.", {}),
    "tokenizer": ("token files are encoded already, and data=text takes data.tokenizer=<URL of a tokenizer.json>.", {}),
    "collate_fn": ("samples are stacked. Make them of equal length in the dataset.", {}),
    "quantizer": ("weights are not quantised. Quantise what dtrain checkpoint export wrote.", {}),
    "metric_logger": (
        LOGGED,
        {
            "torchtune.training.metric_logging.DiskLogger": "metrics.jsonl is always written",
            "torchtune.training.metric_logging.StdoutLogger": "logger=console",
            "torchtune.training.metric_logging.TensorBoardLogger": "logger=tensorboard",
        },
    ),
    "tensor_parallel_plan": ("a model brings its own tp_plan: see docs/own-parts.md.", {}),
    "teacher_model": ("there is no distillation. Write it as an objective of your own.", {}),
    "teacher_checkpointer": ("there is no distillation. Write it as an objective of your own.", {}),
    "kd_loss": ("there is no distillation. Write it as an objective of your own.", {}),
    "ref_checkpointer": ("there is no preference training. Write it as an objective of your own.", {}),
}
"""section -> why it is refused, and the components of it that need nothing."""


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
            f"Type optim.lr={ledger.leaves[other]} with the optimizer that you choose."
            if lr
            else f"there is no {name}: {TINY}",
        )
    if name:
        unknown_optimizer(ledger, name, ledger.get("optimizer.lr"))


def _schedule(ledger: Ledger) -> None:
    """Its cosine goes to 0; the steps are those of the run."""
    p, key = "lr_scheduler", f"lr_scheduler.{COMPONENT}"
    name = str(ledger.get(key, ""))
    if not name:
        return
    cosine = name.endswith("get_cosine_schedule_with_warmup") and ledger.get(f"{p}.num_cycles", 0.5) == 0.5
    for other in [key, *(other for other in ledger.under(p) if other != key)]:
        if not cosine:
            ledger.refuse(other, f"there is no schedule like {name}. Type schedule=cosine, constant or wsd.")
            ledger.ask("schedule")
        elif other == key:
            ledger.carry(
                key, {word: value for word, value in decaying("cosine", 0, None).items() if word != "schedule.warmup"}
            )
            ledger.imply({"schedule.warmup": 0}, "no warm-up is said")
        elif other == f"{p}.num_warmup_steps":
            to("schedule.warmup", whole, BEHIND)(ledger, other, ledger.leaves[other])
        elif other == f"{p}.num_cycles":
            ledger.skip(other, "half a cosine, as here")


def _mesh(ledger: Ledger) -> None:
    """Keys that only recipes for several devices read say that the model is sharded."""
    if any(
        ledger.leaves.get(key) is not None
        for key in (
            "custom_sharded_layers",
            "fsdp_cpu_offload",
            "fsdp_reshard_after_forward",
            "data_parallel_shard_dim",
        )
    ):
        ledger.imply({"strategy": "fsdp"}, "what torchtune's distributed recipes do")
    for key, axis in (
        ("tensor_parallel_dim", "tp"),
        ("data_parallel_replicate_dim", "dp_replicate"),
        ("data_parallel_shard_dim", "dp_shard"),
        ("context_parallel_dim", "cp"),
    ):
        value: Any = ledger.leaves.get(key)
        if key in ledger.leaves and value in (1, -1, None):
            ledger.skip(key, "all the others" if value == -1 else "one, as here")
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
    "resume_from_checkpoint": switched(says({"resume": "must"}), unneeded("resume=auto goes on where there is "
        "something to go on from")),
    "save_every_n_steps": to("checkpoint.every", count),
    "save_every_n_epochs": epochs("checkpoint.every"),
    **every("save_adapter_weights_only enable_async_checkpointing", SHARDS),
    "keep_last_n_checkpoints": to("checkpoint.keep", count),
    "epochs": epochs(),
    "max_steps_per_epoch": epochs(),
    "batch_size": to("microbatch", count, "samples of a forward on one rank"),
    "batch_size_val": unneeded("held-out samples are taken in microbatches"),
    "gradient_accumulation_steps": to("accumulate", count),
    "run_val_every_n_steps": to("evaluate.every", count),
    "seed": to("seed", whole),
    "shuffle": switched(unneeded("samples come in a seeded random order"), refused("samples come in a seeded random "
        "order. Leave it out.")),
    "clip_grad_norm": to("clip", number),
    "compile": switched(says({"compile": "blocks"}), says({"compile": "none"})),
    "compile.model": switched(says({"compile": "blocks"}), says({"compile": "none"})),
    "compile.*": unneeded("blocks are what is compiled"),
    "optimizer_in_bwd": lacking("the optimizer steps after the backward. Type strategy=fsdp to shard its state."),
    "device": chosen({"cuda": unneeded("GPUs where there are any, as here"), "cpu": says({"backend": "gloo"})},
    refused("GPUs with nccl, CPUs with gloo. Leave "
        "it out.")),
    "enable_activation_checkpointing": switched(says({"remat": "full"}), says({"remat": "none"})),
    "enable_activation_offloading": lacking("activations stay on the device. Type remat=full."),
    "ac_mode": chosen({"full": says({"remat": "full"}), "selective": says({"remat": "selective"})},
    refused("type remat=full or remat=selective.")),
    "ac_option": refused("which blocks are computed again: type remat=budget remat.share=0.5."),
    "custom_sharded_layers": unneeded("what is in no block is sharded by itself"),
    "fsdp_cpu_offload": switched(says({"strategy.offload": "cpu"}), unneeded("off, as here")),
    "fsdp_reshard_after_forward": switched(says({"strategy.reshard": "forward"}), says({"strategy.reshard": "never"})),
    "memory_efficient_fsdp_wrap": unneeded("what is in no block is sharded by itself"),
    "dtype": chosen(
        {"bf16": says({"precision": "bf16_true"}, "weights too, as there"), "fp32": says({"precision": "fp32"})},
        refused("type precision=fp16, which keeps weights in fp32.", "precision"),
    ),
    "enable_fp8_training": switched(says({"precision": "fp8"}, "needs torchao and a GPU that has the type"),
    unneeded("off, as here")),
    "fp8_recipe_name": to("precision.recipe", text),
    "log_every_n_steps": to("log.every", count),
    "log_peak_memory_stats": unneeded("metrics.jsonl has what is measured"),
    "log_level": unneeded("there is one level: what a person needs"),
    "profiler.**": lambda ledger, key, value: (
        (
        refused("nothing is profiled while training goes on. Leave it out.")
        if ledger.get("profiler.enabled")
        else unneeded("off, as here")
        )(ledger, key, value)
    ),
    "cudnn_deterministic_mode": lacking("on GPUs type backend=nccl backend.kernels=deterministic; the CPU's kernels "
        "are."),
    "low_cpu_ram": unneeded("weights are filled shard by shard"),
    "use_distributed_state_dict": SHARDS,
    **every("kd_ratio", refused("there is no distillation. Write it as an objective of your own.")),
}  # fmt: skip
