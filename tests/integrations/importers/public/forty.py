"""Ten more public configs of axolotl, and what the forty of further.py share."""

from typing import Any

from integrations.importers.public.row import Row

OWN = {"optim.betas": "[0.9,0.999]", "optim": "adamw"}
"""Typed in place of an optimizer in 8 bits."""
ADAMW = {"optim": "adamw", "optim.betas": [0.9, 0.999], "optim.eps": 1e-8}
HF = {**ADAMW, "optim.weight_decay": 0.0, "clip": 1.0}
"""Defaults of transformers' TrainingArguments."""
LINE = {"schedule": "linear", "schedule.warmup": 0, "schedule.floor": 0.0}
COSINE = {"schedule": "cosine", "schedule.warmup": 0.1, "schedule.floor": 0.0}
SEVEN = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]
ALPACA = [{"path": "tatsu-lab/alpaca", "type": "alpaca"}]
CHAT = "chat data.path=rows.jsonl data.tokenizer=tuned"
PAIRS = f"{CHAT} data.kind=pairs"
AX = "axolotl-ai-cloud/axolotl@067b021c8b87a9e5e380b9173c704cf7340e30f5 examples/"


def axolotl(lr: float, micro: int, accumulate: int, **more: Any) -> dict[str, Any]:
    """Keys that most of its examples share."""
    tree = {
        "base_model": "meta/llama", "model_type": "LlamaForCausalLM", "datasets": ALPACA, "val_set_size": 0.05, "sequence_len": 2048, "learning_rate": lr,
        "lr_scheduler": "cosine", "micro_batch_size": micro, "gradient_accumulation_steps": accumulate, "bf16": "auto", "warmup_ratio": 0.1, **more,
    }  # fmt: skip
    return {key: value for key, value in tree.items() if value != ""}


def lora(rank: int, alpha: int, dropout: float, **more: Any) -> dict[str, Any]:
    return {"lora_r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "lora_target_linear": True, **more}


def adapter(word: str, rank: int, alpha: int, dropout: float, targets: Any = None) -> dict[str, Any]:
    return {
        "adapter": word,
        "adapter.rank": rank,
        "adapter.alpha": alpha,
        "adapter.dropout": dropout,
        "adapter.targets": targets,
    }


AXOLOTL = [
    Row(f"{AX}llama-3/instruct-dpo-lora-8b.yml",
        axolotl(2e-4, 2, 4, load_in_8bit=True, chat_template="llama3", rl="dpo", adapter="lora", num_epochs=4, optimizer="adamw_bnb_8bit", gradient_checkpointing=True,
                weight_decay=0.0, datasets=[{"path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default"}], **lora(32, 16, 0.05)),
        {**OWN, "optim.lr": 2e-4, "optim.weight_decay": 0.0, "adapter": "lora", "data": PAIRS},
        {**HF, **COSINE, "objective": "dpo", "objective.loss": "sigmoid", "objective.beta": 0.1, **adapter("lora", 32, 16, 0.05), "precision": "bf16", "remat": "full",
         "batch.micro": 2, "batch.accumulate": 4, "epochs": 4, "optim.lr": 2e-4}, ["optimizer", "load_in_8bit"]),
    Row(f"{AX}llama-3/qlora-1b-kto.yaml",
        axolotl(2e-4, 2, 1, load_in_4bit=True, rl="kto", rl_beta=0.5, kto_desirable_weight=0.2, adapter="qlora", num_epochs=1, optimizer="adamw_8bit",
                gradient_checkpointing=True, weight_decay=0.0, **lora(32, 64, 0.05)),
        {**OWN, "optim.lr": 2e-4, "optim.weight_decay": 0.0, "objective": "dpo", "data": PAIRS},
        {**HF, **COSINE, **adapter("qlora", 32, 64, 0.05), "adapter.double": True, "precision": "bf16", "batch.micro": 2, "batch.accumulate": 1, "epochs": 1,
         "objective": "dpo"}, ["rl", "rl_beta", "kto_desirable_weight"]),
    Row(f"{AX}llama-3/lora-8b.yml",
        axolotl(2e-4, 2, 4, load_in_8bit=True, adapter="lora", sample_packing=True, sequence_len=4096, num_epochs=4, optimizer="adamw_bnb_8bit", gradient_checkpointing=True,
                weight_decay=0.0, lora_modules_to_save=["embed_tokens", "lm_head"], **lora(32, 16, 0.05)),
        {**OWN, "optim.lr": 2e-4, "optim.weight_decay": 0.0, "adapter": "lora"},
        {**HF, **COSINE, **adapter("lora", 32, 16, 0.05), "precision": "bf16", "batch.micro": 2, "batch.accumulate": 4, "epochs": 4}, ["lora_modules_to_save", "optimizer"]),
    Row(f"{AX}llama-3/qlora-fsdp-70b.yaml",
        axolotl(1e-5, 1, 4, load_in_4bit=True, adapter="qlora", sequence_len=512, num_epochs=4, optimizer="adamw_torch_fused", gradient_checkpointing=True, weight_decay=0.0,
                fsdp=["full_shard", "auto_wrap"], fsdp_config={"fsdp_offload_params": True, "fsdp_sharding_strategy": "FULL_SHARD"}, **lora(8, 16, 0.05)),
        {"adapter": "lora"},
        {**HF, **COSINE, **adapter("lora", 8, 16, 0.05), "strategy": "fsdp", "offload": "cpu", "reshard": "forward", "precision": "bf16", "batch.micro": 1,
         "batch.accumulate": 4, "epochs": 4, "optim.lr": 1e-5}, ["adapter"]),
    Row(f"{AX}archived/openllama-3b/lora.yml",
        axolotl(2e-4, 2, 1, load_in_8bit=True, adapter="lora", bf16=False, fp16=True, sequence_len=1024, num_epochs=4, optimizer="adamw_bnb_8bit", gradient_checkpointing=True,
                weight_decay=0.1, lora_r=8, lora_alpha=16, lora_dropout=0.0, lora_target_modules=SEVEN),
        {**OWN, "optim.lr": 2e-4, "optim.weight_decay": 0.1, "adapter": "lora"},
        {**ADAMW, **COSINE, **adapter("lora", 8, 16, 0.0, SEVEN), "optim.weight_decay": 0.1, "clip": 1.0, "precision": "fp16", "batch.micro": 2, "batch.accumulate": 1,
         "epochs": 4}, ["optimizer"]),
    Row(f"{AX}archived/pythia-12b/config.yml",
        axolotl(3e-5, 1, 1, model_type="GPTNeoXForCausalLM", bf16=False, fp16=False, float16=True, num_epochs=5, optimizer="adamw_bnb_8bit", gradient_checkpointing=True,
                warmup_ratio="", adapter=None, max_packed_sequence_len=2048, **lora(64, 32, 0.0)),
        {**OWN, "optim.lr": 3e-5, "optim.weight_decay": 0.0, "precision": "fp16"},
        {**HF, **COSINE, "schedule.warmup": 0.03, "adapter": "none", "precision": "fp16", "batch.micro": 1, "batch.accumulate": 1, "epochs": 5},
        ["float16", "optimizer", "max_packed_sequence_len"]),
    Row(f"{AX}llama-3/3b-fp8-fsdp2.yaml",
        axolotl(2e-5, 16, 1, bf16="", lr_scheduler="", warmup_ratio="", val_set_size="", warmup_steps=10, fp8=True, torch_compile=True, num_epochs=1,
                optimizer="adamw_torch_fused", weight_decay=0.0, cosine_constant_lr_ratio=0, cosine_min_lr_ratio=1.0, fsdp_version=2,
                fsdp_config={"offload_params": False, "reshard_after_forward": True}),
        {},
        {**HF, **COSINE, "schedule.warmup": 10, "schedule.floor": 1.0, "strategy": "fsdp", "reshard": "forward", "precision": "fp8", "compile": "blocks", "batch.micro": 16,
         "batch.accumulate": 1, "epochs": 1, "optim.lr": 2e-5}),
    Row(f"{AX}falcon-e/falcon-e-3b-dpo.yaml",
        axolotl(1e-5, 1, 4, model_type="", rl="dpo", chat_template="tokenizer_default", bf16=True, num_epochs=3, optimizer="adamw_torch", adam_beta1=0.9, adam_beta2=0.95,
                warmup_ratio="", warmup_steps=128, weight_decay=0.01, save_steps=500, fsdp_version=2, fsdp_config={"reshard_after_forward": True, "activation_checkpointing": True},
                dp_shard_size=1, val_set_size="", datasets=[{"path": "allenai/Dolci-Think-DPO-7B", "type": "chatml.ultra"}]),
        {"data": PAIRS},
        {**ADAMW, **COSINE, "objective": "dpo", "objective.beta": 0.1, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.01, "clip": 1.0, "schedule.warmup": 128,
         "strategy": "fsdp", "reshard": "forward", "remat": "full", "precision": "bf16", "batch.micro": 1, "batch.accumulate": 4, "epochs": 3, "optim.lr": 1e-5}),
    Row(f"{AX}archived/replit-3b/config-lora.yml",
        axolotl(1e-5, 1, 1, model_type="", gradient_accumulation_steps="", batch_size=8, adapter="lora", num_epochs=4, optimizer=None, lr_scheduler=None, weight_decay=0,
                lora_r=8, lora_alpha=16, lora_dropout=0.05, lora_target_modules=["Wqkv", "mlp_up", "mlp_down"]),
        {},
        {**HF, **COSINE, **adapter("lora", 8, 16, 0.05, ["Wqkv", "mlp_up", "mlp_down"]), "precision": "bf16", "batch.micro": 1, "batch.accumulate": 8, "epochs": 4}),
    Row("huggingface/transformers@0f281a4529fb9e4ea7d88339ea292af300bc2ad7 docs/source/en/community_integrations/axolotl.md",
        {"base_model": "NousResearch/Nous-Hermes-llama-1b-v1", "model_type": "AutoModelForCausalLM", "datasets": [{"path": "path/to/data", "type": "alpaca"}],
         "sequence_len": 512, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1, "learning_rate": 2e-5},
        {}, {**HF, **COSINE, "schedule.warmup": 0.03, "precision": "bf16_true", "adapter": "none", "batch.micro": 1, "batch.accumulate": 1, "epochs": 1, "optim.lr": 2e-5}),
]  # fmt: skip
