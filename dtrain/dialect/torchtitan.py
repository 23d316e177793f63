"""torchtitan's TOML (until 2026-02), and JSON exported from its later Python configs:
https://github.com/pytorch/torchtitan

    dtrain import llama3_8b.toml to=mine.yaml

Its schedules equal dtrain's at every step: warm-up by (step + 1) / warmup, decay over the last steps of the run.
"""

from typing import Any

from dtrain.dialect.deepspeed_zero import SHARDS
from dtrain.dialect.ledger import Ledger, Rule, count, names, number, show, whole
from dtrain.dialect.rules import ODD, chosen, every, lacking, refused, says, switched, to, unneeded
from dtrain.dialect.terms import NO_DATA, output
from dtrain.dialect.torchtitan_optim import DECAY, SCHEDULES, optimizer_section, schedule_section

TITLE = "torchtitan"
MARKS = names(
    "job training parallelism activation_checkpoint lr_scheduler metrics profiling comm validation validator "
    "model_spec hf_assets_path dump_folder "
    "data_parallel_shard_degree tensor_parallel_degree pipeline_parallel_degree local_batch_size"
)
SILENT = ("model", "data")
LLAMA = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}
"""flavor -> layers, width, heads, hidden of Llama 3 (arXiv 2407.21783, table 3)."""
DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate", "data_parallel_shard_degree": "dp_shard",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp", "context_parallel_degree": "cp", "expert_parallel_degree": "ep",
}  # fmt: skip


def translate(ledger: Ledger) -> None:
    for tell in (_mesh, _batch, _model, optimizer_section, schedule_section, _remat, _checkpoint, _precision):
        tell(ledger)
    ledger.apply(RULES)
    ledger.imply({"clip": 1.0, "steps": 10000, "remat": "selective", "compile": "none"}, "default of torchtitan")


def _mesh(ledger: Ledger) -> None:
    """Translate the mesh degrees. A dp_shard of -1 takes the remaining ranks, as strategy=fsdp does."""
    asked: dict[str, int] = {}
    for name, axis in DEGREES.items():
        key = f"parallelism.{name}"
        value: Any = ledger.leaves.get(key)
        if key in ledger.leaves and value in (1, -1):
            ledger.skip(key, "one, as here" if value == 1 else "the remaining ranks: strategy=fsdp")
        elif key in ledger.leaves:
            to(f"mesh.{axis}", count)(ledger, key, value)
        unsaid = -1 if name == "data_parallel_shard_degree" else 1
        asked[axis] = value if isinstance(value, int) else unsaid
    shards, copies = asked["dp_shard"] != 1, asked["dp_replicate"] > 1
    strategy = {(True, True): "hsdp", (False, True): "ddp"}.get((bool(shards), bool(copies)), "fsdp")
    ledger.imply({"strategy": strategy}, "implied by torchtitan's degrees")
    if shards and copies and asked["dp_shard"] == -1:
        ledger.words["strategy"] = "fsdp"  # which gives dp_shard the ranks that mesh.dp_replicate leaves
    for key in ledger.under("parallelism.pipeline_parallel_schedule"):
        word = SCHEDULES.get(str(ledger.leaves[key]).lower())
        if asked["pp"] < 2:
            ledger.skip(key, "pipeline parallelism is off")
        elif word:
            ledger.carry(key, {"pipeline.schedule": word})
        else:
            ledger.refuse(key, f"allowed schedules: {', '.join(SCHEDULES.values())}. Type pipeline.schedule=1f1b.")


def _batch(ledger: Ledger) -> None:
    """Translate the batch sizes. A local batch is a microbatch, or in a pipeline several of them. Later configs count
    tokens."""
    t, pp = "training", ledger.words.get("mesh.pp", 1) > 1
    local, whole_, size = (
        ledger.leaves.get(f"{t}.{name}") for name in ("local_batch_size", "global_batch_size", "seq_len")
    )
    if isinstance(local, int) and not pp:
        ledger.carry(f"{t}.local_batch_size", {"microbatch": local})
    elif isinstance(local, int):
        part = ledger.leaves.get("parallelism.pipeline_parallel_microbatch_size", 1)
        if isinstance(whole_, int) and whole_ > 0 and isinstance(part, int) and part > 0 and local % part == 0:
            ledger.carry(
                f"{t}.local_batch_size", {"microbatch": part}, "global_batch_size determines how many per step"
            )
        elif isinstance(part, int) and part > 0 and local // part < ledger.words["mesh.pp"]:
            _too_few(ledger, local, part, ledger.words["mesh.pp"])
        elif isinstance(part, int) and part > 0 and local % part == 0:
            ledger.carry(
                f"{t}.local_batch_size",
                {"microbatch": part, "accumulate": local // part},
                f"{local} samples in microbatches of {part}",
            )
    for key in ledger.under("parallelism.pipeline_parallel_microbatch_size"):
        ledger.skip(key, "covered by local_batch_size" if pp else "pipeline parallelism is off")
    if whole_ == -1:
        ledger.skip(f"{t}.global_batch_size", "local_batch_size x data-parallel ranks")
    elif isinstance(whole_, int):
        ledger.carry(f"{t}.global_batch_size", {"batch": whole_})
    if isinstance(local, int) and whole_ in (-1, None) and not pp:
        ledger.imply({"accumulate": 1}, "the global batch is one local batch per rank")
    _tokens(ledger, t, ledger.leaves.get(f"{t}.max_context_length", size))
    for key in ledger.under(f"{t}.seq_len", f"{t}.max_context_length"):
        to("data.sequence", count, "together with data=..., which you must type", command=True)(
            ledger, key, ledger.leaves[key]
        )


def _too_few(ledger: Ledger, local: int, part: int, stages: int) -> None:
    """Refuse fewer microbatches than stages, which leave ranks idle."""
    ledger.refuse(
        "training.local_batch_size",
        f"{local} samples in microbatches of {part} do not fill {stages} stages. Type microbatch={part} "
        f"accumulate=<{stages} or more>.",
    )
    ledger.imply({"microbatch": part}, "default of torchtitan")
    ledger.ask("accumulate", f"{stages} or more")


def _tokens(ledger: Ledger, t: str, sequence: Any) -> None:
    """Convert the tokens of a forward and of a step into samples."""
    for name, word in (("num_tokens_per_microbatch_per_dp_rank", "microbatch"), ("num_tokens_per_train_step", "batch")):
        key = f"{t}.{name}"
        value = ledger.leaves.get(key)
        if key not in ledger.leaves:
            continue
        if value == -1:
            ledger.skip(key, "one microbatch per rank")
            ledger.imply(
                {"accumulate": ledger.get("parallelism.num_pp_microbatches", 1)},
                "one forward per step, or num_pp_microbatches in a pipeline",
            )
        elif isinstance(value, int) and isinstance(sequence, int) and sequence > 0 and value % sequence == 0:
            ledger.carry(key, {word: value // sequence}, f"samples of {sequence} tokens")
        else:
            ledger.refuse(
                key,
                f"{show(value)} tokens are not a multiple of the sequence length {show(sequence)}. Type "
                f"{word}=<samples>.",
            )


def _model(ledger: Ledger) -> None:
    """Refuse torchtitan's models, which come from its registry; suggest model=gpt in the size of a Llama 3."""
    name, flavor = (
        str(ledger.get("model.name", ledger.get("model_spec.name", ""))),
        str(ledger.get("model.flavor", ledger.get("model_spec.flavor", ""))),
    )
    near = ""
    if name.startswith("llama3") and flavor in LLAMA:
        layers, width, heads, hidden = LLAMA[flavor]
        sizes = (
            f"model.layers={layers} model.width={width} model.heads={heads} model.kv_heads=8 "
            f"model.hidden={hidden} model.vocab=128256 model.rope_base=500000"
        )
        near = f" The same size, but with norms on queries and keys: model=gpt {sizes}."
    for key in ledger.under("model.name", "model.flavor", "model_spec"):
        title = f"{name} {flavor}".strip() or "a model"
        ledger.refuse(
            key,
            f"only torchtitan can build {title}. Type model._target_=<a torch.nn.Module> trust=[<its package>].{near}",
        )
        ledger.ask("model")
    for key in ledger.under("model.converters"):
        value = ledger.leaves[key]
        if (
            isinstance(value, list)
            and value
            and all(str(converter).startswith(("float8", "quantize.linear.float8")) for converter in value)
        ):
            recipe = next(
                (
                    ledger.get(f"{section}.recipe_name")
                    for section in ("quantize.linear.float8", "float8")
                    if ledger.get(f"{section}.recipe_name")
                ),
                "tensorwise",
            )
            ledger.carry(key, {"precision": "fp8", "precision.recipe": recipe}, "needs torchao and a GPU with fp8")
        else:
            lacking("float8 is the only supported converter. Type precision=fp8.")(ledger, key, value)


def _remat(ledger: Ledger) -> None:
    """Translate activation checkpointing: selective by op is remat=selective, every n-th block is remat=budget."""
    p, mode = "activation_checkpoint", str(ledger.get("activation_checkpoint.mode", "selective"))
    option = str(ledger.get(f"{p}.selective_ac_option", "op"))
    for key in ledger.under(f"{p}.mode"):
        if mode == "selective" and option.isdecimal() and int(option) > 0:
            ledger.carry(
                key,
                {"remat": "budget", "remat.share": 1 - 1 / int(option)} if option != "1" else {"remat": "full"},
                f"one block of {option} is recomputed",
            )
        elif mode in ("none", "full", "selective"):
            ledger.carry(key, {"remat": mode})
        else:
            ledger.refuse(
                key, "torch's budget limits memory, dtrain's counts blocks. Type remat=budget remat.share=0.5."
            )
    for key in ledger.under(f"{p}.selective_ac_option", f"{p}.memory_budget"):
        ledger.skip(
            key, f"covered by mode={mode}" if key.endswith("option") or mode != "memory_budget" else "covered by mode"
        )


def _checkpoint(ledger: Ledger) -> None:
    """Skip the checkpoint section if checkpoints are off there."""
    if ledger.leaves.get("checkpoint.enable", False) is False:
        for key in ledger.under("checkpoint"):
            ledger.skip(key, "checkpoints are off there; dtrain always saves the last step, and by default every 200")


def _precision(ledger: Ledger) -> None:
    """Choose the precision; torchtitan's default is fp32 weights with bf16 products."""
    dtype, products = ledger.get("training.dtype", "float32"), ledger.get("training.mixed_precision_param", "bfloat16")
    word = {("float32", "float32"): "fp32", ("float32", "bfloat16"): "bf16", ("bfloat16", "bfloat16"): "bf16_true"}.get(
        (str(dtype), str(products))
    )
    for key in ledger.under("training.dtype", "training.mixed_precision_param"):
        if ledger.words.get("precision") == "fp8" and word == "bf16":
            ledger.skip(key, "covered by model.converters: everything else is in bf16")
        elif word:
            ledger.carry(key, {"precision": word})
        else:
            ledger.refuse(key, "dtrain has fp32, bf16, and bf16_true with 16-bit weights. Type precision=bf16.")
            ledger.ask("precision")
    if word:
        ledger.imply({"precision": word}, "default of torchtitan")


def of_tp(rule: Rule) -> Rule:
    """Apply a rule only with tensor parallelism."""
    return lambda ledger, key, value: (rule if "mesh.tp" in ledger.words else unneeded("tensor parallelism is off"))(
        ledger, key, value
    )


OFF = unneeded("off, as here")
PROFILE = unneeded("there is no profiler during training")
LOADER = unneeded("a thread prefetches samples; type data=dataset data.workers=<number> for loader processes")
TIMES = refused("all collectives share one timeout. Type backend=nccl backend.timeout=600.")
RULES: dict[str, Rule] = {
    **every(" ".join(DEGREES), refused(ODD), "parallelism"),
    **every("model.name model.flavor model.converters optimizer.name optimizer.lr optimizer.beta1 optimizer.beta2 "
        "optimizer.eps optimizer.weight_decay", refused(ODD)),
    **every("training.seq_len training.dtype training.mixed_precision_param activation_checkpoint.mode "
        "activation_checkpoint.selective_ac_option", refused(ODD)),
    **every("parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_microbatch_size", refused(ODD)),
    **every("job.dump_folder dump_folder", output),
    **every("job.description job.print_config job.save_config_file job.config_file debug.print_config "
        "debug.save_config_file", unneeded("config.yaml and plan.yaml are always written")),
    **every("job.custom_config_module experimental.custom_import experimental.custom_args_module override.**",
    lacking("a config cannot import code. Type trust=[<your package>] with a _target_ in it.")),
    **every("profiling.enable_profiling profiler.enable_profiling profiling.enable_memory_snapshot "
        "profiler.enable_memory_snapshot", lacking("there is no profiler during training. Leave it out.")),
    **every("profiling.* profiler.*", PROFILE),
    "metrics.log_freq": to("log.every", count),
    "metrics.enable_tensorboard": switched(says({"logger": ["console", "tensorboard"]}), says({"logger": ["console"]})),
    "metrics.enable_wandb": lacking("metrics.jsonl gets every row. For wandb write a logger: "
        "logger.wandb._target_=<yours> trust=[<its package>]."),
    "metrics.*": unneeded("<out>/metrics.jsonl has the rows of all ranks"),
    **every("model.hf_assets_path model.tokenizer_path hf_assets_path tokenizer.**",
    refused("token files are already encoded; data=text takes data.tokenizer=<URL of a tokenizer.json>.")),
    "model.print_after_conversion": unneeded("dtrain plan shows the model"),
    "optimizer.early_step_in_backward": lacking("the optimizer steps after the whole backward. Leave it out."),
    "optimizer.implementation": unneeded("affects speed only; dtrain uses a fused kernel where available"),
    "optimizer.optimizer_factory_kwargs_by_name": unneeded("empty"),
    "optimizer.**": refused("type optim=adamw with its arguments."),
    **every("warmup_steps total_steps decay_ratio decay_type min_lr_factor", refused(DECAY), "lr_scheduler"),
    **every("training.dataset training.dataset_path training.dataset_path dataloader.**", refused(NO_DATA)),
    **every("training.local_batch_size training.global_batch_size", refused("not a number of samples. Type "
        "microbatch=<number> batch=<number>.")),
    "training.max_norm": to("clip", number),
    "training.steps": to("steps", count),
    "training.enable_cpu_offload": switched(says({"strategy.offload": "cpu"}), OFF),
    "training.mixed_precision_reduce": chosen({"float32": unneeded("gradients are reduced in fp32")},
    refused("gradients are reduced in the weights' dtype. Leave it out.")),
    **every("training.gc_freq training.gc_debug training.disable_cuda_graphs", unneeded("the loop runs the garbage "
    "collector outside its steps")),
    "training.seed": to("seed", whole),
    "training.dataloader.**": LOADER,
    "training.deterministic": lacking(
        "on GPUs type backend=nccl backend.kernels=deterministic; CPU kernels are deterministic."
    ),
    "parallelism.fsdp_reshard_after_forward": chosen({"default": says({"strategy.reshard": "forward"},
    "torchtitan does not reshard in a pipeline"), "always": says({"strategy.reshard": "forward"}),
    "never": says({"strategy.reshard": "never"})}, refused("type strategy.reshard=forward or never.")),
    "parallelism.disable_loss_parallel": of_tp(switched(says({"tensor.loss": "whole"}),
    says({"tensor.loss": "split"}))),
    "parallelism.enable_sequence_parallel": of_tp(switched(says({"tensor.sequence": "split"}),
    says({"tensor.sequence": "whole"}))),
    **every("parallelism.enable_async_tensor_parallel compile.enable_async_tensor_parallel",
    lacking("dtrain does not overlap tensor-parallel gathers in pieces. Leave it out.")),
    "parallelism.num_pp_microbatches": chosen({1: unneeded("one, as here")},
    to("accumulate", count, "microbatches per step")),
    "parallelism.module_fqns_per_model_part": lacking("type pipeline.split=[2,1], the number of blocks per stage."),
    **every("parallelism.pipeline_parallel_first_stage_less_layers "
        "parallelism.pipeline_parallel_last_stage_less_layers", unneeded("type pipeline.split=cost to account for "
        "embedding and head")),
    "parallelism.pipeline_parallel_layers_per_stage": lacking("type pipeline.split=[2,1], the number of blocks per "
    "stage."),
    "parallelism.pipeline_parallel_schedule_csv": lacking("schedules are selected by name. Type "
    "pipeline.schedule=1f1b."),
    "parallelism.pipeline_parallel_expert_parallel_overlap": unneeded("an implementation detail of expert parallelism"),
    **every("parallelism.context_parallel_load_balancer parallelism.context_parallel_rotate_method "
        "parallelism.context_parallel_ptrr_mask_key", unneeded("ring attention balances causal work")),
    "parallelism.expert_tensor_parallel_degree": chosen({1: unneeded("one, as here")},
    refused("tensor parallelism does not split experts. Leave it out.")),
    "parallelism.expert_parallel_comm_backend": chosen({"standard": unneeded("all-to-all, as here")},
    refused("dtrain routes tokens by all-to-all. Leave it out.")),
    **every("parallelism.enable_fsdp_symm_mem parallelism.spmd_backend parallelism.enable_compiled_autograd",
    unneeded("an option of torchtitan's own FSDP")),
    "checkpoint.enable": unneeded("checkpoints are always saved"),
    "checkpoint.interval": to("checkpoint.every", count),
    "checkpoint.keep_latest_k": chosen({0: says({"checkpoint.keep": None}, "0 means all")},
    to("checkpoint.keep", count)),
    "checkpoint.async_mode": chosen({"disabled": says({"checkpoint.mode": "blocking"})},
    says({"checkpoint.mode": "background"})),
    "checkpoint.initial_load_path": lacking("initial weights come from a dtrain run. Type init=<its out>."),
    "checkpoint.load_step": chosen({-1: unneeded("the newest, as here")}, refused("a run resumes from its newest "
    "valid checkpoint. Type init=<out>/checkpoints/step-... for the weights of an older one.")),
    **every("checkpoint.last_save_in_hf checkpoint.last_save_model_only checkpoint.export_dtype checkpoint.folder "
        "checkpoint.initial_load_model_only checkpoint.initial_load_in_hf checkpoint.initial_load_in_hf_quantized",
        SHARDS),
    **every("checkpoint.enable_first_step_checkpoint checkpoint.create_seed_checkpoint checkpoint.load_only "
        "checkpoint.enable_ft_dataloader_checkpoints checkpoint.exclude_from_loading",
        unneeded("a run resumes automatically; weights are initialised by name")),
    **every("preserve_rng_state determinism_check debug early_stop visualize_memory_budget_pareto "
        "force_recompute_mm_shapes_by_fqns per_op_sac_force_recompute_mm_shapes_by_fqns",
        unneeded("recomputation uses the same random numbers and keeps matrix products"), "activation_checkpoint"),
    "compile.enable": switched(says({"compile": "blocks"}), says({"compile": "none"})),
    "compile.components": unneeded("dtrain compiles the blocks"),
    "compile.backend": chosen({"inductor": unneeded("inductor, as here")}, refused("inductor compiles the blocks. "
    "Type compile=blocks.")),
    **every("quantize.linear.float8.recipe_name float8.recipe_name", unneeded("covered by model.converters")),
    **every("quantize.** float8.** mx.**", unneeded("model.converters selects the converter")),
    **every("comm.init_timeout_seconds comm.train_timeout_seconds", TIMES),
    "comm.mode": chosen({"default": unneeded("real collectives, as here")}, refused("type dtrain plan for a dry run "
    "without ranks.")),
    "comm.*": unneeded("failure.json has each rank's last collective"),
    **every("memory_estimation.**", unneeded("dtrain plan shows the memory per rank")),
    "fault_tolerance.enable": lacking("killed ranks restart automatically. Type checkpoint.memory=1 to keep the "
    "state of every step."),
    "fault_tolerance.*": unneeded("an option of torchft"),
    **every("validation.enable validator.enable",
    switched(unneeded("held-out samples are always evaluated"),
    says({"evaluate.every": 0}, "the last step is always evaluated"))),
    **every("validation.freq validator.freq", lambda ledger, key,
    value: (to("evaluate.every", count) if ledger.get(f"{key.split('.')[0]}.enable") else OFF)(ledger, key, value)),
    **every("validation.** validator.**", unneeded("the data provides held-out samples: data.holdout, "
        "evaluate.samples")),
    "debug.seed": to("seed", whole),
    "debug.deterministic": lacking("on GPUs type backend=nccl backend.kernels=deterministic; CPU kernels are "
    "deterministic."),
    "debug.*": lacking("torch chooses the kernels; the same seed gives the same losses up to rounding. Leave it out."),
    **every("loss.**", unneeded("next-token cross entropy over the whole batch")),
}  # fmt: skip
