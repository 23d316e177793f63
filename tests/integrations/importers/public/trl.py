"""Public configs of TRL and scripts of Hugging Face's Trainer: the values they set, what a person has to type, and what the training is, by hand."""

from typing import Any

from integrations.importers.public.row import Row

ADAMW = {
    "optim": "adamw",
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.0,
    "clip": 1.0,
    "seed": 42,
}
COSINE = {"schedule": "cosine", "schedule.warmup": 0.1, "schedule.floor": 0.0}
LINEAR = {"schedule": "linear", "schedule.warmup": 0, "schedule.floor": 0.0}
CLASSES = "jsonl data.path=rows.jsonl data.inputs=ids data.targets=label"
CHAT = "chat data.path=rows.jsonl data.tokenizer=tuned"


def zephyr(name: str, lr: float, micro: int, accumulate: int, **more: Any) -> dict[str, Any]:
    """Keys that the recipes of the alignment handbook share."""
    return {
        "model_name_or_path": name, "torch_dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True, "learning_rate": lr, "lr_scheduler_type": "cosine",
        "num_train_epochs": 1, "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulate, "warmup_ratio": 0.1, "seed": 42, "do_eval": True, **more,
    }  # fmt: skip


SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QLORA = {"load_in_4bit": True, "use_peft": True, "lora_dropout": 0.05, "lora_target_modules": SEVEN}
SFT_SCRIPT = """
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model="facebook/opt-350m", train_dataset=dataset, args=SFTConfig(output_dir="/tmp"))
"""
GLUE_SCRIPT = """
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-cased", num_labels=5)
args = TrainingArguments(output_dir="test_trainer", eval_strategy="epoch")
trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test, compute_metrics=metrics)
"""

TRANSFORMERS = [
    Row("huggingface/alignment-handbook recipes/zephyr-7b-beta/sft/config_full.yaml",
        zephyr("mistralai/Mistral-7B-v0.1", 2e-5, 16, 1, max_seq_length=2048),
        {},
        {**ADAMW, **COSINE, "epochs": 1, "precision": "bf16_true", "remat": "full", "batch.micro": 16, "batch.accumulate": 1, "optim.lr": 2e-5, "adapter": "none",
         "model": "mistralai/Mistral-7B-v0.1"}),
    Row("huggingface/alignment-handbook recipes/zephyr-7b-beta/dpo/config_full.yaml",
        zephyr("alignment-handbook/zephyr-7b-sft-full", 5e-7, 8, 2, beta=0.01, max_length=1024, optim="adamw_torch"),
        {"objective": "dpo", "objective.beta": 0.01, "data": f"{CHAT} data.kind=pairs"},
        {**ADAMW, **COSINE, "epochs": 1, "precision": "bf16_true", "remat": "full", "batch.micro": 8, "batch.accumulate": 2, "optim.lr": 5e-7, "objective": "dpo",
         "objective.beta": 0.01}, ["beta"]),
    Row("huggingface/alignment-handbook recipes/zephyr-7b-beta/dpo/config_qlora.yaml",
        zephyr("mistralai/Mistral-7B-v0.1", 5e-6, 4, 4, beta=0.01, lora_r=128, lora_alpha=128, **QLORA),
        {"objective": "dpo", "objective.beta": 0.01, "data": f"{CHAT} data.kind=pairs"},
        {**ADAMW, **COSINE, "epochs": 1, "precision": "bf16", "adapter": "qlora", "adapter.double": False, "adapter.rank": 128, "adapter.alpha": 128, "adapter.dropout": 0.05,
         "adapter.targets": SEVEN, "batch.micro": 4, "batch.accumulate": 4, "optim.lr": 5e-6}, ["beta"]),
    Row("huggingface/trl docs/source/clis.md",
        {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "stanfordnlp/imdb", "dataset_text_field": "text", "report_to": "none", "learning_rate": 1e-4,
         "lr_scheduler_type": "cosine"},
        {"data.train_on": "all", "data": CHAT},
        {**ADAMW, "schedule": "cosine", "schedule.warmup": 0, "schedule.floor": 0.0, "epochs": 3, "precision": "bf16", "remat": "full", "optim.lr": 1e-4, "batch.micro": 8}, ["dataset_name"]),
    Row("huggingface/trl docs/source/sft_trainer.md#quick-start.py", SFT_SCRIPT,
        {"data.train_on": "all", "data": CHAT},
        {**ADAMW, **LINEAR, "epochs": 3, "precision": "bf16", "remat": "full", "optim.lr": 2e-5, "batch.micro": 8, "batch.accumulate": 1, "model": "facebook/opt-350m"}),
    Row("huggingface/transformers docs/source/en/training.md#train.py", GLUE_SCRIPT,
        {"evaluate.metrics": "[accuracy]", "model.head": "new", "data": CLASSES},
        {**ADAMW, **LINEAR, "epochs": 3, "precision": "fp32", "remat": "none", "optim.lr": 5e-5, "batch.micro": 8, "model": "google-bert/bert-base-cased", "task": "classification", "config": {"num_labels": 5}},
        ["Trainer.compute_metrics"]),
]  # fmt: skip
