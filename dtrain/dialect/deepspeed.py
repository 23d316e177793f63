"""DeepSpeed's JSON: https://www.deepspeed.ai/docs/config-json/ and the defaults of 0.19.

dtrain import ds_config.json to=mine.yaml
"""

from typing import Any

from dtrain.dialect.ledger import (
    ODD,
    Ledger,
    Rule,
    chosen,
    count,
    every,
    lacking,
    names,
    number,
    refused,
    says,
    switched,
    to,
    unneeded,
    unread,
    whole,
)  # fmt: skip
from dtrain.dialect.terms import BEHIND, decaying, optimizer

TITLE = "DeepSpeed"
MARKS = names(
    "train_batch_size train_micro_batch_size_per_gpu zero_optimization zero_allow_untested_optimizer "
    "wall_clock_breakdown steps_per_print fp16 bf16 "
    "gradient_clipping zero_force_ds_cpu_optimizer activation_checkpointing prescale_gradients flops_profiler"
)
SILENT = ("model", "data", "steps", "batch", "optim", "schedule")
"""What such a file never says."""

STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
BATCH, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
OURS = {BATCH: "batch", MICRO: "microbatch", ACCUMULATE: "accumulate"}
SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FP16 = (
    "of precision=fp16, should that be typed: its scale then begins at precision.scale and doubles after "
    "precision.growth good steps"
)
LOG = (
    "their warm-up rises with the logarithm of the step, ours in a line. Type schedule.warmup={} for a line of as "
    "many steps, or 0 for none."
)
MEASURED = unneeded("metrics.jsonl has the seconds of every step")
SHARDS = unneeded("a checkpoint is shards that any mesh reads; dtrain checkpoint export writes one file")
MOVES = unneeded("how offloading moves bytes; here FSDP2 does it")


def translate(ledger: Ledger) -> None:
    for tell in (_batch, _zero, _precision, _schedule, _optimizer, _parallel):
        tell(ledger)
    ledger.apply(RULES)
    if "gradient_clipping" not in ledger.leaves:
        ledger.imply({"clip": None}, "DeepSpeed does not clip unless told to")


def _batch(ledger: Ledger) -> None:
    """batch = microbatch x ranks x accumulate: two of the three make the third; a lone one means that nothing is
    accumulated.
    """
    told: dict[str, int] = {}
    said = {key: ledger.leaves[key] for key in OURS if key in ledger.leaves}
    free = 2 - sum(value != "auto" for value in said.values())
    for key, value in said.items():
        if value == "auto" and not ledger.auto and free <= 0:
            ledger.skip(key, "follows from the other two and the ranks")
        if value == "auto":
            free -= 1
        if key not in ledger.open() or unread(ledger, key, value, OURS[key]):
            continue
        try:
            told[key] = count(value)
        except (ValueError, TypeError) as error:
            ledger.refuse(key, f"DeepSpeed takes {error} here, not {value!r}. Type {OURS[key]}=<number>.")
            ledger.ask(OURS[key], "number")
    if len(told) == 3:
        _triple(ledger, *(told[key] for key in OURS))
        return
    for key, value in told.items():
        ledger.carry(key, {OURS[key]: value})
    if len(told) == 1 and not any(key in ledger.leaves for key in OURS if key not in told) and ACCUMULATE not in told:
        ledger.imply({"accumulate": 1}, "DeepSpeed accumulates nothing unless told to")


def _triple(ledger: Ledger, batch: int, micro: int, accumulate: int) -> None:
    if batch % (micro * accumulate):
        for key in OURS:
            ledger.refuse(
                key,
                f"{batch} is not {micro} x {accumulate} x a number of ranks. Type batch=<samples per step> "
                f"microbatch={micro}.",
            )
        return
    ledger.carry(BATCH, {"batch": batch})
    ledger.carry(
        MICRO, {"microbatch": micro}, f"the three numbers mean {batch // micro // accumulate} data-parallel rank(s)"
    )
    ledger.skip(
        ACCUMULATE,
        "follows from batch, microbatch and the ranks; on other ranks it is solved again, and the numbers stay",
    )


def _zero(ledger: Ledger) -> None:
    """The stage is a strategy; what is offloaded lives on the CPU."""
    top = "zero_optimization"
    key = f"{top}.stage"
    if isinstance(ledger.leaves.get(top), bool):  # the oldest files
        ledger.carry(top, {"strategy": "zero1" if ledger.leaves[top] else "ddp"})
        return
    stage = ledger.leaves.get(key, 0)
    if key not in ledger.leaves:
        ledger.imply({"strategy": "ddp"}, "stage 0 unless told otherwise")
    elif not unread(ledger, key, stage, "strategy"):
        if isinstance(stage, bool) or not isinstance(stage, int) or stage not in STAGES:
            ledger.refuse(key, f"there are stages 0 to 3, not {stage!r}. Type strategy=<ddp, zero1, zero2 or zero3>.")
            ledger.ask("strategy")
        else:
            ledger.carry(key, {"strategy": STAGES[stage]})
    for part in ("optimizer", "param"):
        _offload(ledger, f"{top}.offload_{part}", _rests(stage, part))
    for key in ledger.under(f"{top}.cpu_offload", f"{top}.cpu_offload_param"):
        switched(_rests(stage, key.rpartition("_")[2]), unneeded("off, as here"))(ledger, key, ledger.leaves[key])


def _rests(stage: Any, part: str) -> Rule:
    if not isinstance(stage, int) or stage not in (1, 2, 3):
        return refused(
            "nothing is sharded in stage 0, so nothing can be offloaded. Type strategy=zero2 strategy.offload=cpu."
        )
    return says(
        {"strategy.offload": "cpu"},
        "" if part == "param" else "shards of weights and optimizer both rest there; theirs of the optimizer alone",
    )


def _offload(ledger: Ledger, section: str, offload: Rule) -> None:
    disk = refused("there is no offload to disks. Type strategy.offload=cpu for the host's memory, or take more ranks.")
    device = ledger.leaves.get(f"{section}.device")
    for key in ledger.under(section):
        if key == f"{section}.device":
            chosen({"cpu": offload, "none": unneeded("off, as here")}, disk)(ledger, key, device)
        elif device == "nvme" and ledger.leaves[key] is not False:
            disk(ledger, key, device)
        elif key == f"{section}.ratio":
            chosen({1: MOVES}, refused("all shards rest on the CPU, or none. Leave it out."))(
                ledger, key, ledger.leaves[key]
            )


def _precision(ledger: Ledger) -> None:
    """fp16, bf16 or torch_autocast. Weights and optimizer are fp32 here, as DeepSpeed's master weights are."""
    whole_in = ledger.get("bf16.bf16_master_weights_and_grads") is True
    names = {"fp16": "fp16", "bf16": "bf16_true" if whole_in else "bf16", "bfloat16": "bf16"}
    for name, word in names.items():
        key = f"{name}.enabled"
        if key in ledger.leaves and not unread(ledger, key, ledger.leaves[key], "precision"):
            switched(says({"precision": word}), unneeded("off, as here"))(ledger, key, ledger.leaves[key])
    if ledger.get("fp16.enabled") is True or (ledger.auto and ledger.get("fp16.enabled") == "auto"):
        for key in ledger.under("fp16.initial_scale_power"):
            to("precision.scale", lambda power: 2.0 ** whole(power))(ledger, key, ledger.leaves[key])
        ledger.imply({"precision.growth": 1000}, "DeepSpeed doubles the loss scale after 1000 good steps")
    else:
        for key in ledger.under("fp16"):
            if key in RULES:
                ledger.skip(key, "of fp16, which is off" if ledger.get("fp16.enabled") != "auto" else FP16)
    _autocast(ledger)


def _autocast(ledger: Ledger) -> None:
    key, dtype = "torch_autocast.enabled", str(ledger.get("torch_autocast.dtype", "bfloat16"))
    if key not in ledger.leaves:
        return
    word = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype.removeprefix("torch."))
    on = says({"precision": word}) if word else refused(f"no autocast to {dtype}. Type precision=bf16.")
    switched(on, unneeded("off, as here"))(ledger, key, ledger.leaves[key])
    for other in ledger.under("torch_autocast.dtype"):
        ledger.skip(other, "told with torch_autocast.enabled")


def _optimizer(ledger: Ledger) -> None:
    """DeepSpeed's Adam is AdamW unless adam_w_mode is false; its own kernels decay nothing by default."""
    name, params = str(ledger.get("optimizer.type", "")), "optimizer.params"
    if not name or unread(ledger, "optimizer.type", name, "optim"):
        return
    adam = name.lower() in ("adam", "adamw")
    decoupled = name.lower() == "adamw" or ledger.get(f"{params}.adam_w_mode", True) is True
    for key in ledger.under(*(f"{params}.{own}" for own in ("torch_adam", "adam_w_mode", "fp32_optimizer_states"))):
        ledger.skip(key, "which kernel runs; what it computes is told with optimizer.type")
    for key in ledger.under(f"{params}.bias_correction"):
        chosen(
            {True: unneeded("Adam's bias is corrected, as here")},
            refused("Adam's bias is corrected here. Leave it out."),
        )(ledger, key, ledger.leaves[key])
    for key in ledger.under(f"{params}.lr"):
        if "optim.lr" in ledger.words:
            ledger.skip(key, "the scheduler's warmup_max_lr takes its place, as in DeepSpeed")
    own = adam and ledger.get(f"{params}.torch_adam", False) is not True
    optimizer(
        ledger,
        "optimizer.type",
        params,
        ("AdamW" if decoupled else "Adam") if adam else name,
        {"weight_decay": 0.0} if own else None,
    )


def _schedule(ledger: Ledger) -> None:
    """Its schedules by their formulas; total_num_steps are the steps of the run."""
    p, name = "scheduler.params", str(ledger.get("scheduler.type", ""))
    if not name:
        if ledger.get("optimizer.type"):  # else both are made in the script
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
        ledger.skip(f"{p}.warmup_min_lr", "0 is filled in, as here")
    if ledger.leaves.get(f"{p}.total_num_steps") == "auto" and name == "WarmupDecayLR" and not ledger.auto:
        ledger.carry(
            "scheduler.type",
            {"schedule": "wsd", "schedule.floor": 0.0},
            "down in a line, from the end of the warm-up to the end",
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
        f"there is no schedule like {name}. Type schedule=cosine, constant or wsd."
        if shape is None
        else f"{wrong!r} is no number of steps. Type schedule=cosine schedule.warmup=<steps>."
        if wrong is not None
        else "a linear decay needs to know where it ends. Type steps=<all> schedule=wsd schedule.warmup=<some> "
        "schedule.decay=<the others>."
    )
    if shape is None or wrong is not None or (shape == "linear" and "total_num_steps" not in values):
        for key in ledger.under("scheduler.type", p):
            ledger.refuse(key, why)
        ledger.ask("schedule")
    else:
        _warmup(ledger, name, shape, values)


def _warmup(ledger: Ledger, name: str, shape: str, values: dict[str, Any]) -> None:
    """The keys of a schedule that has a counterpart; `values` those that are in the file."""
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
        ledger.ask("schedule.warmup", f"{warm} for a line of as many steps, or 0")
    ledger.carry(
        "scheduler.type", {"schedule": words["schedule"]}, f"without its warm-up: {LOG.format(warm)}" if silent else ""
    )
    lr = values.get("warmup_max_lr", 1e-3 if name == "WarmupDecayLR" else None)
    if lr is not None and "warmup_max_lr" not in values:
        ledger.imply({"optim.lr": lr}, "default of WarmupDecayLR, whatever the optimizer says")
    for part, value in values.items():
        if part == "warmup_num_steps":
            linear = says({"schedule.warmup": warm}, BEHIND if warm else "")
            (refused(LOG.format(warm)) if log and warm > 1 else linear)(ledger, f"{p}.{part}", value)
        elif part == "warmup_type":
            (refused(LOG.format(warm)) if log and warm > 1 else unneeded("a line, as here"))(
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


def _parallel(ledger: Ledger) -> None:
    """Tensor, sequence, pipeline and expert degrees."""
    for key, words in (
        ("tensor_parallel.autotp_size", {"mesh.tp": 0}), ("sequence_parallel_size", {"mesh.cp": 0, "context.attention": "ulysses"}),
        ("pipeline.stages", {"mesh.pp": 0}), ("expert_parallel.autoep_size", {"mesh.ep": 0}),
    ):  # fmt: skip
        value = ledger.leaves.get(key)
        if value == "auto":
            ledger.skip(key, "as many as the ranks that the model's code asks for; type mesh.pp=<stages>")
        elif isinstance(value, int) and value < 2:
            ledger.skip(key, "one, as here")
        elif isinstance(value, int):
            ledger.carry(
                key,
                {word: extra or value for word, extra in words.items()},
                "needs as many ranks, and a model that can be split so",
            )


def _section(name: str, why: str) -> Rule:
    """Of a section that is switched off, nothing is needed; of one that is on, every key is refused."""

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
    "amp": "NVIDIA's amp is gone. Type precision=fp16 or precision=bf16.",
    "sparse_attention": "there is none; write the model with it: model._target_=<yours> trust=[<its package>].",
    "compression_training": "nothing is compressed in training. Compress what dtrain checkpoint export wrote.",
    "data_efficiency": "no curriculum, and no token is dropped. Order the samples in a dataset of your own.",
    "curriculum_learning": "no curriculum. Order the samples in a dataset of your own.",
    "progressive_layer_drop": "no layer is dropped; write the model with it.",
    "autotuning": "dtrain plan compares layouts by arithmetic, and strategy=auto takes the cheapest that fits. Leave "
    "it out.",
    "elasticity": "the batch is the same on any world. Type nodes=1:4 for one to four nodes.",
    "hybrid_engine": "nothing is generated while training goes on.",
    "quantize_training": "weights are not quantised. Type precision=fp8 for products in that type.",
    "weight_quantization": "weights are not quantised. Type precision=fp8 for products in that type.",
    "eigenvalue": "there are no eigenvalues. Leave it out.",
    "nebula": "saves are in the background without it. Leave it out.",
    "comms_logger": "there is no log of collectives; failure.json has the last one of every rank. Leave it out.",
    "flops_profiler": "nothing is profiled while training goes on. Leave it out.",
    "wandb": "metrics.jsonl has every row; for wandb write a logger: logger.wandb._target_=<yours> trust=[<its "
    "package>].",
    "comet": "metrics.jsonl has every row; for Comet write a logger: logger.comet._target_=<yours> trust=[<its "
    "package>].",
    "compile": "there is no DeepCompile. Type compile=blocks.",
    "expert_parallel": "experts are those of model=moe. Type model=moe mesh.ep=2.",
    "zero_optimization.zenflow": "no update is late. Type strategy.offload=cpu.",
}
"""section -> why, and what instead, where it is on."""

ZERO: dict[str, Rule] = {
    **every("stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save elastic_checkpoint", SHARDS),
    **every(
        "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
            "contiguous_gradients round_robin_gradients sub_group_size "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
            "stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
            "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
            "max_reuse_distance module_granularity_threshold "
        "use_all_reduce_for_fetch_params allgather_sequential use_multi_rank_bucket_allreduce compute_grad_norm "
            "ignore_unused_parameters legacy_stage1 "
        "parameter_alignment memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
            "enable_sanity_checks grad_hooks fast_init "
        "save_muon_momentum_buffer_in_memory log_trace_cache_warnings leaf_module.classes leaf_module.names "
            "leaf_module.name_suffixes",
        unneeded("collectives go block by block, beside the computation"),
    ),
    **every("zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights", lacking("weights and gradients travel as they "
        "are. Leave it out.")),
    **every("cpu_offload_use_pin_memory", MOVES),
    **every("offload_optimizer.device offload_optimizer.ratio offload_param.device cpu_offload cpu_offload_param", refused(ODD)),
    **{f"offload_{part}.{name}": MOVES for part in ("optimizer", "param") for name in ["pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "nvme_path", "pipeline_read", "pipeline_write", "cpuadam_cores_perc"]},
    "offload_optimizer.super_offload": lacking("shards rest on the CPU and are brought back for the update. Leave it "
        "out."),
    "load_from_fp32_weights": unneeded("weights at rest are fp32"),
    "zero_hpz_partition_size": chosen({0: unneeded("off, as here"), 1: unneeded("off, as here")}, refused("there are no second shards inside a "
        "node. The nearest: strategy=hsdp nodes=2 devices=8.")),
    "mics_shard_size": chosen({-1: unneeded("off, as here")}, refused("shards inside a group, replicas between "
        "groups: type strategy=hsdp mesh.dp_shard=<size of a group>, with nodes and devices.")),
    "mics_hierarchical_params_gather": unneeded("how MiCS gathers"),
}  # fmt: skip

RULES: dict[str, Rule] = {
    **every(" ".join(OURS), refused(ODD)),
    **every("optimizer.type scheduler.type zero_optimization.stage fp16.enabled bf16.enabled torch_autocast.enabled "
        "torch_autocast.dtype", refused(ODD)),
    **every("tensor_parallel.autotp_size sequence_parallel_size pipeline.stages expert_parallel.autoep_size", refused(ODD)),
    **every("total_num_steps warmup_num_steps warmup_type warmup_max_lr cos_min_ratio", refused(ODD), "scheduler.params"),
    **every("lr betas eps weight_decay torch_adam adam_w_mode bias_correction", refused(ODD), "optimizer.params"),
    "gradient_clipping": chosen({0: says({"clip": None}, "0 means none")}, to("clip", number)),
    "steps_per_print": to("log.every", count),
    "tensorboard.enabled": switched(says({"logger": ["console", "tensorboard"]}), says({"logger": ["console"]})),
    **every("output_path job_name", unneeded("event files are under <out>/tensorboard"), "tensorboard"),
    "csv_monitor.**": unneeded("metrics.jsonl has a row for every step"),
    "dump_state": unneeded("config.yaml and plan.yaml are always written"),
    **every("wall_clock_breakdown memory_breakdown timers.**", MEASURED),
    "log_level": unneeded("there is one level: what a person needs"),
    "dataloader_drop_last": unneeded("samples go on into the next pass: no batch is smaller than another"),
    "disable_allgather": lacking("shards are always gathered. Leave it out."),
    "disable_python_gc": unneeded("the loop keeps the collector out of its steps"),
    "zero_allow_untested_optimizer": unneeded("every optimizer here is tested with every strategy"),
    **every("zero_force_ds_cpu_optimizer optimizer.legacy_fusion", unneeded("which kernel runs")),
    **every(
        "communication_data_type seq_parallel_communication_data_type",
        chosen({"fp32": unneeded("gradients travel in fp32"), "none": unneeded("gradients travel in fp32")}, refused("gradients travel in fp32, or with "
            "precision=bf16_true in bf16. Leave it out, or type precision=bf16_true.")),
    ),
    **every("prescale_gradients gradient_predivide_factor", unneeded("gradients are divided once, by the count of the "
        "whole batch")),
    "gradient_allreduce_op": chosen({"mean": unneeded("the mean over the whole batch, as here")}, refused("the loss is the mean over the whole "
        "batch. Scale optim.lr instead.")),
    "sparse_gradients": lacking("gradients are dense. Leave it out."),
    "managed_gradient_accumulation": unneeded("the loop accumulates"),
    "check_overflow": unneeded("every step is looked at; on_spike says what follows"),
    "data_types.grad_accum_dtype": chosen({"fp32": unneeded("gradients are summed in fp32")}, refused("gradients are summed in the type of "
        "the weights. Type precision=bf16_true.")),
    "data_types.*": refused("types follow from precision. Type precision=bf16 or precision=bf16_true."),
    "bf16.immediate_grad_update": unneeded("how gradients are copied"),
    "bf16.check_grad_overflow": unneeded("every step is looked at; on_spike says what follows"),
    "bf16.bf16_master_weights_and_grads": unneeded("told with bf16.enabled"),
    "bf16.bf16_optimizer_states": lacking("the state has the type of the weights. Type precision=bf16_true for both."),
    "fp16.auto_cast": unneeded("inputs of products are cast"),
    "fp16.loss_scale": chosen({0: unneeded("0 means dynamic, as here")}, refused("the loss scale is dynamic. Type "
        "precision=bf16, which needs none.")),
    "fp16.initial_scale_power": to("precision.scale", lambda power: 2.0 ** whole(power)),
    "fp16.loss_scale_window": to("precision.growth", count),
    "fp16.hysteresis": chosen({1: unneeded("the first overflow halves the scale, as here")}, refused("the first overflow halves the scale; "
        "theirs waits for more. Leave it out.")),
    "fp16.consecutive_hysteresis": lacking("the first overflow halves the scale. Leave it out."),
    "fp16.min_loss_scale": chosen({1: unneeded("1, as here")}, refused("the scale goes down to 1. Leave it out.")),
    "fp16.fp16_master_weights_and_grads": lacking("weights stay in fp32. Type precision=bf16_true for weights of 16 "
        "bits."),
    "torch_autocast.lower_precision_safe_modules": unneeded("torch.autocast's own list"),
    "scheduler.params.last_batch_iteration": chosen({-1: unneeded("from the beginning, as here")}, refused("a run goes on from its own "
        "checkpoint. Leave it out.")),
    **every("warmup_min_lr warmup_min_ratio", lacking("warm-up begins at nothing. Leave it out."), "scheduler.params"),
    "activation_checkpointing.partition_activations": lacking("activations are not shared out. Type remat=full, and "
        "with mesh.tp tensor.sequence=split."),
    "activation_checkpointing.cpu_checkpointing": lacking("activations stay on the device. Type remat=full."),
    "activation_checkpointing.number_checkpoints": lacking("type remat=full, remat=selective, or remat=budget "
        "remat.share=0.5 to say which blocks are computed again."),
    **every("contiguous_memory_optimization synchronize_checkpoint_boundary profile", unneeded("how activations are laid out and timed"), "activation_checkpointing"),
    "pipeline.partition": chosen(
        {"best": unneeded("blocks are shared out evenly; pipeline.split=cost by their work"), "uniform": says({"pipeline.split": "blocks"}), "parameters": says({"pipeline.split": "cost"}, "by the work of a block")},
        refused("type pipeline.split=[2,1]: how many blocks each stage has."),
    ),
    "pipeline.activation_checkpoint_interval": chosen({0: unneeded("off, as here"), 1: says({"remat": "full"})}, refused("type remat=full, or remat=budget "
        "remat.share=0.5 for a share of the blocks.")),
    "pipeline.seed_layers": unneeded("weights are drawn by name, the same on every mesh"),
    **every("pipe_partitioned grad_partitioned", unneeded("what travels between stages is whole"), "pipeline"),
    "tensor_parallel.**": refused("how a model is split is its own tp_plan: see 'To add a model' in the README."),
    "checkpoint.**": SHARDS,
    "aio.**": unneeded("of the offload to disks"),
    "vocabulary_size": unneeded("a model says its own"),
    "use_data_before_expert_parallelism": unneeded("the order of the mesh is fixed"),
    **{f"zero_optimization.{name}": rule for name, rule in ZERO.items()},
    **{name: lacking(why, asked="precision" * (name == "amp")) for name, why in SECTIONS.items()},
    **{f"{name}.**": _section(name, why) for name, why in SECTIONS.items()},
}  # fmt: skip
