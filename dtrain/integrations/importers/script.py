"""A Python script with a training loop of its own, on PyTorch alone or on Accelerate:
https://huggingface.co/docs/accelerate/package_reference/accelerator

    dtrain import train.py to=mine.yaml

What the calls of the script say is carried over; model, data and loss are code, and typed (docs/moving.md).
"""

from collections.abc import Mapping
from typing import Any

from dtrain.config.heads import TASKS
from dtrain.integrations.importers import accelerate, nested, terms
from dtrain.integrations.importers.deepspeed_zero import stage
from dtrain.integrations.importers.ledger import Code, Ledger, count, show, whole
from dtrain.integrations.importers.lightning import TRAINER
from dtrain.integrations.importers.lightning_strategy import devices, strategy
from dtrain.integrations.importers.loops import LOOP, LOSSES, TOOLS
from dtrain.integrations.importers.made import named
from dtrain.integrations.importers.rules import (
    OFF,
    chosen,
    given,
    lacking,
    refused,
    says,
    switched,
    table,
    to,
    unneeded,
    when,
)
from dtrain.integrations.importers.terms import BEHIND, CLIP, DISK, MATRICES, OFFLOAD, decaying, optimizer, passes

TITLE = "PyTorch"
MARKS = frozenset({LOOP})
SILENT = ("strategy", "devices")
GROUPS = 2
"""Parameter groups of which the second is what does not decay."""
SEVERAL = tuple(f"{LOOP}.{name}" for name in (*TOOLS, "wrapper"))
"""Calls of scripts that run in several processes."""


def translate(ledger: Ledger) -> None:
    for tell in (_accelerator, _fabric, _optimizer, _schedule, _batch, _length, _parts):
        tell(ledger)
    hidden = [key for key in ledger.open() if ".**" in key]
    ledger.settle(refused("these arguments are not in the script. Type the equivalent words."), *hidden)
    ledger.apply(RULES)
    if not ledger.asks("clip"):
        ledger.imply({"clip": None}, "the script does not clip")


def _accelerator(ledger: Ledger) -> None:
    """Translate the plugins of Accelerator, with the rules of its YAML."""
    a = f"{LOOP}.Accelerator"
    plugin = f"{a}.gradient_accumulation_plugin"
    ledger.settle(to("accumulate", count), f"{plugin}.init_args.num_steps", f"{plugin}.init_args.args.0")
    deepspeed, fsdp = f"{a}.deepspeed_plugin", f"{a}.fsdp_plugin"
    if ledger.under(deepspeed):
        file = f"{deepspeed}.init_args.hf_ds_config"
        if isinstance(ledger.get(file), str) and not isinstance(ledger.get(file), Code):
            nested(ledger, file, "deepspeed", auto="Accelerate")
        ledger.settle(given(stage), f"{deepspeed}.init_args.zero_stage")
        ledger.imply({"strategy": "zero2"}, "default of Accelerate's DeepSpeed")
    for name in ("sharding_strategy", "reshard_after_forward"):
        ledger.settle(_sharding, f"{fsdp}.init_args.{name}")
    if ledger.under(fsdp):
        ledger.imply(accelerate.SHARDING["full_shard"], "default of Accelerate's FSDP")


def _sharding(ledger: Ledger, key: str, value: Any) -> None:
    accelerate.sharding(ledger, key, str(value).rpartition(".")[2])


def _fabric(ledger: Ledger) -> None:
    """Translate Fabric, whose arguments are those of Lightning's Trainer."""
    section = f"{LOOP}.Fabric."
    devices(ledger, section)
    strategy(ledger, section)
    for name, rule in TRAINER.items():
        ledger.settle(rule, f"{section}{name}")


def _optimizer(ledger: Ledger) -> None:
    """Translate the optimizer. Of two groups of parameters one may be spared by the decay, as norms and biases are."""
    section, arguments = f"{LOOP}.optimizer", f"{LOOP}.optimizer.init_args"
    if not ledger.under(section):
        for word in ("optim", "optim.lr"):
            ledger.ask(word)
        return
    groups = ledger.under(f"{arguments}.params")
    decays = [key for key in groups if key.endswith(".weight_decay")]
    kept = [ledger.leaves[key] for key in decays if ledger.leaves[key] != 0]
    if 0 < len(decays) <= GROUPS and len(kept) <= 1 and not any(isinstance(value, Code) for value in kept):
        ledger.settle(says({"optim.weight_decay": kept[0] if kept else 0.0}, MATRICES), *decays)
        ledger.settle(unneeded("all of the model"), *groups)
    own = refused("groups of parameters. Type optim.lr_of={<pattern of names>: <lr>}, or optim._target_=<yours>.")
    is_all = str(ledger.leaves.get(f"{arguments}.params")).endswith(".parameters()")
    ledger.settle(unneeded("all parameters of the model") if is_all else own, *groups)
    if "optim.weight_decay" in ledger.words:
        ledger.settle(unneeded("the groups give it"), f"{arguments}.weight_decay")
    ledger.settle(lacking("dtrain corrects the bias. Leave it out.", True), f"{arguments}.correct_bias")
    optimizer(ledger, f"{section}.class_path", arguments, str(ledger.get(f"{section}.class_path", "")))


def _schedule(ledger: Ledger) -> None:
    section = f"{LOOP}.scheduler"
    if not ledger.under(section):
        ledger.imply({"schedule": "constant", "schedule.warmup": 0}, "no schedule in the script")
        return
    name, warmup = ledger.get(f"{section}.name"), ledger.get(f"{section}.num_warmup_steps", 0)
    length = ledger.get(f"{section}.num_training_steps")
    shape = str(name).removesuffix("_with_warmup").removeprefix("SchedulerType.").lower()
    if isinstance(warmup, Code) or not isinstance(warmup, int | float):
        computed = refused("computed in Python. Type schedule.warmup=<steps>.", "schedule.warmup")
        ledger.settle(computed, f"{section}.num_warmup_steps")
        warmup = 0
    if shape in ("linear", "cosine", "constant") and not isinstance(name, Code):
        notes = [BEHIND] * (warmup > 0) + [f"to the end of the run, {show(length)} there"] * (shape != "constant")
        ledger.carry(f"{section}.name", decaying(shape, 0 if name == "constant" else warmup), ", ".join(notes))
        ledger.settle(unneeded("covered by its name, and the length of the run"), f"{section}.**")
        return
    hint = f"linear, cosine, constant or wsd, in place of {name}"
    ledger.settle(refused(f"Type schedule=<{hint}>.", "schedule"), f"{section}.name")
    ledger.command["schedule"] = f"<{hint}>"
    ledger.settle(unneeded("an argument of the schedule"), f"{section}.**")


def _batch(ledger: Ledger) -> None:
    """A loader's batch is that of a forward in each process, or of the step where there is one of both."""
    key = f"{LOOP}.DataLoader.batch_size"
    several = any(name.startswith(SEVERAL) for name in ledger.leaves)
    is_split = ledger.get(f"{LOOP}.Accelerator.split_batches") is True
    own = ledger.get(f"{LOOP}.accumulation")
    word = "microbatch" if (several and not is_split) or own is not None else "batch"
    ledger.settle(to(word, count, "of each process" if word == "microbatch" else ""), key)
    if key not in ledger.leaves:
        ledger.ask(word, "samples of a batch of the loader")
    if word == "microbatch" and own is None and f"{LOOP}.Accelerator.gradient_accumulation_steps" not in ledger.leaves:
        ledger.imply({"accumulate": 1}, "the script does not accumulate")


def _length(ledger: Ledger) -> None:
    steps, epochs = f"{LOOP}.steps", f"{LOOP}.epochs"
    value = ledger.get(epochs)
    if isinstance(value, Code):
        ledger.refuse(epochs, f"{value.why}. Type steps=<{value} x samples / batch>, or write epochs: into the recipe.")
        ledger.ask("steps", "epochs x samples / batch")
    elif steps not in ledger.leaves and epochs not in ledger.leaves:
        ledger.ask("steps")


def _parts(ledger: Ledger) -> None:
    """Ask for model, data and loss, which are code; a model of the hub is carried over."""
    model, data = f"{LOOP}.model", f"{LOOP}.DataLoader.dataset"
    kind, name = str(ledger.get(f"{model}.class", "")), ledger.get(f"{model}.name")
    task = TASKS.get(kind.rpartition("For")[2])
    if task and isinstance(name, str) and not isinstance(name, Code):
        ledger.carry(f"{model}.name", {"model": "hf", "model.name": name, "model.task": task})
        ledger.settle(unneeded("covered by model.task"), f"{model}.class")
        why = "an argument of from_pretrained. Type model.config={<entry of config.json>: <value>} if it is one."
        ledger.settle(refused(why), f"{model}.**")
    else:
        mine = named("model", ledger.leaves.get(model), ledger)
        ledger.settle(refused(f"made by code. Type {mine}, and its other arguments as model.<name>=<value>."), model)
        ledger.settle(refused("Type model=hf model.name=<its name> model.task=<what its head is for>."), f"{model}.**")
        ledger.ask("model", "hf" if kind else f"in its place {mine}")
    mine = named("data.dataset", ledger.leaves.get(data), ledger)
    ledger.settle(refused(f"made by code. Type data=dataset {mine}, or another word for data."), data, f"{data}.**")
    terms.ask_for_data(ledger, f"dataset, with {mine}")
    loss = str(ledger.get(f"{LOOP}.loss"))
    hint = f"{LOSSES[loss]} for {loss}" if loss in LOSSES else "the word for its loss; own: the model computes it"
    ledger.settle(refused(f"the loss is code. Type objective=<{hint}>."), f"{LOOP}.loss")
    ledger.ask("objective", hint)


LOGGING = chosen(
    {"tensorboard": says({"logger": ["console", "tensorboard"]})},
    refused("metrics.jsonl has every row. Write a logger: logger.mine._target_=<yours> trust=[<its package>]."),
)


def _loggers(ledger: Ledger, key: str, value: Any) -> None:
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    LOGGING(ledger, key, one)


def is_code(ledger: Ledger, key: str, value: Any) -> bool:
    return isinstance(value, Code)


OWN_LOOP = unneeded("an option of Accelerate's own loop")
PLUGIN = refused("type strategy=fsdp, zero2 or zero3, with its arguments.")
DETAIL = unneeded("affects speed and memory only")
ACCELERATOR: Mapping[str, Any] = {
    "mixed_precision": accelerate.RULES["mixed_precision"],
    "fp16": accelerate.RULES["fp16"],
    "gradient_accumulation_steps": to("accumulate", count),
    "cpu": switched(says({"backend": "gloo"}), terms.GPUS),
    "log_with": _loggers,
    "project_dir logging_dir": terms.output,
    "project_config project_config.**": unneeded("everything is written under out"),
    "split_batches": switched(unneeded("the batch is that of all processes"), OFF),
    "device_placement dispatch_batches even_batches use_seedable_sampler rng_types step_scheduler_with_optimizer "
    "dataloader_config.** kwargs_handlers kwargs_handlers.** profile_kwargs": OWN_LOOP,
    "gradient_accumulation_plugin.**": OWN_LOOP,
    "dynamo_backend": chosen(
        {"no": says({"compile": "none"}), "inductor": says({"compile": "blocks"})}, refused("type compile=blocks.")
    ),
    "deepspeed_plugin.init_args": {
        "gradient_accumulation_steps": to("accumulate", count),
        "gradient_clipping": CLIP,
        "offload_optimizer_device offload_param_device": chosen(
            {"none": OFF, "cpu": says({"strategy.offload": "cpu"})}, DISK
        ),
        "hf_ds_config hf_ds_config.**": refused("type the words of that config, or import its file."),
        "zero3_init_flag zero3_save_16bit_model is_train_batch_min train_micro_batch_size_per_gpu": DETAIL,
    },
    "fsdp_plugin.init_args": {
        **accelerate.FSDP,
        "cpu_offload": OFFLOAD,
        "fsdp_version": unneeded("dtrain uses FSDP2"),
        "transformer_cls_names_to_wrap mixed_precision_policy": unneeded("dtrain finds the blocks, and the precision"),
    },
    "deepspeed_plugin.class_path fsdp_plugin.class_path": unneeded("covered by its arguments"),
    "deepspeed_plugin fsdp_plugin megatron_lm_plugin megatron_lm_plugin.** deepspeed_plugin.** fsdp_plugin.**": PLUGIN,
}
SAYS: Mapping[str, Any] = {
    "Accelerator": ACCELERATOR,
    "Fabric.**": refused("Type the equivalent word, or leave it out."),
    "optimizer.**": refused(
        "an argument that dtrain's optimizer does not have. Leave it out, or type optim=<another>."
    ),
    "DataLoader": {
        "shuffle": unneeded("dtrain shuffles every pass over the data"),
        "sampler batch_sampler sampler.** batch_sampler.**": unneeded("dtrain orders and distributes the samples"),
        "collate_fn collate_fn.**": refused(
            "made by code. Type data.pad=<the padding token> for rows of different lengths, or "
            "data.collate._target_=<yours> trust=[<its package>]."
        ),
        "drop_last num_workers pin_memory persistent_workers prefetch_factor timeout generator generator.** "
        "worker_init_fn multiprocessing_context pin_memory_device in_order": DETAIL,
    },
    "evaluation": terms.EVALUATED,
    "clip_grad_norm": CLIP,
    "clip_grad_value": refused("dtrain clips gradients by their norm. Type clip=<largest norm>.", "clip"),
    "seed": when(is_code, refused("runs are always seeded. Type seed=<number> for another than 0."), to("seed", whole)),
    "epochs": passes,
    "steps": to("steps", count),
    "precision": lambda ledger, key, value: ledger.carry(key, {"precision": value}, "autocast"),
    "wrapper": chosen(
        {name: says({"strategy": name}) for name in ("ddp", "fsdp")},
        refused("type strategy=<ddp or fsdp>.", "strategy"),
    ),
    "compile": says({"compile": "blocks"}, "block by block"),
    "accumulation": to("accumulate", count),
}
RULES = table({LOOP: SAYS})
