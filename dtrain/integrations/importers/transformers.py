"""Hugging Face's Trainer and TRL: arguments of TrainingArguments, of Seq2SeqTrainingArguments, SFTConfig and DPOConfig,
and of LoraConfig in a Python file, of which no line is run, or the first as YAML or JSON:
https://huggingface.co/docs/transformers/main_classes/trainer

    dtrain import train.py to=mine.yaml

The model is that of `from_pretrained` or of TRL's trainers. The data is made by code, and typed.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.integrations.importers import nested, terms, trackers
from dtrain.integrations.importers.axolotl import FSDP
from dtrain.integrations.importers.axolotl_adapter import REFUSED
from dtrain.integrations.importers.ledger import Code, Ledger, Rule, count, names, positive, show, text, whole
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
)
from dtrain.integrations.importers.terms import CLIP, passes
from dtrain.integrations.importers.transformers_adapter import OF_TRL, TRL, adapter_section, class_of, precision_section
from dtrain.integrations.importers.transformers_model import model_section
from dtrain.integrations.importers.transformers_optim import TRAINER, optimizer_section
from dtrain.integrations.importers.transformers_trainer import (
    PACKING,
    PROMPTS,
    SECTION,
    SEQUENCE,
    WITH,
    trainer_section,
)

TITLE = "Hugging Face's Trainer"
MARKS = names(
    "TrainingArguments Seq2SeqTrainingArguments SFTConfig DPOConfig predict_with_generate "
    "per_device_train_batch_size per_device_eval_batch_size num_train_epochs "
    "lr_scheduler_type do_train do_eval report_to eval_strategy evaluation_strategy save_strategy logging_strategy "
    "model_name_or_path dataset_name dataset_config dataset_train_split dataset_test_split assistant_only_loss packing "
    "completion_only_loss learning_rate gradient_checkpointing lora_r load_in_8bit load_in_4bit use_peft model_revision"
)
SILENT = ("data", "model")
RATES = {"TrainingArguments": 5e-5, "Seq2SeqTrainingArguments": 5e-5, "SFTConfig": 2e-5, "DPOConfig": 1e-6}
"""Class -> its default of learning_rate."""
CODE = "the data is made by code. Type data=chat data.path=<rows> data.tokenizer=<name>, or another word for data."


def translate(ledger: Ledger) -> None:
    named = next((name for name in RATES if any(key.startswith(f"{name}.") for key in ledger.leaves)), "")
    t = f"{named}." * bool(named)
    kind = named or class_of(ledger)
    for tell in (model_section, adapter_section):
        tell(ledger)
    for tell_of in (_computed, _steps):
        tell_of(ledger, t)
    precision_section(ledger, t, kind)
    _objective(ledger, t, kind)
    for tell_of in (optimizer_section, _shards):
        tell_of(ledger, t)
    ledger.settle(terms.best, f"{t}load_best_model_at_end")
    trainer_section(ledger, t)
    if kind in OF_TRL:
        ledger.settle(_remat, f"{t}gradient_checkpointing")
        ledger.imply({"remat": "full"}, TRAINER)
    hidden = [key for key in ledger.open() if key.startswith(f"{t}**")]
    ledger.settle(refused("these arguments are not in this file. Type the equivalent words."), *hidden)
    ledger.apply({f"{t}{name}": rule for name, rule in RULES.items()} | {"LoraConfig.**": REFUSED})
    if hidden:
        for word in ("precision", "optim.lr", "steps"):
            if word not in ledger.words or word in ledger.implied:
                ledger.ask(word)
    if kind in RATES:
        ledger.imply({"optim.lr": RATES[kind]}, TRAINER)
    elif "optim.lr" not in ledger.words:
        ledger.ask("optim.lr")
    ledger.imply({"microbatch": 8, "accumulate": 1, "clip": 1.0, "seed": 42}, TRAINER)
    if "steps" not in ledger.words and not ledger.asks("steps"):
        ledger.imply({"epochs": 3}, TRAINER)


ASKED = {
    "learning_rate": "optim.lr", "max_steps": "steps", "num_train_epochs": "epochs",
    "per_device_train_batch_size": "microbatch",
    "gradient_accumulation_steps": "accumulate", "weight_decay": "optim.weight_decay", "max_grad_norm": "clip",
    "seed": "seed", "lr_scheduler_type": "schedule", "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup", "optim": "optim", "adam_beta1": "optim.betas", "adam_beta2": "optim.betas",
    "adam_epsilon": "optim.eps", "adafactor": "optim", "per_gpu_train_batch_size": "microbatch",
    "bf16": "precision", "fp16": "precision",
}  # fmt: skip
"""Argument -> the word that is asked for where Python computes the argument."""


def _computed(ledger: Ledger, t: str) -> None:
    """Ask for what Python computes, so that no default takes its place."""
    for name, word in ASKED.items():
        called = ledger.under(f"{t}{name}.class_path", f"{t}{name}.init_args")
        for key in [*called, *([f"{t}{name}"] if isinstance(ledger.get(f"{t}{name}"), Code) else [])]:
            ledger.refuse(key, f"{Code.why}. Type {word}=<value>.")
            ledger.ask(word)


def _steps(ledger: Ledger, t: str) -> None:
    """max_steps, if set, overrides the epochs."""
    most = ledger.leaves.get(f"{t}max_steps")
    if ledger.asks("steps"):
        ledger.settle(unneeded("max_steps ends the run"), f"{t}num_train_epochs")
    if isinstance(most, int) and not isinstance(most, bool) and most > 0:
        ledger.settle(to("steps", count), f"{t}max_steps")
        ledger.settle(unneeded("max_steps ends the run"), f"{t}num_train_epochs")


CHANGING = (
    "label_smoothing_factor neftune_noise_alpha rpo_alpha loss_weights ld_alpha use_weighting sync_ref_model "
    "router_aux_loss_coef"
)


def _objective(ledger: Ledger, t: str, kind: str) -> None:
    """Translate the losses of TRL, and what it makes of rows."""
    ledger.settle(terms.CHANGES_LOSS, *(f"{t}{name}" for name in CHANGING.split()))
    if kind == TRL:
        ledger.ask("objective", "next_token, or dpo")
        for name, word in (("beta", "objective.beta"), ("loss_type", "objective.loss")):
            if ledger.get(name) is not None:
                ledger.ask(word, f"{show(ledger.leaves[name])} with dpo")
    by_name = ledger.get(f"{SECTION}.class") == "DPOTrainer"
    ledger.settle(says({"objective": "dpo"}), *[f"{SECTION}.class"] * by_name)
    if kind == "DPOConfig" or by_name:
        for prefix in (t, *[f"{SECTION}."] * by_name):
            _dpo(ledger, prefix)
    elif kind == "SFTConfig":
        answers = ledger.get(f"{t}assistant_only_loss") is True or ledger.get(f"{t}completion_only_loss") is True
        rule = switched(to("data.train_on", lambda value: "answers", WITH, command=True), unneeded("see data.train_on"))
        ledger.settle(given(rule), f"{t}assistant_only_loss", f"{t}completion_only_loss")
        ledger.settle(given(chosen({"nll": OFF, "chunked_nll": OFF}, terms.CHANGES_LOSS)), f"{t}loss_type")
        if not answers:
            ledger.command["data.train_on"] = "<all of messages, answers of rows with prompt and completion>"
    if kind in OF_TRL:
        ledger.settle(SEQUENCE, f"{t}max_length", f"{t}max_seq_length")
        ledger.command.setdefault("data.sequence", "1024")


def _dpo(ledger: Ledger, t: str) -> None:
    """Translate the arguments of DPOConfig, or of the DPOTrainer of older versions."""
    losses = ledger.get(f"{t}loss_type", "sigmoid")
    (loss, *more) = losses if isinstance(losses, list) and losses else [losses]
    if loss in ("sigmoid", "hinge", "ipo") and not more:
        ledger.settle(says({"objective.loss": loss}), f"{t}loss_type")
    else:
        ledger.settle(refused("dtrain has sigmoid, hinge and ipo.", "objective.loss"), f"{t}loss_type")
    ledger.settle(given(to("objective.beta", positive)), f"{t}beta")
    ledger.settle(given(to("objective.label_smoothing")), f"{t}label_smoothing")
    ledger.imply({"objective": "dpo", "objective.beta": 0.1}, TRAINER)


def _shards(ledger: Ledger, t: str) -> None:
    """Choose the strategy: DeepSpeed from its file, FSDP from its arguments, else DDP."""
    if isinstance(ledger.get(f"{t}deepspeed"), str) and not isinstance(ledger.leaves[f"{t}deepspeed"], Code):
        nested(ledger, f"{t}deepspeed", "deepspeed", auto="the other arguments")
        return
    kinds = ledger.get(f"{t}fsdp")
    listed = kinds.split() if isinstance(kinds, str) and not isinstance(kinds, Code) else kinds
    if listed and isinstance(listed, list):
        ledger.settle(lambda ledger, key, value: FSDP["fsdp"](ledger, key, listed), f"{t}fsdp")
        for key in ledger.under(f"{t}fsdp_config"):
            name = key.removeprefix(f"{t}fsdp_config.").removeprefix("fsdp_")
            ledger.settle(FSDP.get(name, lacking("dtrain has no equivalent. Leave it out.")), key)
        ledger.imply({"strategy": "fsdp"}, "fsdp is configured")
    else:
        ledger.settle(OFF, f"{t}fsdp_config", f"{t}fsdp_config.**")
        ledger.imply({"strategy": "ddp"}, "one process per GPU, each with a full replica")


_remat = switched(says({"remat": "full"}), says({"remat": "none"}))


def _every(word: str, strategy: str) -> Rule:
    """Carry an interval in steps over, unless the strategy is not by steps."""

    def rule(ledger: Ledger, key: str, value: Any) -> None:
        section = key.rpartition(".")[0]
        by = str(ledger.get(f"{section}.{strategy}".removeprefix("."), "steps")).lower()
        if by in ("steps", "intervalstrategy.steps"):
            to(word, count)(ledger, key, value)
        else:
            ledger.skip(key, f"{strategy}={by} does not use it")

    return rule


def _by(word: str) -> Rule:
    return chosen(
        {
            "steps": unneeded(f"{word} counts steps"),
            "no": says({word: 0}, "only the last step"),
            "epoch": says({word: "epoch"}),
        },
        refused(f"computed in Python, which dtrain does not run. Type {word}=<steps, or epoch>."),
    )


def _named(ledger: Ledger, key: str, value: Any) -> None:
    """Carry the name of a model, with its revision."""
    revision = ledger.get("model_revision", "main")
    place = f"{value}@{revision}" if isinstance(value, str) and revision != "main" else value
    to("model.name", lambda _: text(place), further={"model": "hf"})(ledger, key, value)


def _run_name(ledger: Ledger, key: str, value: Any) -> None:
    """Carry the name of the run in each tracker that is reported to."""
    reported = ledger.get("report_to") or []
    words = map(trackers.named, reported if isinstance(reported, list) else [str(reported)])
    names = {f"logger.{word}.name": str(value) for word in words if word in trackers.ARGUMENTS}
    (says(names) if names and value else unneeded("the name of a run is that of its folder"))(ledger, key, value)


KEYS: Mapping[str, Any] = {
    "output_dir": terms.output,
    "per_device_train_batch_size per_gpu_train_batch_size": given(
        to("microbatch", count, "samples per forward on one rank")
    ),
    "per_device_eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps": unneeded(
        "evaluation uses the microbatch size"
    ),
    "gradient_accumulation_steps": to("accumulate", count),
    "learning_rate": to("optim.lr"),
    "weight_decay": to("optim.weight_decay"),
    "adam_beta1 adam_beta2 optim lr_scheduler_type warmup_steps warmup_ratio": REFUSED,
    "adam_epsilon": to("optim.eps"),
    "max_grad_norm": CLIP,
    "max_steps": chosen({-1: unneeded("no limit"), 0: unneeded("no limit")}, to("steps", count)),
    "num_train_epochs": passes,
    "seed": to("seed", whole),
    "data_seed": lacking("seed orders the data too. Leave it out."),
    "logging_steps": to("log.every", count),
    "eval_steps": _every("evaluate.every", "eval_strategy"),
    "save_steps": _every("checkpoint.every", "save_strategy"),
    "save_total_limit": to("checkpoint.keep", count),
    "eval_strategy evaluation_strategy": _by("evaluate.every"),
    "save_strategy": _by("checkpoint.every"),
    "logging_strategy": chosen({"steps": OFF}, unneeded("every step has a row in metrics.jsonl")),
    "gradient_checkpointing": switched(says({"remat": "full"}), OFF),
    "gradient_checkpointing_kwargs gradient_checkpointing_kwargs.** activation_checkpointing_kwargs "
    "activation_checkpointing_kwargs.**": unneeded("results are the same"),
    "activation_checkpointing": lacking("type remat=full."),
    "bf16 fp16": REFUSED,
    "half_precision_backend fp16_backend": chosen(
        dict.fromkeys(("auto", "amp", "cuda_amp", "cpu_amp"), unneeded("autocast, as here")),
        refused("mixed precision is torch's autocast. Leave it out."),
    ),
    "fp16_opt_level": unneeded("an option of apex"),
    "adafactor": OFF,
    "sharded_ddp": lacking("Type strategy=zero2, or fsdp.", asked="strategy"),
    "evaluate_during_training": lacking("Type evaluate.every=<steps>.", asked="evaluate.every"),
    "full_determinism": terms.DETERMINISTIC,
    "use_cpu no_cuda": switched(says({"backend": "gloo"}), OFF),
    "parallelism_config parallelism_config.** accelerator_config accelerator_config.**": lacking(
        "type mesh.dp_shard, mesh.tp and mesh.cp, and strategy=fsdp."
    ),
    "train_sampling_strategy": chosen({"random": OFF}, refused("samples are shuffled with the seed. Leave it out.")),
    "torch_compile": terms.COMPILE,
    "torch_compile_backend torch_compile_mode": unneeded("inductor compiles the blocks"),
    "tf32": lacking(
        "in place of precision=fp32 type precision=tf32; bf16 and fp16 leave few products of fp32.", "auto"
    ),
    "ddp_bucket_cap_mb": to("strategy.bucket_mb", count),
    "load_best_model_at_end": terms.best,
    "metric_for_best_model greater_is_better": unneeded("an option of load_best_model_at_end"),
    "report_to": trackers.reported,
    "run_name": _run_name,
    "push_to_hub hub_model_id": lacking("type dtrain checkpoint export out=<run> to=hf://<name> after training."),
    "resume_from_checkpoint": unneeded("resume=auto resumes if there is a checkpoint"),
    "disable_dropout": switched(
        unneeded("models of the hub have none by default"), refused("type model.config={<its dropout>: 0.1}.")
    ),
    CHANGING: terms.CHANGES_LOSS,
    "model_init_kwargs.** trust_remote_code optim_target_modules use_liger_kernel optim_args "
    "lr_scheduler_kwargs lr_scheduler_kwargs.** model_init_kwargs liger_kernel_config liger_kernel_config.** "
    "auto_find_batch_size": lacking("dtrain has no equivalent. Leave it out."),
    "predict_with_generate generation_max_length generation_num_beams generation_config generation_config.**": unneeded(
        "an option of their evaluation"
    ),
    "group_by_length sortish_sampler": lacking(
        "with padded rows (data.pad, data.padding=longest) type data.bucket=50."
    ),
    "do_train do_eval do_predict project disable_tqdm log_level logging_first_step logging_dir "
    "eval_on_start eval_delay save_safetensors save_only_model "
    "overwrite_output_dir "
    "average_tokens_across_devices hub_strategy hub_token hub_private_repo ddp_timeout ddp_find_unused_parameters "
    "remove_unused_columns label_names prediction_loss_only dataloader_drop_last dataloader_pin_memory "
    "dataloader_prefetch_factor dataloader_persistent_workers dataloader_num_workers local_rank use_cache "
    "batch_eval_metrics bf16_full_eval fp16_full_eval dataloader_in_order dataloader_multiprocessing_context "
    "ddp_backend ddp_broadcast_buffers ddp_static_graph debug enable_jit_checkpoint eval_do_concat_batches "
    "eval_use_gather_object "
    "hub_always_push hub_revision ignore_data_skip include_for_metrics length_column_name log_level_replica "
    "log_on_each_node logging_nan_inf_filter restore_callback_states_from_checkpoint save_on_each_node "
    "trackio_bucket_id trackio_space_id trackio_static_space_id shuffle_dataset discopop_tau f_alpha_divergence_coef "
    "precompute_ref_batch_size ref_model_mixup_alpha ref_model_sync_steps "
    "tpu_num_cores tpu_metrics_debug past_index xpu_backend use_ipex use_legacy_prediction_loop jit_mode_eval "
    "mp_parameters push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope split_batches _n_gpu "
    "dispatch_batches include_inputs_for_metrics use_mps_device fsdp_min_num_params "
    "fsdp_transformer_layer_cls_to_wrap "
    "include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics torch_empty_cache_steps": unneeded(
        "an option of the Trainer's own loop"
    ),
    "deepspeed fsdp fsdp_config fsdp_config.**": lacking("type strategy=fsdp or strategy=zero3."),
    "max_length max_seq_length": SEQUENCE,
    "max_prompt_length max_completion_length": PROMPTS,
    "packing": PACKING,
    "assistant_only_loss completion_only_loss dataset_text_field beta loss_type "
    "label_smoothing dataset_kwargs dataset_kwargs.** eos_token pad_token dataset_mixture dataset_mixture.**": refused(
        CODE
    ),
    "chat_template chat_template_path": refused("Type data.template=<its file or text>.", "data.template"),
    "dataset_num_proc": unneeded("an option of the preparation of data"),
    "truncation_mode": chosen({"keep_start": OFF}, refused("a longer row loses its end. Leave it out.")),
    "f_divergence_type": chosen({"reverse_kl": OFF}, refused("dtrain has the reverse KL. Leave it out.")),
    "padding_free precompute_ref_log_probs pad_to_multiple_of activation_offloading packing_strategy eval_packing": (
        unneeded("affects speed and memory only")
    ),
    "model_name_or_path": _named,
    "model_revision": chosen({"main": OFF}, unneeded("model.name has it")),
    "attn_implementation ignore_bias_buffers": unneeded("affects speed and loading only"),
    "dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming": refused(CODE),
}
RULES = table(KEYS)
