"""Tools that are recognised but not imported, and the words to type instead: LLaMA-Factory, other classes of Hugging
Face's TrainingArguments, litgpt, Composer, and torchtitan's Python configs.
"""

import ast
from collections.abc import Mapping
from typing import Any

from dtrain.config.meaning import is_sentence, meant, of_value
from dtrain.errors import WordsError
from dtrain.integrations.importers.ledger import Code, flatten, names, show

ARGUMENTS = names(
    "GRPOConfig RewardConfig KTOConfig ORPOConfig CPOConfig PPOConfig RLOOConfig GKDConfig "
    "OnlineDPOConfig PRMConfig BCOConfig XPOConfig NashMDConfig DistillationConfig"
)
MARKS = names("per_device_train_batch_size per_device_eval_batch_size num_train_epochs remove_unused_columns do_train")
"""Keys that only TrainingArguments has: https://huggingface.co/docs/transformers/main_classes/trainer"""
FOREIGN = names("finetuning_type class")
"""Keys of LLaMA-Factory, and of a class that is not imported."""
ARGUED = names(
    "per_device_train_batch_size gradient_accumulation_steps learning_rate weight_decay adam_epsilon max_grad_norm "
    "max_steps warmup_steps warmup_ratio seed logging_steps save_steps save_total_limit eval_steps output_dir bf16 "
    "fp16 gradient_checkpointing torch_compile lr_scheduler_type optim fsdp"
)
"""Arguments of TrainingArguments that have words here."""
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
    plain = {key: value for key, value in plain.items() if value not in ("", "auto") and "${" not in str(value)}
    return [f"{word}={show(plain[key])}" for key, word in words.items() if key in plain]


def _meant(values: Mapping[str, Any]) -> list[str]:
    """The words to type for values by the names that other tools have in common."""
    told = [meant(key, show(value)) for key, value in values.items()]
    return [words for words in told if words and "<" not in words and not is_sentence(words)]


def refuse_assignments(module: ast.Module, place: str) -> None:
    """Raises WordsError for a Python file that assigns the values of a run, as nanoGPT's configs do."""
    given = {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    suggested = _meant(given)
    if len(suggested) > FEW:
        raise WordsError(
            f"{place}: a file of plain values, which dtrain does not import. Type {' '.join(suggested)}, and what is "
            "computed in it."
        )


UNITS = {"ba": "steps", "ep": "epochs"}
"""Unit of a length in Composer -> our word."""
FEW = 2
"""Values that a script may assign without being a config."""


def _refuse_tools(tree: Mapping[str, Any], place: str) -> None:
    """Raises WordsError for a tree of litgpt or Composer."""
    leaves = dict(flatten(tree))
    for tool, words, marks, length in TOOLS:
        if not any(mark in leaves for mark in marks):
            continue
        suggested = _suggested(leaves, words)
        precision = of_value("precision", show(leaves.get("precision")))
        suggested += [precision] if precision and not is_sentence(precision) else []
        asked = str(leaves.get(length))
        amount, unit = asked[:-2], asked[-2:]
        if length == "train.epochs" and asked.isdecimal():
            amount, unit = asked, "ep"
        if amount.isdecimal() and unit in UNITS:
            suggested.append(f"{UNITS[unit]}={amount}")
        elif not any(word.startswith("steps=") for word in suggested):
            suggested.append("steps=<number>" if leaves.get(length) is None else f"steps=<{asked} in steps>")
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
    given = {key: value for key, value in tree.items() if key in ARGUED and value not in (None, "auto", "", [], False)}
    suggested = _meant({key: value for key, value in given.items() if not isinstance(value, Code)})
    suggested += _schedule(tree)
    if not any(word.startswith("steps=") for word in suggested):
        passes = tree.get("num_train_epochs")
        suggested.append("epochs=<passes>" if isinstance(passes, Code) else f"epochs={show(passes or 3)}")
    suggested += _defaults(tree)
    raise WordsError(
        f"{place}: dtrain does not import TrainingArguments of {whose}. Type {' '.join(suggested)}, the data, and "
        f"{MODEL}."
    )


def _schedule(tree: Mapping[str, Any]) -> list[str]:
    """The words for the defaults of transformers: a line to 0, without warm-up."""
    words = [] if tree.get("lr_scheduler_type") else ["schedule=linear"]
    no_warmup = not tree.get("warmup_steps") and not tree.get("warmup_ratio")
    return [*words, "schedule.warmup=0"] if no_warmup or tree.get("lr_scheduler_type") == "constant" else words


def _defaults(tree: Mapping[str, Any]) -> list[str]:
    """The words for what transformers' AdamW and clipping have where the arguments say nothing."""
    decay, betas = tree.get("weight_decay") or 0, [tree.get("adam_beta1", 0.9), tree.get("adam_beta2", 0.999)]
    shown = [f"optim.weight_decay={'<it>' if isinstance(decay, Code) else show(decay)}"]
    shown += [] if any(isinstance(beta, Code) for beta in betas) else [f"optim.betas={show(betas)}"]
    return shown if tree.get("max_grad_norm") is not None else [*shown, "clip=1"]


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
