"""DeepSpeed's JSON: https://www.deepspeed.ai/docs/config-json/ and the defaults of 0.19.

dtrain import ds_config.json to=mine.yaml
"""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import trackers
from dtrain.integrations.importers.deepspeed_optim import optimizer_section, schedule_section
from dtrain.integrations.importers.deepspeed_zero import ZERO, zero_section
from dtrain.integrations.importers.ledger import Ledger, Rule, count, names, whole
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
    turns_on,
    unneeded,
    unread,
)
from dtrain.integrations.importers.terms import CHECKPOINTS, CLIP, NO_ACTIVATION_OFFLOAD

TITLE = "DeepSpeed"
MARKS = names(
    "train_batch_size train_micro_batch_size_per_gpu zero_optimization zero_allow_untested_optimizer "
    "wall_clock_breakdown steps_per_print fp16 bf16 "
    "gradient_clipping zero_force_ds_cpu_optimizer activation_checkpointing prescale_gradients flops_profiler"
)
SILENT = ("model", "data", "steps", "batch", "optim", "schedule")
"""Groups that such a file never sets."""

BATCH, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
OURS = {BATCH: "batch", MICRO: "microbatch", ACCUMULATE: "accumulate"}
FP16 = (
    "only precision=fp16 uses it: precision.scale is the initial loss scale, doubled after precision.growth good steps"
)
HALVES = "dtrain halves the scale at the first overflow. Leave it out."
SCALE = to("precision.scale", lambda power: 2.0 ** whole(power))


def translate(ledger: Ledger) -> None:
    for tell in (_batch, zero_section, _precision, schedule_section, optimizer_section, _parallel):
        tell(ledger)
    ledger.apply(RULES)
    if "gradient_clipping" not in ledger.leaves:
        ledger.imply({"clip": None}, "DeepSpeed does not clip by default")


def _batch(ledger: Ledger) -> None:
    """batch = microbatch x ranks x accumulate: two of the three determine the third.

    One alone means no accumulation.
    """
    sizes: dict[str, int] = {}
    given = {key: ledger.leaves[key] for key in OURS if key in ledger.leaves}
    free = 2 - sum(value != "auto" for value in given.values())
    for key, value in given.items():
        if value == "auto" and not ledger.auto and free <= 0:
            ledger.skip(key, "follows from the two other sizes and the ranks")
            continue
        free -= value == "auto"
        if unread(ledger, key, value, OURS[key]):
            continue
        try:
            sizes[key] = count(value)
        except (ValueError, TypeError) as error:
            ledger.refuse(key, f"DeepSpeed takes {error} here, not {value!r}. Type {OURS[key]}=<number>.")
            ledger.ask(OURS[key], "number")
    if len(sizes) == 3:
        _triple(ledger, *(sizes[key] for key in OURS))
        return
    for key, value in sizes.items():
        ledger.carry(key, {OURS[key]: value})
    if len(given) == len(sizes) == 1 and ACCUMULATE not in sizes:
        ledger.imply({"accumulate": 1}, "DeepSpeed does not accumulate by default")


def _triple(ledger: Ledger, batch: int, micro: int, accumulate: int) -> None:
    if batch % (micro * accumulate):
        why = f"{batch} is not {micro} x {accumulate} x a number of ranks. Type batch=<samples per step> "
        ledger.settle(refused(f"{why}microbatch={micro}."), *OURS)
        return
    ranks = batch // micro // accumulate
    ledger.carry(BATCH, {"batch": batch})
    ledger.carry(MICRO, {"microbatch": micro}, f"the three numbers mean {ranks} data-parallel rank(s)")
    ledger.skip(
        ACCUMULATE,
        "follows from batch, microbatch and the ranks, and is recomputed for another number of ranks",
    )


def _precision(ledger: Ledger) -> None:
    """Choose the precision from fp16, bf16 or torch_autocast. Weights and optimizer state are fp32, like DeepSpeed's
    master weights.
    """
    whole_in = ledger.get("bf16.bf16_master_weights_and_grads") is True
    names = {"fp16": "fp16", "bf16": "bf16_true" if whole_in else "bf16", "bfloat16": "bf16"}
    for name, word in names.items():
        key = f"{name}.enabled"
        if key in ledger.leaves and not unread(ledger, key, ledger.leaves[key], "precision"):
            ledger.settle(turns_on({"precision": word}), key)
    enabled = ledger.get("fp16.enabled")
    if enabled is True or (ledger.auto and enabled == "auto"):
        ledger.settle(SCALE, "fp16.initial_scale_power")
        ledger.imply({"precision.growth": 1000}, "DeepSpeed doubles the loss scale after 1000 good steps")
    else:
        options = [key for key in ledger.under("fp16") if key in RULES]
        ledger.settle(unneeded(FP16 if enabled == "auto" else "an option of fp16, which is off"), *options)
    key, dtype = "torch_autocast.enabled", str(ledger.get("torch_autocast.dtype", "bfloat16"))
    if key in ledger.leaves:
        word = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype.removeprefix("torch."), "")
        other = refused(f"autocast to {dtype} is not supported. Type precision=bf16.")
        ledger.settle(turns_on({"precision": word}) if word else switched(other, OFF), key)
        ledger.settle(unneeded("covered by torch_autocast.enabled"), "torch_autocast.dtype")


DEGREES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "tensor_parallel.autotp_size": ("mesh.tp", {}),
    "sequence_parallel_size": ("mesh.cp", {"context.attention": "ulysses"}),
    "pipeline.stages": ("mesh.pp", {}),
    "expert_parallel.autoep_size": ("mesh.ep", {}),
}
"""Key -> the mesh axis of this degree, and further words."""


def _parallel(ledger: Ledger) -> None:
    """Translate the tensor, sequence, pipeline and expert degrees."""
    for key, (axis, further) in DEGREES.items():
        value = ledger.leaves.get(key)
        if value == "auto":
            ledger.skip(key, "the model's code determines it; type mesh.pp=<stages>")
        elif isinstance(value, int) and value < 2:
            ledger.skip(key, "one, as here")
        elif isinstance(value, int):
            ledger.carry(key, {axis: value, **further}, "needs that many ranks, and a model that supports the split")


def _section(name: str, why: str) -> Rule:
    """Refuse every key of a section that is on; skip every key of one that is off."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        on = ledger.get(f"{name}.enabled", ledger.get(f"{name}.deepcompile", True))
        if on is False or value in (False, None):
            ledger.skip(key, "off, as here")
        else:
            ledger.refuse(key, why)
            if name == "amp":
                ledger.ask("precision")

    return rule


SECTIONS = {
    "amp": "NVIDIA's amp is not supported. Type precision=fp16 or precision=bf16.",
    "sparse_attention": "dtrain has no sparse attention. Use a model that implements it: model._target_=<yours> "
    "trust=[<its package>].",
    "compression_training": "there is no compression during training. Compress the output of dtrain checkpoint export.",
    "data_efficiency": "curricula and token dropping are not supported. Order the samples in your own dataset.",
    "curriculum_learning": "curricula are not supported. Order the samples in your own dataset.",
    "progressive_layer_drop": "layer dropping is not built in. Implement it in your own model.",
    "autotuning": "dtrain plan predicts and compares layouts, and strategy=auto picks the cheapest that fits. Leave "
    "it out.",
    "elasticity": "the batch size does not depend on the number of ranks. Type nodes=1:4 for one to four nodes.",
    "hybrid_engine": "generation during training is not supported. Leave it out.",
    "quantize_training": "dtrain does not quantise weights. Type precision=fp8 for fp8 matrix products.",
    "weight_quantization": "dtrain does not quantise weights. Type precision=fp8 for fp8 matrix products.",
    "eigenvalue": "eigenvalues are not computed. Leave it out.",
    "nebula": "dtrain already saves in the background. Leave it out.",
    "comms_logger": "collectives are not logged; failure.json has each rank's last one. Leave it out.",
    "flops_profiler": "there is no profiler during training. Leave it out.",
    "compile": "DeepCompile is not supported. Type compile=blocks.",
    "expert_parallel": "expert parallelism needs model=moe. Type model=moe mesh.ep=2.",
    "zero_optimization.zenflow": "delayed updates are not supported. Type strategy.offload=cpu.",
}
"""section -> why it is refused when it is on, and what to type instead."""


KEYS: Mapping[str, Any] = {
    " ".join([*OURS, *DEGREES]): refused(ODD),
    "optimizer.type scheduler.type fp16.enabled bf16.enabled torch_autocast.enabled torch_autocast.dtype": refused(ODD),
    "optimizer.params": {"lr betas eps weight_decay torch_adam adam_w_mode bias_correction": refused(ODD)},
    "scheduler.params": {
        "total_num_steps warmup_num_steps warmup_type warmup_max_lr cos_min_ratio": refused(ODD),
        "last_batch_iteration": chosen(
            {-1: unneeded("from the first step, as here")},
            refused("a run resumes from its own checkpoint. Leave it out."),
        ),
        "warmup_min_lr warmup_min_ratio": lacking("the warm-up starts near 0. Leave it out."),
    },
    "gradient_clipping": CLIP,
    "steps_per_print": to("log.every", count),
    "tensorboard.enabled": trackers.tensorboard,
    "wandb.enabled": trackers.on("wandb"),
    "wandb.project": trackers.argument("wandb", "project", "wandb.enabled", silent=False),
    "wandb.team": trackers.argument("wandb", "entity", "wandb.enabled", silent=False),
    "wandb.group": trackers.argument("wandb", "group", "wandb.enabled", silent=False),
    "comet.enabled": trackers.on("comet"),
    "comet.project": trackers.argument("comet", "project", "comet.enabled", silent=False),
    "comet.workspace": trackers.argument("comet", "workspace", "comet.enabled", silent=False),
    "comet.experiment_name": trackers.argument("comet", "name", "comet.enabled", silent=False),
    "comet.api_key": trackers.KEY,
    "comet.**": unneeded("an option of its client"),
    "tensorboard.output_path tensorboard.job_name": unneeded("event files are under <out>/tensorboard"),
    "csv_monitor.**": unneeded("metrics.jsonl has a row for every step"),
    "dump_state": unneeded("config.yaml and plan.yaml are always written"),
    "wall_clock_breakdown memory_breakdown timers.**": unneeded("metrics.jsonl has the seconds of every step"),
    "log_level": unneeded("there is a single log level"),
    "dataloader_drop_last": unneeded("batches continue into the next epoch, so all have the same size"),
    "disable_allgather": lacking("shards are always all-gathered. Leave it out."),
    "disable_python_gc": unneeded("the loop runs the garbage collector outside its steps"),
    "zero_allow_untested_optimizer": unneeded("every optimizer here is tested with every strategy"),
    "zero_force_ds_cpu_optimizer optimizer.legacy_fusion": unneeded("selects a kernel only"),
    "communication_data_type seq_parallel_communication_data_type": chosen(
        {"fp32": unneeded("gradients are reduced in fp32"), "none": unneeded("gradients are reduced in fp32")},
        refused(
            "gradients are reduced in fp32, or in bf16 with precision=bf16_true. Leave it out, or type "
            "precision=bf16_true."
        ),
    ),
    "prescale_gradients gradient_predivide_factor": unneeded(
        "gradients are divided once, by the size of the whole batch"
    ),
    "gradient_allreduce_op": chosen(
        {"mean": unneeded("the mean over the whole batch, as here")},
        refused("the loss is the mean over the whole batch. Scale optim.lr instead."),
    ),
    "sparse_gradients": lacking("gradients are dense. Leave it out."),
    "managed_gradient_accumulation": unneeded("the loop accumulates"),
    "check_overflow bf16.check_grad_overflow": unneeded("every step is checked; on_spike selects the reaction"),
    "data_types.grad_accum_dtype": chosen(
        {"fp32": unneeded("gradients are accumulated in fp32")},
        refused("gradients are accumulated in the weights' dtype. Type precision=bf16_true."),
    ),
    "data_types.*": refused("precision determines the dtypes. Type precision=bf16 or precision=bf16_true."),
    "bf16.immediate_grad_update": unneeded("an implementation detail of gradient copies"),
    "bf16.bf16_master_weights_and_grads": unneeded("covered by bf16.enabled"),
    "bf16.bf16_optimizer_states": lacking(
        "the optimizer state has the weights' dtype. Type precision=bf16_true for both."
    ),
    "fp16": {
        "auto_cast": unneeded("autocast casts the inputs of matrix products"),
        "loss_scale": chosen(
            {0: unneeded("0 means dynamic, as here")},
            refused("dtrain's loss scale is always dynamic. Type precision=bf16, which needs none."),
        ),
        "initial_scale_power": SCALE,
        "loss_scale_window": to("precision.growth", count),
        "hysteresis": chosen({1: unneeded("the first overflow halves the scale, as here")}, refused(HALVES)),
        "consecutive_hysteresis": lacking(HALVES),
        "min_loss_scale": chosen({1: unneeded("1, as here")}, refused("the minimum loss scale is 1. Leave it out.")),
        "fp16_master_weights_and_grads": lacking(
            "fp16 keeps the weights in fp32. Type precision=bf16_true for 16-bit weights."
        ),
    },
    "torch_autocast.lower_precision_safe_modules": unneeded("torch.autocast's own list"),
    "activation_checkpointing": {
        "partition_activations": lacking(
            "activations are not partitioned. Type remat=full, or with mesh.tp tensor.sequence=split."
        ),
        "cpu_checkpointing": NO_ACTIVATION_OFFLOAD,
        "number_checkpoints": lacking(
            "type remat=full, remat=selective, or remat=budget remat.share=0.5 to select the blocks to recompute."
        ),
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile": unneeded(
            "an implementation detail of checkpointing"
        ),
    },
    "pipeline": {
        "partition": chosen(
            {
                "best": unneeded("blocks are split evenly; type pipeline.split=cost to balance their cost"),
                "uniform": says({"pipeline.split": "blocks"}),
                "parameters": says({"pipeline.split": "cost"}, "by the cost of a block"),
            },
            refused("type pipeline.split=[2,1], the number of blocks per stage."),
        ),
        "activation_checkpoint_interval": chosen(
            {0: OFF, 1: says({"remat": "full"})},
            refused("type remat=full, or remat=budget remat.share=0.5 for a share of the blocks."),
        ),
        "seed_layers": unneeded("weights are initialised by name, the same on every mesh"),
        "pipe_partitioned grad_partitioned": unneeded("tensors between stages are not partitioned"),
    },
    "tensor_parallel.**": refused("the model's tp_plan defines how it is split: see docs/own-parts.md."),
    "checkpoint.**": CHECKPOINTS,
    "aio.**": unneeded("an option of offload to disk"),
    "vocabulary_size": unneeded("the model defines it"),
    "use_data_before_expert_parallelism": unneeded("the order of the mesh is fixed"),
    "zero_optimization": ZERO,
    **{name: lacking(why, asked="precision" * (name == "amp")) for name, why in SECTIONS.items()},
    **{f"{name}.**": _section(name, why) for name, why in SECTIONS.items()},
}
RULES = table(KEYS)
