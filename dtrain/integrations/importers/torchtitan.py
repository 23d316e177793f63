"""torchtitan's TOML (until 2026-02), and JSON exported from its later Python configs:
https://github.com/pytorch/torchtitan

    dtrain import llama3_8b.toml to=mine.yaml

Its schedules equal dtrain's at every step: warm-up by (step + 1) / warmup, decay over the last steps of the run.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import terms, trackers
from dtrain.integrations.importers.ledger import Ledger, Rule, count, names, show, whole
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
from dtrain.integrations.importers.torchtitan_optim import DECAY, SCHEDULES, optimizer_section, schedule_section

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


TOKENS = refused("token files are already encoded; data=text takes data.tokenizer=<URL of a tokenizer.json>.")


def translate(ledger: Ledger) -> None:
    for tell in (_mesh, _batch, _model, optimizer_section, schedule_section, _remat, _checkpoint, _precision):
        tell(ledger)
    ledger.apply(RULES)
    ledger.imply({"clip": 1.0, "steps": 10000, "remat": "selective", "compile": "none"}, "default of torchtitan")


def _mesh(ledger: Ledger) -> None:
    """Translate the mesh degrees. A dp_shard of -1 takes the remaining ranks, as strategy=fsdp does."""
    p, asked = "parallelism", {}
    for name, axis in DEGREES.items():
        asked[axis] = ledger.leaves.get(f"{p}.{name}", -1 if axis == "dp_shard" else 1)
        remaining = {-1: unneeded("the remaining ranks: strategy=fsdp")}
        ledger.settle(chosen(remaining, terms.degree(axis)), f"{p}.{name}")
    shards, copies = asked["dp_shard"] != 1, isinstance(asked["dp_replicate"], int) and asked["dp_replicate"] > 1
    strategy = "fsdp"  # also gives dp_shard the ranks that mesh.dp_replicate leaves
    if copies and asked["dp_shard"] != -1:
        strategy = "hsdp" if shards else "ddp"
    ledger.imply({"strategy": strategy}, "implied by torchtitan's degrees")
    for key in ledger.under(f"{p}.pipeline_parallel_schedule"):
        word = SCHEDULES.get(str(ledger.leaves[key]).lower())
        if ledger.words.get("mesh.pp", 1) < 2:
            ledger.skip(key, "pipeline parallelism is off")
        elif word:
            ledger.carry(key, {"pipeline.schedule": word})
        else:
            ledger.refuse(key, f"allowed schedules: {', '.join(SCHEDULES.values())}. Type pipeline.schedule=1f1b.")


def _batch(ledger: Ledger) -> None:
    """Translate the batch sizes. A local batch is a microbatch, or in a pipeline several of them. Later configs count
    tokens."""
    t, stages = "training", ledger.words.get("mesh.pp", 1)
    local, whole_batch = ledger.leaves.get(f"{t}.local_batch_size"), ledger.leaves.get(f"{t}.global_batch_size")
    part_key = "parallelism.pipeline_parallel_microbatch_size"
    part = ledger.leaves.get(part_key, 1)
    if isinstance(local, int) and stages < 2:
        ledger.carry(f"{t}.local_batch_size", {"microbatch": local})
        if whole_batch in (-1, None):
            ledger.imply({"accumulate": 1}, "the global batch is one local batch per rank")
    elif isinstance(local, int) and isinstance(part, int) and part > 0:
        rule = says({"microbatch": part, "accumulate": local // part}, f"{local} samples in microbatches of {part}")
        if isinstance(whole_batch, int) and whole_batch > 0:
            rule = says({"microbatch": part}, "global_batch_size determines how many per step")
        elif local // part < stages:
            _too_few(ledger, local, part, stages)
        if local % part == 0:
            ledger.settle(rule, f"{t}.local_batch_size")
    ledger.settle(unneeded("covered by local_batch_size" if stages > 1 else "pipeline parallelism is off"), part_key)
    if whole_batch == -1:
        ledger.skip(f"{t}.global_batch_size", "local_batch_size x data-parallel ranks")
    elif isinstance(whole_batch, int):
        ledger.carry(f"{t}.global_batch_size", {"batch": whole_batch})
    _tokens(ledger, t, ledger.leaves.get(f"{t}.max_context_length", ledger.leaves.get(f"{t}.seq_len")))
    ledger.settle(terms.SEQUENCE, f"{t}.seq_len", f"{t}.max_context_length")


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
            forwards = ledger.get("parallelism.num_pp_microbatches", 1)
            ledger.imply({"accumulate": forwards}, "one forward per step, or num_pp_microbatches in a pipeline")
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
    name = str(ledger.get("model.name", ledger.get("model_spec.name", "")))
    flavor = str(ledger.get("model.flavor", ledger.get("model_spec.flavor", "")))
    near = ""
    if name.startswith("llama3") and flavor in LLAMA:
        layers, width, heads, hidden = LLAMA[flavor]
        near = (
            f" The same size, but with norms on queries and keys: model=gpt model.layers={layers} model.width={width} "
            f"model.heads={heads} model.kv_heads=8 model.hidden={hidden} model.vocab=128256 model.rope_base=500000."
        )
    title = f"{name} {flavor}".strip() or "a model"
    why = f"only torchtitan can build {title}. Type model._target_=<a torch.nn.Module> trust=[<its package>].{near}"
    ledger.settle(refused(why, "model"), "model.name", "model.flavor", "model_spec", "model_spec.**")
    ledger.settle(when(_is_float8, _float8, NO_CONVERTER), "model.converters")


def _is_float8(ledger: Ledger, key: str, value: Any) -> bool:
    names = value if isinstance(value, list) else [""]
    return bool(names) and all(str(name).startswith(("float8", "quantize.linear.float8")) for name in names)


def _is_qat(ledger: Ledger, key: str, value: Any) -> bool:
    return "qat" in str(value)


def _float8(ledger: Ledger, key: str, value: Any) -> None:
    later, older = ledger.get("quantize.linear.float8.recipe_name"), ledger.get("float8.recipe_name", "tensorwise")
    words = {"precision": "fp8", "precision.recipe": later or older}
    ledger.carry(key, words, "needs torchao and a GPU with fp8")


NO_CONVERTER = when(_is_qat, refused(terms.QAT), lacking("float8 is the only supported converter. Type precision=fp8."))


def _remat(ledger: Ledger) -> None:
    """Translate activation checkpointing: selective by op is remat=selective, every n-th block is remat=budget."""
    p, mode = "activation_checkpoint", str(ledger.get("activation_checkpoint.mode", "selective"))
    option = str(ledger.get(f"{p}.selective_ac_option", "op"))
    rule = says({"remat": mode})
    if mode == "selective" and option.isdecimal() and int(option) > 0:
        share = 1 - 1 / int(option)
        words = {"remat": "budget", "remat.share": share} if share else {"remat": "full"}
        rule = says(words, f"one block of {option} is recomputed")
    elif mode not in ("none", "full", "selective"):
        rule = refused("torch's budget limits memory, dtrain's counts blocks. Type remat=budget remat.share=0.5.")
    ledger.settle(rule, f"{p}.mode")
    ledger.settle(unneeded(f"covered by mode={mode}"), f"{p}.selective_ac_option", f"{p}.memory_budget")


def _checkpoint(ledger: Ledger) -> None:
    """Skip the checkpoint section if checkpoints are off there."""
    if ledger.leaves.get("checkpoint.enable", False) is False:
        off = "checkpoints are off there; dtrain always saves the last step, and by default every 200"
        ledger.settle(unneeded(off), "checkpoint.**")


def _precision(ledger: Ledger) -> None:
    """Choose the precision; torchtitan's default is fp32 weights with bf16 products."""
    dtype, products = ledger.get("training.dtype", "float32"), ledger.get("training.mixed_precision_param", "bfloat16")
    word = PRECISIONS.get((str(dtype), str(products)))
    rule = refused("dtrain has fp32, bf16, and bf16_true with 16-bit weights. Type precision=bf16.", "precision")
    if ledger.words.get("precision") == "fp8" and word == "bf16":
        rule = unneeded("covered by model.converters: everything else is in bf16")
    elif word:
        rule = says({"precision": word})
    ledger.settle(rule, "training.dtype", "training.mixed_precision_param")
    if word:
        ledger.imply({"precision": word}, "default of torchtitan")


PRECISIONS = {
    ("float32", "float32"): "fp32",
    ("float32", "bfloat16"): "bf16",
    ("bfloat16", "bfloat16"): "bf16_true",
}
"""dtypes of the weights and of matrix products -> dtrain's word."""


def of_tp(rule: Rule) -> Rule:
    """Apply a rule only with tensor parallelism."""
    return when(lambda ledger, *_: "mesh.tp" in ledger.words, rule, unneeded("tensor parallelism is off"))


KEYS: Mapping[str, Any] = {
    "parallelism": {
        " ".join(DEGREES): refused(ODD),
        "pipeline_parallel_schedule pipeline_parallel_microbatch_size": refused(ODD),
        "fsdp_reshard_after_forward": chosen(
            {
                "default": says({"strategy.reshard": "forward"}, "torchtitan does not reshard in a pipeline"),
                "always": says({"strategy.reshard": "forward"}),
                "never": says({"strategy.reshard": "never"}),
            },
            refused("type strategy.reshard=forward or never."),
        ),
        "disable_loss_parallel": of_tp(switched(says({"tensor.loss": "whole"}), says({"tensor.loss": "split"}))),
        "enable_sequence_parallel": of_tp(
            switched(says({"tensor.sequence": "split"}), says({"tensor.sequence": "whole"}))
        ),
        "num_pp_microbatches": chosen({1: unneeded("one, as here")}, to("accumulate", count, "microbatches per step")),
        "module_fqns_per_model_part pipeline_parallel_layers_per_stage": lacking(
            "type pipeline.split=[2,1], the number of blocks per stage."
        ),
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers": unneeded(
            "type pipeline.split=cost to account for embedding and head"
        ),
        "pipeline_parallel_schedule_csv": lacking("schedules are selected by name. Type pipeline.schedule=1f1b."),
        "pipeline_parallel_expert_parallel_overlap": unneeded("an implementation detail of expert parallelism"),
        "context_parallel_load_balancer context_parallel_rotate_method context_parallel_ptrr_mask_key": unneeded(
            "ring attention balances causal work"
        ),
        "expert_tensor_parallel_degree": chosen(
            {1: unneeded("one, as here")}, refused("tensor parallelism does not split experts. Leave it out.")
        ),
        "expert_parallel_comm_backend": chosen(
            {"standard": unneeded("all-to-all, as here")},
            refused("dtrain routes tokens by all-to-all. Leave it out."),
        ),
        "enable_fsdp_symm_mem spmd_backend enable_compiled_autograd": unneeded("an option of torchtitan's own FSDP"),
    },
    "parallelism.enable_async_tensor_parallel compile.enable_async_tensor_parallel": lacking(
        "dtrain does not overlap tensor-parallel gathers in pieces. Leave it out."
    ),
    "model": {
        "name flavor": refused(ODD),
        "converters": NO_CONVERTER,
        "hf_assets_path tokenizer_path": TOKENS,
        "print_after_conversion": unneeded("dtrain plan shows the model"),
    },
    "hf_assets_path tokenizer.**": TOKENS,
    "job.dump_folder dump_folder": terms.output,
    "job.description job.print_config job.save_config_file job.config_file debug.print_config "
    "debug.save_config_file": unneeded("config.yaml and plan.yaml are always written"),
    "job.custom_config_module experimental.custom_import experimental.custom_args_module override.**": lacking(
        "a config cannot import code. Type trust=[<your package>] with a _target_ in it."
    ),
    "profiling profiler": {
        "enable_profiling enable_memory_snapshot": terms.NO_PROFILER,
        "*": unneeded("there is no profiler during training"),
    },
    "metrics": {
        "log_freq": to("log.every", count),
        "enable_tensorboard": trackers.tensorboard,
        "enable_wandb": trackers.on("wandb"),
        "*": unneeded("<out>/metrics.jsonl has the rows of all ranks"),
    },
    "optimizer": {
        "name lr beta1 beta2 eps weight_decay": refused(ODD),
        "early_step_in_backward": lacking("the optimizer steps after the whole backward. Leave it out."),
        "implementation": terms.SPEED,
        "optimizer_factory_kwargs_by_name": unneeded("empty"),
        "**": refused("type optim=adamw with its arguments."),
    },
    "lr_scheduler": {"warmup_steps total_steps decay_ratio decay_type min_lr_factor": refused(DECAY)},
    "dataloader.**": refused(terms.NO_DATA),
    "training": {
        "dataset dataset_path": refused(terms.NO_DATA),
        "seq_len dtype mixed_precision_param": refused(ODD),
        "batch_size": to("microbatch", count, "its name in older versions"),
        "warmup_steps": refused(
            "its name in older versions. Did you mean lr_scheduler.warmup_steps? Type schedule.warmup=<steps>.",
            "schedule.warmup",
        ),
        "local_batch_size global_batch_size": refused(
            "not a number of samples. Type microbatch=<number> batch=<number>."
        ),
        "max_norm": to("clip"),
        "steps": to("steps", count),
        "enable_cpu_offload": terms.OFFLOAD,
        "mixed_precision_reduce": chosen(
            {"float32": unneeded("gradients are reduced in fp32")},
            refused("gradients are reduced in the weights' dtype. Leave it out."),
        ),
        "gc_freq gc_debug disable_cuda_graphs": unneeded("the loop runs the garbage collector outside its steps"),
        "dataloader.**": unneeded(
            "a thread prefetches samples; type data=dataset data.workers=<number> for loader processes"
        ),
    },
    "training debug": {"seed": to("seed", whole), "deterministic": terms.DETERMINISTIC},
    "debug.*": lacking("torch chooses the kernels; the same seed gives the same losses up to rounding. Leave it out."),
    "checkpoint": {
        "enable": unneeded("checkpoints are always saved"),
        "interval": to("checkpoint.every", count),
        "keep_latest_k": chosen({0: says({"checkpoint.keep": None}, "0 means all")}, to("checkpoint.keep", count)),
        "async_mode": chosen(
            {"disabled": says({"checkpoint.mode": "blocking"})}, says({"checkpoint.mode": "background"})
        ),
        "initial_load_path": lacking(
            "its names may not be those of the model here. Type init=<that path>, and init_names."
        ),
        "load_step": chosen(
            {-1: unneeded("the newest, as here")},
            refused(
                "a run resumes from its newest valid checkpoint. Type init=<out>/checkpoints/step-... for the weights "
                "of an older one."
            ),
        ),
        "last_save_in_hf last_save_model_only export_dtype folder initial_load_model_only initial_load_in_hf "
        "initial_load_in_hf_quantized": terms.CHECKPOINTS,
        "enable_first_step_checkpoint create_seed_checkpoint load_only enable_ft_dataloader_checkpoints "
        "exclude_from_loading": unneeded("a run resumes automatically; weights are initialised by name"),
    },
    "activation_checkpoint": {
        "mode selective_ac_option": refused(ODD),
        "preserve_rng_state determinism_check debug early_stop visualize_memory_budget_pareto "
        "force_recompute_mm_shapes_by_fqns per_op_sac_force_recompute_mm_shapes_by_fqns": unneeded(
            "recomputation uses the same random numbers and keeps matrix products"
        ),
    },
    "compile": {
        "enable": terms.COMPILE,
        "components": unneeded("dtrain compiles the blocks"),
        "backend": chosen(
            {"inductor": unneeded("inductor, as here")}, refused("inductor compiles the blocks. Type compile=blocks.")
        ),
    },
    "quantize.linear.float8.recipe_name float8.recipe_name": unneeded("covered by model.converters"),
    "quantize.** float8.** mx.**": unneeded("model.converters selects the converter"),
    "comm": {
        "init_timeout_seconds train_timeout_seconds": refused(
            "all collectives share one timeout. Type backend=nccl backend.timeout=600."
        ),
        "mode": chosen(
            {"default": unneeded("real collectives, as here")}, refused("type dtrain plan for a dry run without ranks.")
        ),
        "*": unneeded("failure.json has each rank's last collective"),
    },
    "memory_estimation.**": unneeded("dtrain plan shows the memory per rank"),
    "fault_tolerance.enable": lacking(
        "killed ranks restart automatically. Type checkpoint.memory=1 to keep the state of every step."
    ),
    "fault_tolerance.*": unneeded("an option of torchft"),
    "validation validator": {
        "enable": switched(
            unneeded("held-out samples are always evaluated"),
            says({"evaluate.every": 0}, "the last step is always evaluated"),
        ),
        "freq": when(
            lambda ledger, key, value: bool(ledger.get(f"{key.split('.')[0]}.enable")), to("evaluate.every", count), OFF
        ),
        "**": unneeded("the data provides held-out samples: data.holdout, evaluate.samples"),
    },
    "loss.**": unneeded("next-token cross entropy over the whole batch"),
}
RULES = table(KEYS)
