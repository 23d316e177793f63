"""Which tools' files are known and not read, and what to type instead: Hugging Face's TrainingArguments, litgpt,
Composer, torchtitan's configs in Python.
"""

import ast
from collections.abc import Mapping
from typing import Any

from dtrain.dialect.ledger import Code, flatten, names, show
from dtrain.errors import WordsError

ARGUMENTS = names("TrainingArguments Seq2SeqTrainingArguments SFTConfig DPOConfig GRPOConfig RewardConfig")
MARKS = names("per_device_train_batch_size per_device_eval_batch_size num_train_epochs remove_unused_columns do_train")
"""Of TrainingArguments alone: https://huggingface.co/docs/transformers/main_classes/trainer"""
WORDS = {
    "per_device_train_batch_size": "microbatch", "gradient_accumulation_steps": "accumulate",
    "learning_rate": "optim.lr", "weight_decay": "optim.weight_decay",
    "adam_epsilon": "optim.eps", "max_grad_norm": "clip", "max_steps": "steps", "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup",
    "seed": "seed", "logging_steps": "log.every", "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "eval_steps": "evaluate.every",
    "output_dir": "out",
}  # fmt: skip
"""Theirs -> ours, where the value means the same."""
SAID = {
    ("bf16", True): "precision=bf16", ("fp16", True): "precision=fp16", ("gradient_checkpointing", True): "remat=full",
    ("torch_compile", True): "compile=blocks",
    ("lr_scheduler_type", "cosine"): "schedule=cosine",
    ("lr_scheduler_type", "constant_with_warmup"): "schedule=constant",
    ("lr_scheduler_type", "constant"): "schedule=constant schedule.warmup=0", ("optim", "adafactor"): "optim=adafactor",
}  # fmt: skip
MODEL = (
    "model._target_=transformers.AutoModelForCausalLM.from_pretrained model.pretrained_model_name_or_path=<name> "
    "trust=[transformers]"
)


LITGPT = {
    "train.global_batch_size": "batch", "train.micro_batch_size": "microbatch",
    "train.lr_warmup_steps": "schedule.warmup", "train.max_norm": "clip",
    "train.max_steps": "steps", "train.save_interval": "checkpoint.every", "eval.interval": "evaluate.every",
    "seed": "seed", "devices": "devices",
    "num_nodes": "nodes", "out_dir": "out",
}  # fmt: skip
COMPOSER = {
    "global_train_batch_size": "batch", "device_train_microbatch_size": "microbatch", "seed": "seed",
    "save_folder": "out",
    "algorithms.gradient_clipping.clipping_threshold": "clip", "save_num_checkpoints_to_keep": "checkpoint.keep",
}  # fmt: skip
OPTIMIZER = {
    "lr": "optim.lr",
    "betas": "optim.betas",
    "eps": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "momentum": "optim.momentum",
}
PRECISIONS = {
    "bf16-true": "bf16_true", "bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32", "amp_bf16": "bf16",
    "amp_fp16": "fp16", "fp32": "fp32",
}  # fmt: skip
TOOLS = (
    (
        "litgpt",
        {**LITGPT, **{f"optimizer.init_args.{name}": word for name, word in OPTIMIZER.items()}},
        ("train.lr_warmup_steps", "train.micro_batch_size"),
        "train.epochs",
    ),
    (
        "Composer",
        {**COMPOSER, **{f"optimizer.{name}": word for name, word in OPTIMIZER.items()}},
        ("max_duration",),
        "max_duration",
    ),
)
"""Its name, its keys -> our words where the value means the same, keys of which one tells it, and the key of how long a
run is.
"""


TRAINERS = {"transformers": "Hugging Face's Trainer", "trl": "Hugging Face's Trainer", "composer": "Composer"}
"""package -> whose Trainer it has."""


def _of_tools(tree: Mapping[str, Any], place: str) -> None:
    """Raises WordsError for a tree of litgpt or Composer."""
    leaves = dict(flatten(tree))
    for tool, words, marks, length in TOOLS:
        if not any(mark in leaves for mark in marks):
            continue
        said = [
            f"{word}={show(leaves[key])}" for key, word in words.items() if leaves.get(key) not in (None, "", "auto")
        ]
        said += [
            f"precision={PRECISIONS[precision]}" for precision in (leaves.get("precision"),) if precision in PRECISIONS
        ]
        batches = str(leaves.get(length)).removesuffix("ba")
        if not any(word.startswith("steps=") for word in said):
            said.append(
                f"steps={batches}"
                if batches.isdecimal() and batches != str(leaves.get(length))
                else f"steps=<{show(leaves.get(length))} in steps>"
            )
        raise WordsError(
            f"{place}: a config of {tool}, which is not read. Type {' '.join(said)}, the optimizer and the schedule "
            "as they are there, the data, and the model."
        )


def refuse(tree: Mapping[str, Any], place: str) -> None:
    """Raises WordsError, with the words to type, for a tree of a tool that is known and not read."""
    _of_tools(tree, place)
    if not MARKS & set(tree) or "base_model" in tree:  # axolotl has some of the names
        return
    whose = "LLaMA-Factory" if "finetuning_type" in tree else "Hugging Face's Trainer"
    said = [
        f"{word}={show(tree[key])}"
        for key, word in WORDS.items()
        if key in tree and not isinstance(tree[key], Code | dict | None)
    ]
    said += [words for (key, value), words in SAID.items() if tree.get(key) == value]
    if tree.get("fsdp"):
        said.append("strategy=fsdp")
    if not any(word.startswith("steps=") for word in said):
        said.append(f"steps=<{show(tree.get('num_train_epochs', 3))} x samples / batch>")
    raise WordsError(
        f"{place}: TrainingArguments of {whose} are not read. Type {' '.join(said)}, the data, and {MODEL}, which "
        "lets any code of transformers run as you."
    )


def refuse_python(module: ast.Module, arguments: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Raises WordsError for a Python file of such a tool; `arguments` by the name of what is called with them."""
    for name, found in arguments.items():
        if name in ARGUMENTS:
            refuse({"do_train": True, **found}, place)
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    froms = [node.module or "" for node in imports]
    for node in imports:
        tool = TRAINERS.get((node.module or "").split(".")[0])
        if tool and any(name.name in ("Trainer", "Seq2SeqTrainer", "SFTTrainer") for name in node.names):
            raise WordsError(
                f"{place}: a script of {tool}, whose arguments are not in it. Type microbatch=<number> "
                f"optim.lr=<value> steps=<number>, the data, and {MODEL}."
            )
    if any(name.split(".")[0] == "torchtitan" for name in froms):
        made = next((node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)), "<function>")
        raise WordsError(
            f"{place}: a config of torchtitan in Python, of which no line is run here. Write it as JSON where "
            "torchtitan is installed, and import that: "
            f"python -c 'import dataclasses, json; from <its module> import {made} as f; "
            "print(json.dumps(dataclasses.asdict(f()), default=str))' > config.json"
        )
