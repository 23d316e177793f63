"""Public configs of axolotl, torchtune and torchtitan: the values they set, what a person has to type, and what the training is, by hand."""

from typing import Any

from integrations.importers.public.row import Row

ALPACA = [{"path": "tatsu-lab/alpaca", "type": "alpaca"}]
HF = {"optim": "adamw", "optim.betas": [0.9, 0.999], "optim.eps": 1e-8}


def axolotl(name: str, lr: float, micro: int, accumulate: int, **more: Any) -> dict[str, Any]:
    """Keys that nearly all of its examples set."""
    return {
        "base_model": name, "datasets": ALPACA, "val_set_size": 0.05, "output_dir": "./outputs/out", "sequence_len": 2048, "sample_packing": True,
        "gradient_accumulation_steps": accumulate, "micro_batch_size": micro, "lr_scheduler": "cosine", "learning_rate": lr, "bf16": "auto", "warmup_ratio": 0.1,
        "logging_steps": 1, "saves_per_epoch": 1, "weight_decay": 0.0, **more,
    }  # fmt: skip


EIGHT = {
    "optim": "adamw",
    "optim.lr": 2e-5,
    "optim.weight_decay": 0.0,
    "optim.betas": "[0.9,0.999]",
}
COSINE = {"schedule": "cosine", "schedule.warmup": 0.1, "schedule.floor": 0.0, "clip": 1.0}
FSDP = {
    "fsdp_offload_params": True,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_use_orig_params": False,
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_cpu_ram_efficient_loading": False,
}

AXOLOTL = [
    Row("axolotl-ai-cloud/axolotl examples/llama-3/fft-8b.yaml",
        axolotl("NousResearch/Meta-Llama-3.1-8B", 2e-5, 1, 8, optimizer="paged_adamw_8bit", num_epochs=1, gradient_checkpointing=True, evals_per_epoch=2),
        {**EIGHT, "evaluate.every": 50},
        {**COSINE, "model": "NousResearch/Meta-Llama-3.1-8B", "strategy": "ddp", "batch.micro": 1, "batch.accumulate": 8, "precision": "bf16_true", "remat": "full",
         "optim": "adamw", "optim.lr": 2e-5, "epochs": 1},
        ["optimizer"]),
    Row("axolotl-ai-cloud/axolotl examples/llama-3/fft-8b-liger-fsdp.yaml",
        axolotl("NousResearch/Meta-Llama-3.1-8B", 2e-5, 2, 4, optimizer="adamw_torch_fused", num_epochs=1, gradient_checkpointing=True, evals_per_epoch=2,
                liger_rope=True, fsdp=["full_shard", "auto_wrap"], fsdp_config=FSDP),
        {"evaluate.every": 50},
        {**COSINE, **HF, "strategy": "fsdp", "reshard": "forward", "offload": "cpu", "batch.micro": 2, "batch.accumulate": 4, "precision": "bf16", "remat": "full",
         "optim.lr": 2e-5, "optim.weight_decay": 0.0, "epochs": 1},
        ["liger_rope"]),
    Row("axolotl-ai-cloud/axolotl examples/archived/tiny-llama/pretrain.yml",
        axolotl("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2e-4, 2, 4, model_type="LlamaForCausalLM", max_steps=200, num_epochs=4, optimizer="adamw_bnb_8bit",
                gradient_checkpointing=True, val_set_size=0.0),
        {"optim": "adamw", "optim.lr": 2e-4, "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]"},
        {**COSINE, "schedule.warmup": 20, "batch.micro": 2, "batch.accumulate": 4, "steps": 200, "precision": "bf16_true", "optim.lr": 2e-4}, ["optimizer"]),
    Row("axolotl-ai-cloud/axolotl examples/phi/phi2-ft.yml",
        axolotl("microsoft/phi-2", 3e-6, 2, 1, model_type="AutoModelForCausalLM", num_epochs=4, optimizer="adamw_torch_fused", adam_beta2=0.95, adam_epsilon=1e-5,
                max_grad_norm=1.0, adapter=None, lora_r=None, tf32=True, gradient_checkpointing=True, evals_per_epoch=4) | {"weight_decay": 0.1},
        {"evaluate.every": 50},
        {**COSINE, "model": "microsoft/phi-2", "optim": "adamw", "optim.lr": 3e-6, "optim.betas": [0.9, 0.95], "optim.eps": 1e-5, "optim.weight_decay": 0.1,
         "batch.micro": 2, "batch.accumulate": 1, "precision": "bf16_true", "remat": "full", "epochs": 4}, ["tf32"]),
    Row("axolotl-ai-cloud/axolotl examples/phi/phi3-ft-fsdp.yml",
        axolotl("microsoft/Phi-3-mini-4k-instruct", 3e-6, 12, 2, num_epochs=2, optimizer="adamw_torch_fused", adam_beta2=0.95, adam_epsilon=1e-5, max_grad_norm=1.0,
                trust_remote_code=True, gradient_checkpointing=True, evals_per_epoch=4, fsdp=["full_shard", "auto_wrap"], fsdp_config=FSDP) | {"weight_decay": 0.1},
        {"evaluate.every": 50},
        {**COSINE, "strategy": "fsdp", "offload": "cpu", "optim.lr": 3e-6, "optim.betas": [0.9, 0.95], "optim.eps": 1e-5, "optim.weight_decay": 0.1,
         "batch.micro": 12, "batch.accumulate": 2, "precision": "bf16", "remat": "full"}, ["trust_remote_code"]),
    Row("axolotl-ai-cloud/axolotl examples/qwen2/adamw-pretrain-fsdp2.yaml",
        axolotl("Qwen/Qwen2.5-0.5B", 2e-4, 4, 1, num_epochs=1, max_steps=305, optimizer="adamw_torch_fused", warmup_steps=10, warmup_ratio=None, seed=42, fp16=False,
                gradient_checkpointing=False, reinit_weights=True, evals_per_epoch=0, fsdp_config=FSDP2) | {"weight_decay": 0.01},
        {},
        {**COSINE, **HF, "schedule.warmup": 10, "strategy": "fsdp", "reshard": "forward", "optim.lr": 2e-4, "optim.weight_decay": 0.01, "batch.micro": 4,
         "batch.accumulate": 1, "steps": 305, "seed": 42, "precision": "bf16", "remat": "none", "weights": "random"}),
    Row("axolotl-ai-cloud/axolotl examples/qwen2/muon-pretrain-fsdp2.yaml",
        axolotl("Qwen/Qwen2.5-0.5B", 0.02, 4, 1, num_epochs=1, max_steps=305, optimizer="muon", warmup_steps=10, warmup_ratio=None, seed=42, fsdp_config=FSDP2),
        {"optim": "muon", "optim.lr": 0.02, "optim.weight_decay": 0.0},
        {**COSINE, "schedule.warmup": 10, "strategy": "fsdp", "optim": "muon", "optim.lr": 0.02, "batch.micro": 4, "steps": 305, "seed": 42}, ["optimizer"]),
    Row("axolotl-ai-cloud/axolotl examples/distributed-parallel/llama-3_1-8b-hsdp-tp.yaml",
        {"base_model": "meta-llama/Llama-3.1-8B", "dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2, "fsdp_version": 2, "datasets": ALPACA,
         "fsdp_config": {"offload_params": False, "state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": True}, "output_dir": "./outputs/ndp-out/",
         "sequence_len": 2048, "gradient_accumulation_steps": 1, "micro_batch_size": 1, "num_epochs": 2, "optimizer": "adamw_torch_fused",
         "lr_scheduler": "constant_with_warmup", "learning_rate": 2e-6, "bf16": True, "tf32": True, "warmup_ratio": 0.1, "saves_per_epoch": 1},
        {},
        {**HF, "strategy": "fsdp", "mesh.dp_shard": 4, "mesh.dp_replicate": 2, "mesh.tp": 2, "batch.micro": 1, "batch.accumulate": 1, "optim.lr": 2e-6,
         "optim.weight_decay": 0.0, "schedule": "constant", "schedule.warmup": 0.1, "precision": "bf16", "clip": 1.0, "epochs": 2}, ["tf32"]),
    Row("axolotl-ai-cloud/axolotl examples/gemma2/reward-model.yaml",
        axolotl("google/gemma-2-2b", 2e-4, 2, 4, model_type="AutoModelForSequenceClassification", num_epochs=4, optimizer="adamw_bnb_8bit", remove_unused_columns=False,
                reward_model=True, tf32=True, gradient_checkpointing=True) | {"bf16": True, "val_set_size": 0.0},
        {"optim": "adamw", "optim.lr": 2e-4, "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]", "objective": "next_token"},
        {**COSINE, "model": "google/gemma-2-2b", "batch.micro": 2, "batch.accumulate": 4, "precision": "bf16_true", "remat": "full", "optim.lr": 2e-4, "epochs": 4},
        ["optimizer", "reward_model"]),
    Row("axolotl-ai-cloud/axolotl examples/mamba/config.yml",
        axolotl("state-spaces/mamba-2.8b", 5e-5, 1, 4, model_type="MambaLMHeadModel", num_epochs=2, optimizer="paged_adamw_8bit", train_on_inputs=False,
                group_by_length=True, tf32=True, evals_per_epoch=4),
        {"model": "gpt", "optim": "adamw", "optim.lr": 5e-5, "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]", "evaluate.every": 50},
        {**COSINE, "batch.micro": 1, "batch.accumulate": 4, "precision": "bf16_true", "optim.lr": 5e-5}, ["base_model", "optimizer"]),
]  # fmt: skip


def torchtune(model: str, lr: float, batch: int, **more: Any) -> dict[str, Any]:
    """Keys that all of its full recipes set."""
    return {
        "output_dir": "/tmp/torchtune/run", "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "/tmp/tokenizer.model"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False}, "seed": None, "shuffle": True, "model": {"_component_": model},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/tmp/model", "output_dir": "${output_dir}"},
        "resume_from_checkpoint": False, "batch_size": batch, "epochs": 1, "optimizer": {"_component_": "torch.optim.AdamW", "lr": lr, "fused": True},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}, "max_steps_per_epoch": None, "gradient_accumulation_steps": 1, "device": "cuda",
        "enable_activation_checkpointing": True, "clip_grad_norm": None, "compile": False, "optimizer_in_bwd": False, "dtype": "bf16", "log_every_n_steps": 1, **more,
    }  # fmt: skip


TUNED = {
    "batch.accumulate": 1, "precision": "bf16_true", "clip": None, "remat": "full", "objective": "next_token", "optim": "adamw", "optim.betas": [0.9, 0.999],
    "optim.weight_decay": 0.01, "schedule": "constant", "schedule.warmup": 0, "epochs": 1,
}  # fmt: skip
BITS = {
    "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW", "lr": 1e-5},
    "optimizer_in_bwd": True,
    "enable_activation_offloading": True,
}

TORCHTUNE = [
    Row("pytorch/torchtune recipes/configs/llama2/7B_full.yaml", torchtune("torchtune.models.llama2.llama2_7b", 2e-5, 2), {},
        {**TUNED, "model": "/tmp/model", "batch.micro": 2, "optim.lr": 2e-5}),
    Row("pytorch/torchtune recipes/configs/llama2/7B_full_low_memory.yaml", torchtune("torchtune.models.llama2.llama2_7b", 0, 2, **BITS),
        {"optim": "adamw", "optim.lr": 1e-5, "optim.weight_decay": 0.0, "optim.betas": "[0.9,0.999]"},
        {"batch.micro": 2, "precision": "bf16_true", "clip": None, "remat": "full", "optim": "adamw", "optim.lr": 1e-5, "schedule": "constant", "schedule.warmup": 0,
         "epochs": 1}, ["optimizer._component_", "optimizer_in_bwd"]),
    Row("pytorch/torchtune recipes/configs/llama3/8B_full.yaml",
        torchtune("torchtune.models.llama3.llama3_8b", 2e-5, 2, custom_sharded_layers=["tok_embeddings", "output"]), {},
        {**TUNED, "strategy": "fsdp", "batch.micro": 2, "optim.lr": 2e-5}),
    Row("pytorch/torchtune recipes/configs/llama3_1/70B_full.yaml",
        torchtune("torchtune.models.llama3_1.llama3_1_70b", 2e-5, 2, tensor_parallel_dim=1, custom_sharded_layers=["tok_embeddings", "output"], fsdp_cpu_offload=True,
                  tensor_parallel_plan={"_component_": "torchtune.models.llama3.base_llama_tp_plan"}), {},
        {**TUNED, "strategy": "fsdp", "offload": "cpu", "batch.micro": 2, "optim.lr": 2e-5}, ["tensor_parallel_plan._component_"]),
    Row("pytorch/torchtune recipes/configs/qwen2_5/0.5B_full_single_device.yaml",
        torchtune("torchtune.models.qwen2_5.qwen2_5_0_5b", 2e-5, 2, enable_activation_checkpointing=False, gradient_accumulation_steps=8), {},
        {**TUNED, "batch.micro": 2, "batch.accumulate": 8, "remat": "none", "optim.lr": 2e-5}),
    Row("pytorch/torchtune recipes/configs/llama3_3/70B_full_multinode.yaml",
        torchtune("torchtune.models.llama3_3.llama3_3_70b", 2e-5, 4, tensor_parallel_dim=8, data_parallel_shard_dim=-1, data_parallel_replicate_dim=1, compile=True,
                  fsdp_cpu_offload=False), {},
        {**TUNED, "strategy": "fsdp", "mesh.tp": 8, "batch.micro": 4, "compile": "blocks", "optim.lr": 2e-5}),
    Row("pytorch/torchtune recipes/configs/llama3_2/1B_lora.yaml",
        torchtune("", 3e-4, 4, gradient_accumulation_steps=8, enable_activation_checkpointing=False,
                  lr_scheduler={"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 100},
                  optimizer={"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": 3e-4})
        | {"model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True,
                     "apply_lora_to_output": False, "lora_rank": 64, "lora_alpha": 128, "lora_dropout": 0.0}},
        {},
        {**TUNED, "batch.micro": 4, "batch.accumulate": 8, "remat": "none", "optim.lr": 3e-4, "schedule": "cosine", "schedule.warmup": 100, "schedule.floor": 0.0,
         "model": "/tmp/model", "adapter": "lora", "adapter.rank": 64, "adapter.alpha": 128, "adapter.targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}),
]  # fmt: skip

AC = {"mode": "selective", "selective_ac_option": "op"}


def titan(flavor: str, lr: float, local: int, steps: int, warmup: int, **sections: Any) -> dict[str, Any]:
    """Sections that all of its Llama 3 and Qwen 3 files have."""
    name, _, size = flavor.partition(" ")
    tree = {
        "job": {"dump_folder": "./outputs"}, "model": {"name": name, "flavor": size, "hf_assets_path": "./assets/hf"},
        "optimizer": {"name": "AdamW", "lr": lr, "eps": 1e-8}, "lr_scheduler": {"warmup_steps": warmup},
        "training": {"local_batch_size": local, "seq_len": 8192, "max_norm": 1.0, "steps": steps, "dataset": "c4"},
        "parallelism": {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1},
        "checkpoint": {"enable": False, "interval": 500, "async_mode": "disabled"}, "activation_checkpoint": AC, "compile": {"enable": False},
    }  # fmt: skip
    return {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}


LINEAR = {
    "optim": "adamw",
    "optim.betas": [0.9, 0.95],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.1,
    "schedule": "linear",
    "schedule.floor": 0.0,
    "clip": 1.0,
}
TITAN = {**LINEAR, "strategy": "fsdp", "precision": "bf16", "remat": "selective", "compile": "none"}
GPT = {"model": "gpt model.heads=8 model.width=64"}
PLACE = "pytorch/torchtitan torchtitan/models/"

TORCHTITAN = [
    Row(f"{PLACE}llama3/train_configs/llama3_8b.toml", titan("llama3 8B", 3e-4, 1, 1000, 200), GPT,
        {**TITAN, "batch.micro": 1, "batch.accumulate": 1, "optim.lr": 3e-4, "schedule.warmup": 200, "steps": 1000}, ["model.flavor"]),
    Row(f"{PLACE}llama3/train_configs/llama3_70b.toml",
        titan("llama3 70B", 1.5e-4, 8, 1000, 200, parallelism={"tensor_parallel_degree": 8}, activation_checkpoint={"mode": "full", "selective_ac_option": None}), GPT,
        {**TITAN, "mesh.tp": 8, "remat": "full", "batch.micro": 8, "optim.lr": 1.5e-4, "schedule.warmup": 200, "steps": 1000}),
    Row(f"{PLACE}llama3/train_configs/llama3_405b.toml",
        titan("llama3 405B", 8e-5, 2, 3000, 600, model={"converters": ["float8"]}, parallelism={"tensor_parallel_degree": 8, "enable_async_tensor_parallel": True},
              activation_checkpoint={"mode": "full", "selective_ac_option": None}, compile={"enable": True, "components": ["model", "loss"]}), GPT,
        {**TITAN, "mesh.tp": 8, "remat": "full", "compile": "blocks", "precision": "fp8", "batch.micro": 2, "optim.lr": 8e-5, "schedule.warmup": 600, "steps": 3000}, ["parallelism.enable_async_tensor_parallel"]),
    Row(f"{PLACE}llama3/train_configs/debug_model.toml",
        titan("llama3 debugmodel", 8e-4, 8, 10, 2, lr_scheduler={"decay_ratio": 0.8, "decay_type": "linear", "min_lr_factor": 0.0},
              activation_checkpoint={"selective_ac_option": "2"}), GPT,
        {**TITAN, "remat": "budget", "batch.micro": 8, "optim.lr": 8e-4, "schedule.warmup": 2, "steps": 10}),
    Row(f"{PLACE}deepseek_v3/train_configs/deepseek_v3_16b.toml",
        titan("deepseek_v3 16B", 2.2e-4, 4, 1000, 200, lr_scheduler={"decay_ratio": 0.8, "decay_type": "cosine", "min_lr_factor": 0.1},
              parallelism={"expert_parallel_degree": 8, "expert_tensor_parallel_degree": 1, "pipeline_parallel_schedule": "Interleaved1F1B"},
              compile={"enable": True, "components": ["loss"]}),
        {"model": "moe"},
        {**TITAN, "remat": "none", "mesh.ep": 8, "compile": "blocks", "batch.micro": 4, "optim.lr": 2.2e-4, "schedule": "cosine", "schedule.warmup": 200, "schedule.floor": 0.1,
         "steps": 1000}, ["activation_checkpoint.mode"]),
    Row(f"{PLACE}llama4/train_configs/llama4_17bx128e.toml",
        titan("llama4 17bx128e", 4e-3, 1, 3000, 600, optimizer={"eps": 1e-15}, lr_scheduler={"min_lr_factor": 0.1},
              parallelism={"tensor_parallel_degree": 8, "pipeline_parallel_degree": 4, "expert_parallel_degree": 1, "expert_tensor_parallel_degree": 8},
              activation_checkpoint={"mode": "full"}),
        {"model": "gpt model.heads=8 model.width=64", "accumulate": 4},
        {**TITAN, "mesh.tp": 8, "mesh.pp": 4, "remat": "full", "batch.micro": 1, "batch.accumulate": 4, "optim.lr": 4e-3, "optim.eps": 1e-15, "schedule.warmup": 600, "schedule.floor": 0.1, "steps": 3000}, ["training.local_batch_size", "parallelism.expert_tensor_parallel_degree"]),
    Row(f"{PLACE}qwen3/train_configs/qwen3_0.6b.toml", titan("qwen3 0.6B", 3e-4, 4, 10, 2, parallelism={"fsdp_reshard_after_forward": "default"}), GPT,
        {**TITAN, "reshard": "forward", "batch.micro": 4, "optim.lr": 3e-4, "schedule.warmup": 2, "steps": 10}),
    Row(f"{PLACE}qwen3/train_configs/qwen3_32b.toml", titan("qwen3 32B", 8e-4, 2, 3000, 600, activation_checkpoint={"mode": "full"}), GPT,
        {**TITAN, "remat": "full", "batch.micro": 2, "optim.lr": 8e-4, "schedule.warmup": 600, "steps": 3000}),
    Row("pytorch/torchtitan configs/llama3_8b-8xb200-8k.toml",
        titan("llama3 8B", 3e-4, 3, 1000, 200, training={"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"}, parallelism={"data_parallel_shard_degree": 8},
              activation_checkpoint={"mode": "none"}, optimizer={"early_step_in_backward": True}, compile={"enable": True, "components": ["model", "loss"]}), GPT,
        {**TITAN, "mesh.dp_shard": 8, "precision": "bf16_true", "remat": "none", "compile": "blocks", "batch.micro": 3, "optim.lr": 3e-4, "schedule.warmup": 200, "steps": 1000}, ["optimizer.early_step_in_backward"]),
]  # fmt: skip
