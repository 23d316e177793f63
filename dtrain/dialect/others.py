"""Tools that are recognised but not imported, and the words to type instead: LLaMA-Factory, other classes of Hugging
Face's TrainingArguments, litgpt, Composer, and torchtitan's Python configs.
"""

import ast
from collections.abc import Mapping
from typing import Any

from dtrain.dialect.ledger import Code, flatten, names, show
from dtrain.errors import WordsError

ARGUMENTS = names("Seq2SeqTrainingArguments GRPOConfig RewardConfig KTOConfig")
MARKS = names("per_device_train_batch_size per_device_eval_batch_size num_train_epochs remove_unused_columns do_train")
"""Keys that only TrainingArguments has: https://huggingface.co/docs/transformers/main_classes/trainer"""
FOREIGN = names("finetuning_type class")
"""Keys of LLaMA-Factory, and of a class that is not imported."""
WORDS = {
    "per_device_train_batch_size": "microbatch", "gradient_accumulation_steps": "accumulate",
    "learning_rate": "optim.lr", "weight_decay": "optim.weight_decay",
    "adam_epsilon": "optim.eps", "max_grad_norm": "clip", "max_steps": "steps", "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup",
    "seed": "seed", "logging_steps": "log.every", "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep", "eval_steps": "evaluate.every",
    "output_dir": "out",
}  # fmt: skip
"""Key of TrainingArguments -> dtrain's word for the same value."""
WORDS_BY_VALUE = {
    ("bf16", True): "precision=bf16", ("fp16", True): "precision=fp16", ("gradient_checkpointing", True): "remat=full",
    ("torch_compile", True): "compile=blocks",
    ("lr_scheduler_type", "cosine"): "schedule=cosine",
    ("lr_scheduler_type", "constant_with_warmup"): "schedule=constant",
    ("lr_scheduler_type", "constant"): "schedule=constant schedule.warmup=0", ("optim", "adafactor"): "optim=adafactor",
}  # fmt: skip
MODEL = "model=hf model.name=<name>"


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
"""Per tool: name, its keys -> dtrain's words for the same values, keys that identify it, and the key of the run's
length.
"""


TRAINERS = {"transformers": "Hugging Face's Trainer", "trl": "Hugging Face's Trainer", "composer": "Composer"}
"""package -> the owner of its Trainer."""


def _suggested(values: Mapping[str, Any], words: Mapping[str, str]) -> list[str]:
    """The words to type for the plain values of another tool's keys."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Code | dict | None)}
    return [f"{word}={show(plain[key])}" for key, word in words.items() if plain.get(key, "") not in ("", "auto")]


def _refuse_tools(tree: Mapping[str, Any], place: str) -> None:
    """Raises WordsError for a tree of litgpt or Composer."""
    leaves = dict(flatten(tree))
    for tool, words, marks, length in TOOLS:
        if not any(mark in leaves for mark in marks):
            continue
        suggested = _suggested(leaves, words)
        if leaves.get("precision") in PRECISIONS:
            suggested.append(f"precision={PRECISIONS[leaves['precision']]}")
        asked = str(leaves.get(length))
        batches = asked.removesuffix("ba")
        if batches.isdecimal() and batches != asked:
            suggested.append(f"steps={batches}")
        elif not any(word.startswith("steps=") for word in suggested):
            suggested.append(f"steps=<{show(leaves.get(length))} in steps>")
        raise WordsError(
            f"{place}: dtrain does not import configs of {tool}. Type {' '.join(suggested)}, the same optimizer and "
            f"schedule, the data, and the model."
        )


def refuse(tree: Mapping[str, Any], place: str) -> None:
    """Raises WordsError, with the words to type, for a tree of a recognised tool that dtrain does not import."""
    _refuse_tools(tree, place)
    if not MARKS & set(tree) or not FOREIGN & set(tree):
        return
    whose = "LLaMA-Factory" if "finetuning_type" in tree else "Hugging Face's Trainer"
    suggested = _suggested(tree, WORDS)
    suggested += [words for (key, value), words in WORDS_BY_VALUE.items() if tree.get(key) == value]
    if tree.get("fsdp"):
        suggested.append("strategy=fsdp")
    if not any(word.startswith("steps=") for word in suggested):
        suggested.append(f"steps=<{show(tree.get('num_train_epochs', 3))} x samples / batch>")
    raise WordsError(
        f"{place}: dtrain does not import TrainingArguments of {whose}. Type {' '.join(suggested)}, the data, and "
        f"{MODEL}."
    )


def refuse_python(module: ast.Module, arguments: Mapping[str, Mapping[str, Any]], place: str) -> None:
    """Raises WordsError for a Python file of such a tool; `arguments` maps a called name to its arguments."""
    for name, values in arguments.items():
        if name in ARGUMENTS:
            refuse({"do_train": True, "class": name, **values}, place)
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    packages = [(node.module or "").split(".")[0] for node in imports]
    for node, package in zip(imports, packages, strict=True):
        tool = TRAINERS.get(package)
        if tool and any(name.name in ("Trainer", "Seq2SeqTrainer", "SFTTrainer") for name in node.names):
            raise WordsError(
                f"{place}: a script of {tool} without its arguments. Type microbatch=<number> "
                f"optim.lr=<value> steps=<number>, the data, and {MODEL}."
            )
    if "torchtitan" in packages:
        made = next((node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)), "<function>")
        raise WordsError(
            f"{place}: a config of torchtitan in Python, which dtrain does not run. Export it as JSON where "
            f"torchtitan is installed, and import that: "
            f"python -c 'import dataclasses, json; from <its module> import {made} as f; "
            "print(json.dumps(dataclasses.asdict(f()), default=str))' > config.json"
        )
