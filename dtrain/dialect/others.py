"""Which tools' files are known and not read, and what to type instead: Hugging Face's TrainingArguments, torchtitan's configs in Python."""

import ast
from collections.abc import Mapping
from typing import Any

from dtrain.dialect.ledger import Code, names, show
from dtrain.errors import WordsError

ARGUMENTS = names("TrainingArguments Seq2SeqTrainingArguments SFTConfig DPOConfig GRPOConfig RewardConfig")
MARKS = names("per_device_train_batch_size per_device_eval_batch_size num_train_epochs remove_unused_columns do_train")
"""Of TrainingArguments alone: https://huggingface.co/docs/transformers/main_classes/trainer"""
WORDS = {
    "per_device_train_batch_size": "microbatch", "gradient_accumulation_steps": "accumulate", "learning_rate": "optim.lr", "weight_decay": "optim.weight_decay",
    "adam_epsilon": "optim.eps", "max_grad_norm": "clip", "max_steps": "steps", "warmup_steps": "schedule.warmup", "warmup_ratio": "schedule.warmup",
    "seed": "seed", "logging_steps": "log.every", "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep", "eval_steps": "evaluate.every",
    "output_dir": "out",
}  # fmt: skip
"""Theirs -> ours, where the value means the same."""
SAID = {
    ("bf16", True): "precision=bf16", ("fp16", True): "precision=fp16", ("gradient_checkpointing", True): "remat=full", ("torch_compile", True): "compile=blocks",
    ("lr_scheduler_type", "cosine"): "schedule=cosine", ("lr_scheduler_type", "constant_with_warmup"): "schedule=constant",
    ("lr_scheduler_type", "constant"): "schedule=constant schedule.warmup=0", ("optim", "adafactor"): "optim=adafactor",
}  # fmt: skip
MODEL = "model._target_=transformers.AutoModelForCausalLM.from_pretrained model.pretrained_model_name_or_path=<name> trust=[transformers]"


def refuse(tree: Mapping[str, Any], place: str) -> None:
    """Raises WordsError, with the words to type, for a tree of TrainingArguments."""
    if not MARKS & set(tree):
        return
    said = [f"{word}={show(tree[key])}" for key, word in WORDS.items() if key in tree and not isinstance(tree[key], Code | dict | None)]
    said += [words for (key, value), words in SAID.items() if tree.get(key) == value]
    if tree.get("fsdp"):
        said.append("strategy=fsdp")
    if not any(word.startswith("steps=") for word in said):
        said.append(f"steps=<{show(tree.get('num_train_epochs', 3))} x samples / batch>")
    raise WordsError(
        f"{place}: TrainingArguments of Hugging Face's Trainer are not read. Type {' '.join(said)}, the data, and {MODEL}, which lets any code of transformers run as you."
    )


def refuse_python(module: ast.Module, arguments: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Raises WordsError for a Python file of such a tool; `arguments` by the name of what is called with them."""
    for name, found in arguments.items():
        if name in ARGUMENTS:
            refuse({"do_train": True, **found}, place)
    froms = [node.module or "" for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    if any(name.split(".")[0] == "torchtitan" for name in froms):
        made = next((node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)), "<function>")
        raise WordsError(
            f"{place}: a config of torchtitan in Python, of which no line is run here. Write it as JSON where torchtitan is installed, and import that: "
            f"python -c 'import dataclasses, json; from <its module> import {made} as f; print(json.dumps(dataclasses.asdict(f()), default=str))' > config.json"
        )
