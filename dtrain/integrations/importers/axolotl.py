"""axolotl's YAML: https://docs.axolotl.ai/docs/config-reference.html and the schema of 0.19.

    dtrain import fft-8b.yaml to=mine.yaml

axolotl fine-tunes transformers models with transformers' Trainer, whose defaults apply where the file has no value.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.config.heads import TASKS
from dtrain.config.period import EPOCH
from dtrain.integrations.importers import accelerate, nested, terms, trackers
from dtrain.integrations.importers.accelerate import SHARDING
from dtrain.integrations.importers.axolotl_adapter import OPTIONS, UNUSED, adapter_section
from dtrain.integrations.importers.axolotl_data import data_section, objective_section
from dtrain.integrations.importers.axolotl_optim import optimizer_section, schedule_section
from dtrain.integrations.importers.ledger import Ledger, Rule, count, names, whole
from dtrain.integrations.importers.rules import (
    ODD,
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
)

TITLE = "axolotl"
MARKS = names(
    "base_model micro_batch_size sequence_len num_epochs learning_rate sample_packing val_set_size datasets adapter "
    "lora_r load_in_8bit load_in_4bit "
    "train_on_inputs dataset_prepared_path evals_per_epoch saves_per_epoch gradient_checkpointing flash_attention"
)
SILENT = ("data",)
TOKENS = "a tokenizer option. Apply it to the files that data.tokenizer names."
REWARDS = (
    "of preference training dtrain has dpo, ipo and hinge. Type objective=dpo, or write your own objective: "
    "objective._target_=<yours> trust=[<its package>]."
)


DEFAULT = "default of axolotl"
TOGETHER = "together with data=..., which you must type"
ATTENTION = unneeded("torch's attention picks the fastest available kernel")


def translate(ledger: Ledger) -> None:
    sections = (adapter_section, _steps, _precision, _model, optimizer_section, schedule_section, _shards)
    for tell in (*sections, objective_section, data_section, _stop):
        tell(ledger)
    ledger.apply(RULES)
    ledger.imply({"clip": 1.0, "seed": 42}, "default of transformers' Trainer")


def _steps(ledger: Ledger) -> None:
    """Translate the length of the run, where max_steps overrides the epochs, and the samples of a step."""
    if ledger.get("max_steps") and ledger.leaves["max_steps"] != -1:
        ledger.settle(to("steps", count), "max_steps")
        ledger.settle(unneeded("max_steps ends the run"), "num_epochs")
    else:
        ledger.settle(given(terms.passes), "num_epochs")
        ledger.imply({"epochs": 1}, DEFAULT)
    batch, micro, parts = (ledger.get(key) for key in ("batch_size", "micro_batch_size", "gradient_accumulation_steps"))
    if batch is not None and parts is not None:
        ledger.settle(unneeded("gradient_accumulation_steps takes precedence"), "batch_size")
    elif isinstance(batch, int) and isinstance(micro, int) and micro > 0:
        ledger.settle(says({"accumulate": max(1, batch // micro)}, "batch_size / micro_batch_size"), "batch_size")
    ledger.imply({"microbatch": 1, "accumulate": 1}, DEFAULT)


def _precision(ledger: Ledger) -> None:
    """Choose the precision: axolotl's bf16 also loads bf16 weights, unless FSDP or DeepSpeed keep them in fp32, as peft
    keeps an adapter.
    """
    sharded = (
        ledger.get("deepspeed") or ledger.get("fsdp") or any(key.startswith("fsdp_config") for key in ledger.leaves)
    )
    adapter = ledger.get("adapter") and ledger.get("peft_autocast_adapter_dtype", True)
    words = {
        "bf16": "bf16" if sharded or adapter else "bf16_true",
        "bfloat16": "bf16_true",
        "fp16": "fp16",
        "float32": "fp32",
    }
    if ledger.get("fp16") is True and ledger.get("bf16") in ("auto", True):
        first, second = ("bf16", "fp16") if ledger.get("bf16") is True else ("fp16", "bf16")
        ledger.settle(unneeded(f"{first} takes precedence"), second)
    if "bf16" not in ledger.leaves:
        ledger.imply({"precision": words["bf16"]}, "default of axolotl, on a GPU that supports it")
    if "precision" not in ledger.words and ledger.get("bf16") not in ("auto", True, "full"):
        ledger.settle(lacking("Type precision=fp16, whose weights are in fp32.", asked="precision"), "float16")
    ledger.settle(unneeded("bf16 takes precedence"), "float16")
    for key, word in words.items():
        value = ledger.leaves.get(key)
        if key in ledger.open() and value in (True, "true", "auto", "full"):
            notes = ["auto: on a GPU that supports it"] * (value == "auto")
            notes += ["axolotl loads the weights in bf16 too"] * (word == "bf16_true")
            notes += ["peft keeps the adapter in fp32; bf16_true takes half the memory"] * bool(adapter and not sharded)
            ledger.carry(key, {"precision": word}, "; ".join(notes))
        else:
            ledger.settle(lacking("type precision=bf16 or precision=fp16.", asked="precision"), key)


def _model(ledger: Ledger) -> None:
    """Translate the model: a class of transformers with pretrained weights."""
    kind = str(ledger.get("model_type", ledger.get("type_of_model", "AutoModelForCausalLM")))
    task, base = TASKS.get(kind.rpartition("For")[2]), ledger.get("base_model")
    if task is None or base is None:
        target = f"model._target_=transformers.{kind}.from_pretrained" if kind.isidentifier() else "model._target_=<it>"
        why = f"unknown model class {kind}. Type model=hf for its class, or {target} trust=[transformers]."
        ledger.settle(refused(why), "base_model")
        ledger.ask("model")
        return
    revision = ledger.get("revision_of_model", ledger.get("model_revision"))
    place = f"{base}@{revision}" if revision else str(base)
    ledger.carry("base_model", {"model": "hf", "model.name": place, "model.task": task})
    ledger.settle(says({"model.name": place}), "model_revision", "revision_of_model")
    ledger.settle(unneeded("config.json of base_model says it"), "model_type", "type_of_model")
    ledger.settle(switched(says({"model.weights": "random"}), OFF), "reinit_weights")
    for name in ("overrides_of_model_config", "model_config"):
        entries = ledger.tree.get(name)
        if isinstance(entries, Mapping) and entries:
            ledger.settle(says({"model.config": dict(entries)}), f"{name}.**")


def _stop(ledger: Ledger) -> None:
    """Translate early stopping, which counts evaluations here too."""
    metric = ledger.get("metric_for_best_model", "loss")
    if not ledger.get("early_stopping_patience") or not ledger.get("val_set_size"):
        return
    if metric in ("loss", "eval_loss") and not ledger.get("greater_is_better"):
        ledger.settle(to("stop.patience", count, further={"stop.metric": "eval_loss"}), "early_stopping_patience")
    else:
        why = f"{metric} is a figure of axolotl. Type stop.metric=<a figure of the evaluation> stop.patience=<number>."
        ledger.settle(refused(why), "early_stopping_patience")


def _shards(ledger: Ledger) -> None:
    """Choose the strategy: DeepSpeed from its file, FSDP from Accelerate's keys, else DDP."""
    if ledger.get("deepspeed"):
        if isinstance(ledger.leaves["deepspeed"], str):
            nested(ledger, "deepspeed", "deepspeed", auto="axolotl's own keys")
        return
    keys = ledger.under("fsdp", "fsdp_config", "fsdp_version")
    on = [key for key in keys if ledger.leaves[key] not in (None, [], {}, "")]
    for key in on:
        name = key.removeprefix("fsdp_config.").removeprefix("fsdp_")
        if name in FSDP:
            ledger.settle(FSDP[name], key)
    if on:
        ledger.imply({"strategy": "fsdp"}, "fsdp is configured")
    else:
        ledger.imply({"strategy": "ddp"}, "one process per GPU, each with a full replica")


def _kinds(ledger: Ledger, key: str, value: Any) -> None:
    """Translate the list `fsdp`, which holds the sharding among other options."""
    kinds = [part for part in (value if isinstance(value, list) else [value]) if str(part).lower() in SHARDING]
    if kinds:
        ledger.carry(key, SHARDING[str(kinds[0]).lower()], "dtrain finds the blocks itself")


FSDP: Mapping[str, Rule] = {
    **accelerate.FSDP,
    "fsdp": _kinds,
    "sharding_strategy": accelerate.sharding,
    "reshard_after_forward": switched(says(SHARDING["full_shard"]), says(SHARDING["shard_grad_op"])),
    "final_state_dict_type": unneeded("dtrain checkpoint export writes one file"),
    "mixed_precision_policy": unneeded("precision determines the dtypes"),
    "cpu_offload_pin_memory": unneeded("an implementation detail of offloading"),
}


def per_epoch(word: str) -> Rule:
    """Refuse a frequency per epoch, since the file does not give the samples of an epoch."""
    never = says({word: 0}, "only the last step")
    once = says({word: EPOCH})
    return chosen({0: never, 1: once}, terms.of_samples(word, lambda value: f"samples / batch / {value}"))


def counted_by(word: str, never: str) -> Rule:
    """Translate what an interval counts: steps, epochs, or nothing."""
    return chosen({"steps": unneeded(f"{word} counts steps"), "no": says({word: 0}, never)}, terms.epochs(word))


def _holdout(ledger: Ledger, key: str, value: Any) -> None:
    """Carry a fraction of held-out samples; refuse a number of them."""
    word = "data.holdout"
    if isinstance(value, int | float) and 0 <= value < 1:
        ledger.carry(key, {word: str(value)}, command=True)
    else:
        ledger.refuse(
            key, f"dtrain takes a fraction of the samples here, not a number. Type {word}=<{value} / samples>."
        )


LORA = (
    "adapter lora_model_dir lora_r lora_alpha lora_dropout lora_target_modules lora_target_linear peft peft.** "
    "peft_use_dora peft_use_rslora peft_layers_to_transform " + " ".join(f"{name} {name}.**" for name in OPTIONS)
)
RELORA = (
    "relora relora_prune_ratio relora_prune_method relora_cpu_offload relora_steps relora_warmup_steps "
    "relora_anneal_steps"
)
MESH: Mapping[str, str] = {
    "dp_shard_size": "dp_shard",
    "dp_replicate_size": "dp_replicate",
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
    "sequence_parallel_degree": "cp",
}

KEYS: Mapping[str, Any] = {
    "base_model bf16 fp16 bfloat16 float32 optimizer adam_beta1 adam_beta2 adam_epsilon lr_scheduler "
    "warmup_steps warmup_ratio": refused(ODD),
    "cosine_min_lr_ratio deepspeed fsdp fsdp_config fsdp_version fsdp_config.** fsdp.**": lacking(ODD),
    **{key: terms.degree(axis) for key, axis in MESH.items()},
    "heads_k_stride ring_attn_func": unneeded("an implementation detail of ring attention"),
    "output_dir": terms.output,
    "micro_batch_size": to("microbatch", count),
    "batch_size": refused("Type batch=<samples of a step over all ranks>.", "batch"),
    "eval_batch_size": unneeded("evaluation uses the microbatch size"),
    "gradient_accumulation_steps": to("accumulate", count),
    "num_epochs": terms.passes,
    "max_steps": chosen({-1: unneeded("no limit"), 0: unneeded("no limit")}, to("steps", count)),
    "learning_rate": to("optim.lr"),
    "weight_decay": to("optim.weight_decay"),
    "max_grad_norm": to("clip"),
    "seed": to("seed", whole),
    "sequence_len": terms.SEQUENCE,
    "eval_sequence_len": refused("evaluation uses the same sequence length. Leave it out."),
    "val_set_size": _holdout,
    "datasets datasets.**": refused(terms.NO_DATA),
    "test_datasets test_datasets.**": refused(
        "rows to evaluate beside those of data.holdout are sets. Type evaluate.sets={test: {path: <the file>}}."
    ),
    "pretraining_dataset pretraining_dataset.**": refused(
        "type data=text data.path=<files> data.column=<column> data.tokenizer=<tokenizer.json>, which puts texts "
        "behind one another, or data=stream."
    ),
    "chat_template chat_template_jinja chat_template_kwargs.** default_system_message eot_tokens "
    "special_tokens.** tokens tokens.** added_tokens_overrides.**": lacking(TOKENS),
    "tokenizer_config tokenizer_use_mistral_common processor_type processor_kwargs.**": lacking(TOKENS),
    "sample_packing": switched(to("data.packing", lambda value: "pack", TOGETHER, command=True), OFF),
    "pretraining_sample_concatenation batch_flattening multipack_real_batches streaming": lacking(
        "with data=chat, jsonl, parquet or hf type data.packing=pack; data=text and data=tokens have no padding."
    ),
    "eval_sample_packing sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
    "pad_to_sequence_len pad_to_multiple_of excess_length_strategy min_sample_len": unneeded(
        "an option of the data, which you must type"
    ),
    "train_on_inputs": switched(to("data.train_on", lambda value: "all", TOGETHER, command=True), OFF),
    "group_by_length": lacking("with data=chat type data.padding=longest data.bucket=50."),
    "shuffle_merged_datasets shuffle_before_merging_datasets curriculum_sampling": unneeded(
        "samples are shuffled with the seed"
    ),
    "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory dataset_shard_num "
    "dataset_shard_idx skip_prepare_dataset dataset_exact_deduplication remove_unused_columns "
    "push_dataset_to_hub": unneeded("an option of axolotl's data preparation"),
    "dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last": unneeded(
        "samples are prefetched, and batches continue into the next epoch"
    ),
    "dataloader_num_workers": lacking("type data.workers=<number> for data=dataset or data=images."),
    LORA: UNUSED,
    RELORA: lacking("dtrain does not merge adapters as it trains. Leave it out."),
    "special_tokens.pad_token": unneeded("padding does not count"),
    "tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files": unneeded(
        "data.tokenizer reads the files of the tokenizer"
    ),
    "load_in_8bit load_in_4bit gptq": lacking(
        "dtrain does not quantise weights. Type precision=bf16_true for 16-bit weights."
    ),
    "qat.** quantization.**": refused(terms.QAT),
    "unfrozen_parameters freeze_mm_modules": lacking(
        "type model.freeze=[<patterns of names>], which names what is not trained."
    ),
    "rl reward_model process_reward_model trl.** dpo_beta dpo_label_smoothing dpo_loss_type "
    "dpo_loss_weights orpo_alpha rl_beta rpo_alpha kto_desirable_weight kto_undesirable_weight "
    "simpo_gamma cpo_alpha": lacking(REWARDS),
    "dpo_use_logits_to_keep dpo_padding_free precompute_ref_log_probs": unneeded("affects memory only"),
    "dpo_norm_loss dpo_use_weighting dpo_generate_during_eval": lacking(
        "objective=dpo does not have it. Leave it out."
    ),
    "gradient_checkpointing": terms.REMAT,
    "gradient_checkpointing_kwargs.**": unneeded("an implementation detail; results are the same"),
    "activation_offloading layer_offloading": terms.NO_ACTIVATION_OFFLOAD,
    "tf32": lacking(
        "in place of precision=fp32 type precision=tf32; bf16 and fp16 leave few products of fp32.", "auto"
    ),
    "fp8": terms.FP8,
    "flash_attention sdp_attention xformers_attention flex_attention sage_attention eager_attention "
    "s2_attention flash_attn_cross_entropy flash_attn_fuse_mlp flash_attn_rms_norm attn_implementation": ATTENTION,
    "plugins liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy "
    "liger_cross_entropy cut_cross_entropy chunked_cross_entropy unsloth_cross_entropy_loss": lacking(
        "third-party kernels are not supported. Type compile=blocks."
    ),
    "torch_compile": terms.COMPILE,
    "torch_compile_backend torch_compile_mode": unneeded("inductor compiles the blocks"),
    "trust_remote_code": lacking(
        "dtrain does not run code from the Hub. Install the model's package and name its class: "
        "model._target_=<it> trust=[<its package>]."
    ),
    "base_model_config cls_model_config": refused("model.name names the folder of config.json and of the weights."),
    "model_revision revision_of_model model_type type_of_model": refused("type model=hf model.name=<name>@<revision>."),
    "overrides_of_model_config.** model_config.** overrides_of_model_kwargs.** resize_token_embeddings_to_32x "
    "reinit_weights": lacking("type entries of config.json as model.config={<name>: <value>}."),
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
    "low_cpu_mem_usage device_map device max_memory gpu_memory_limit": unneeded(
        "the strategy determines where the weights are placed"
    ),
    "logging_steps": to("log.every", count),
    "eval_steps": to("evaluate.every", count),
    "save_steps": to("checkpoint.every", count),
    "save_total_limit": to("checkpoint.keep", count),
    "evals_per_epoch": per_epoch("evaluate.every"),
    "saves_per_epoch": per_epoch("checkpoint.every"),
    "eval_strategy": counted_by("evaluate.every", "the last step is always evaluated"),
    "save_strategy": counted_by("checkpoint.every", "the last step is always saved"),
    "save_first_step": lacking("checkpoint.every determines the first save. Leave it out."),
    "load_best_model_at_end": terms.best,
    "metric_for_best_model greater_is_better": unneeded("an option of load_best_model_at_end"),
    "early_stopping_patience": lacking("type stop.metric=eval_loss stop.patience=<number>, and data.holdout=<part>."),
    "loss_watchdog_threshold loss_watchdog_patience": lacking("type on_spike=stop to stop at a NaN loss or a jump."),
    "save_safetensors save_only_model": unneeded("checkpoints are safetensors and contain the full state"),
    "resume_from_checkpoint auto_resume_from_checkpoints": unneeded("resume=auto resumes automatically"),
    "hub_model_id hub_strategy hub_revision hf_use_auth_token": lacking(
        "type dtrain checkpoint export out=<run> to=hf://<organisation>/<name> after training."
    ),
    "use_wandb": trackers.on("wandb"),
    "wandb_project": trackers.argument("wandb", "project", "use_wandb"),
    "wandb_entity": trackers.argument("wandb", "entity", "use_wandb"),
    "wandb_name": trackers.argument("wandb", "name", "use_wandb"),
    "wandb_mode": trackers.mode("wandb"),
    "wandb_watch": trackers.WATCH,
    "wandb_run_id": lacking("a run has an id of its own, which it keeps. Leave it out."),
    "wandb_log_model": lacking("weights are not sent. Type logger.wandb.artifacts=best for the URL of a checkpoint."),
    "use_mlflow": trackers.on("mlflow"),
    "mlflow_tracking_uri": trackers.argument("mlflow", "uri", "use_mlflow"),
    "mlflow_experiment_name": trackers.argument("mlflow", "experiment", "use_mlflow"),
    "mlflow_run_name": trackers.argument("mlflow", "name", "use_mlflow"),
    "use_comet": trackers.on("comet"),
    "comet_api_key": trackers.KEY,
    "comet_workspace": trackers.argument("comet", "workspace", "use_comet"),
    "comet_project_name": trackers.argument("comet", "project", "use_comet"),
    "use_trackio": trackers.on("trackio"),
    "trackio_project_name": trackers.argument("trackio", "project", "use_trackio"),
    "use_tensorboard": trackers.on("tensorboard"),
    "neftune_noise_alpha noisy_embedding_alpha": terms.CHANGES_LOSS,
    "embedding_lr embedding_lr_scale lr_quadratic_warmup lr_groups "
    "cosine_constant_lr_ratio lr_scheduler_kwargs lr_scheduler_kwargs.** optim_args.** optim_args auto_find_batch_size "
    "optim_target_modules": lacking("dtrain has no equivalent. Leave it out, or write your own component."),
    "ddp_find_unused_parameters": unneeded("unused parameters are allowed"),
    "ddp_bucket_cap_mb": to("strategy.bucket_mb", count),
    "ddp ddp_timeout ddp_broadcast_buffers local_rank world_size": unneeded(
        "the launcher sets it; backend.timeout is 600 s"
    ),
    "gc_steps gc_collect_steps torch_empty_cache_steps strict axolotl_config_path include_tokens_per_second "
    "include_tkps profiler_steps profiler_steps_start use_ray": unneeded("an option of axolotl's own loop"),
    "debug": unneeded("dtrain always reports the rank that hangs or fails"),
}
RULES = table(KEYS)
