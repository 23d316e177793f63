"""DeepSpeed's JSON: https://www.deepspeed.ai/docs/config-json/ and the defaults of 0.19.

dtrain import ds_config.json to=mine.yaml
"""

from typing import Any

from dtrain.dialect.deepspeed_optim import optimizer_section, schedule_section
from dtrain.dialect.deepspeed_zero import SHARDS, ZERO, zero_section
from dtrain.dialect.ledger import Ledger, Rule, count, names, number, whole
from dtrain.dialect.rules import ODD, chosen, every, lacking, refused, says, switched, to, unneeded, unread

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
    "of precision=fp16, should that be typed: its scale then begins at precision.scale and doubles after "
    "precision.growth good steps"
)
MEASURED = unneeded("metrics.jsonl has the seconds of every step")


def translate(ledger: Ledger) -> None:
    for tell in (_batch, zero_section, _precision, schedule_section, optimizer_section, _parallel):
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


def _parallel(ledger: Ledger) -> None:
    """Tensor, sequence, pipeline and expert degrees."""
    for key, words in (
        ("tensor_parallel.autotp_size", {"mesh.tp": 0}),
        ("sequence_parallel_size", {"mesh.cp": 0, "context.attention": "ulysses"}),
        ("pipeline.stages", {"mesh.pp": 0}),
        ("expert_parallel.autoep_size", {"mesh.ep": 0}),
    ):
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


RULES: dict[str, Rule] = {
    **every(" ".join(OURS), refused(ODD)),
    **every(
        "optimizer.type scheduler.type zero_optimization.stage fp16.enabled bf16.enabled torch_autocast.enabled "
        "torch_autocast.dtype",
        refused(ODD),
    ),
    **every(
        "tensor_parallel.autotp_size sequence_parallel_size pipeline.stages expert_parallel.autoep_size", refused(ODD)
    ),
    **every(
        "total_num_steps warmup_num_steps warmup_type warmup_max_lr cos_min_ratio", refused(ODD), "scheduler.params"
    ),
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
        chosen(
            {"fp32": unneeded("gradients travel in fp32"), "none": unneeded("gradients travel in fp32")},
            refused(
                "gradients travel in fp32, or with "
                "precision=bf16_true in bf16. Leave it out, or type precision=bf16_true."
            ),
        ),
    ),
    **every(
        "prescale_gradients gradient_predivide_factor",
        unneeded("gradients are divided once, by the count of the whole batch"),
    ),
    "gradient_allreduce_op": chosen(
        {"mean": unneeded("the mean over the whole batch, as here")},
        refused("the loss is the mean over the whole batch. Scale optim.lr instead."),
    ),
    "sparse_gradients": lacking("gradients are dense. Leave it out."),
    "managed_gradient_accumulation": unneeded("the loop accumulates"),
    "check_overflow": unneeded("every step is looked at; on_spike says what follows"),
    "data_types.grad_accum_dtype": chosen(
        {"fp32": unneeded("gradients are summed in fp32")},
        refused("gradients are summed in the type of the weights. Type precision=bf16_true."),
    ),
    "data_types.*": refused("types follow from precision. Type precision=bf16 or precision=bf16_true."),
    "bf16.immediate_grad_update": unneeded("how gradients are copied"),
    "bf16.check_grad_overflow": unneeded("every step is looked at; on_spike says what follows"),
    "bf16.bf16_master_weights_and_grads": unneeded("told with bf16.enabled"),
    "bf16.bf16_optimizer_states": lacking("the state has the type of the weights. Type precision=bf16_true for both."),
    "fp16.auto_cast": unneeded("inputs of products are cast"),
    "fp16.loss_scale": chosen(
        {0: unneeded("0 means dynamic, as here")},
        refused("the loss scale is dynamic. Type precision=bf16, which needs none."),
    ),
    "fp16.initial_scale_power": to("precision.scale", lambda power: 2.0 ** whole(power)),
    "fp16.loss_scale_window": to("precision.growth", count),
    "fp16.hysteresis": chosen(
        {1: unneeded("the first overflow halves the scale, as here")},
        refused("the first overflow halves the scale; theirs waits for more. Leave it out."),
    ),
    "fp16.consecutive_hysteresis": lacking("the first overflow halves the scale. Leave it out."),
    "fp16.min_loss_scale": chosen({1: unneeded("1, as here")}, refused("the scale goes down to 1. Leave it out.")),
    "fp16.fp16_master_weights_and_grads": lacking(
        "weights stay in fp32. Type precision=bf16_true for weights of 16 bits."
    ),
    "torch_autocast.lower_precision_safe_modules": unneeded("torch.autocast's own list"),
    "scheduler.params.last_batch_iteration": chosen(
        {-1: unneeded("from the beginning, as here")}, refused("a run goes on from its own checkpoint. Leave it out.")
    ),
    **every("warmup_min_lr warmup_min_ratio", lacking("warm-up begins at nothing. Leave it out."), "scheduler.params"),
    "activation_checkpointing.partition_activations": lacking(
        "activations are not shared out. Type remat=full, and with mesh.tp tensor.sequence=split."
    ),
    "activation_checkpointing.cpu_checkpointing": lacking("activations stay on the device. Type remat=full."),
    "activation_checkpointing.number_checkpoints": lacking(
        "type remat=full, remat=selective, or remat=budget remat.share=0.5 to say which blocks are computed again."
    ),
    **every(
        "contiguous_memory_optimization synchronize_checkpoint_boundary profile",
        unneeded("how activations are laid out and timed"),
        "activation_checkpointing",
    ),
    "pipeline.partition": chosen(
        {
            "best": unneeded("blocks are shared out evenly; pipeline.split=cost by their work"),
            "uniform": says({"pipeline.split": "blocks"}),
            "parameters": says({"pipeline.split": "cost"}, "by the work of a block"),
        },
        refused("type pipeline.split=[2,1]: how many blocks each stage has."),
    ),
    "pipeline.activation_checkpoint_interval": chosen(
        {0: unneeded("off, as here"), 1: says({"remat": "full"})},
        refused("type remat=full, or remat=budget remat.share=0.5 for a share of the blocks."),
    ),
    "pipeline.seed_layers": unneeded("weights are drawn by name, the same on every mesh"),
    **every("pipe_partitioned grad_partitioned", unneeded("what travels between stages is whole"), "pipeline"),
    "tensor_parallel.**": refused("how a model is split is its own tp_plan: see docs/own-parts.md."),
    "checkpoint.**": SHARDS,
    "aio.**": unneeded("of the offload to disks"),
    "vocabulary_size": unneeded("a model says its own"),
    "use_data_before_expert_parallelism": unneeded("the order of the mesh is fixed"),
    **{f"zero_optimization.{name}": rule for name, rule in ZERO.items()},
    **{name: lacking(why, asked="precision" * (name == "amp")) for name, why in SECTIONS.items()},
    **{f"{name}.**": _section(name, why) for name, why in SECTIONS.items()},
}
