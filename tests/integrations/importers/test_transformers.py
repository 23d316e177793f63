"""Hugging Face's Trainer and TRL, against the classes themselves."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from imported import Imported, example, imported
from transformers import TrainingArguments

from dtrain.integrations.importers.transformers import RATES, RULES

DPO = "from trl import DPOConfig\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained({model})\nargs = DPOConfig({arguments})\n"


def script(folder: Path, arguments: str, name: str = "TrainingArguments", more: str = "") -> Imported:
    path = folder / "train.py"
    path.write_text(
        f"from transformers import {name}\nraise SystemExit('not run')\nargs = {name}({arguments})\n{more}\n"
    )
    return imported(path)


def test_sft_with_lora() -> None:
    read = example("transformers_sft.py")
    assert read.words == {
        "model": "hf", "model.name": "Qwen/Qwen2.5-0.5B-Instruct", "model.task": "causal_lm",
        "adapter": "lora", "adapter.rank": 16, "adapter.alpha": 32, "adapter.dropout": 0.05, "adapter.targets": ["q_proj", "v_proj"],
        "steps": 300, "precision": "bf16", "optim": "adamw", "optim.weight_decay": 0.0, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.lr": 2e-4,
        "schedule": "cosine", "schedule.warmup": 10, "schedule.floor": 0.0, "strategy": "ddp", "remat": "full", "microbatch": 4, "accumulate": 2, "log.every": 5,
        "evaluate.every": 50, "checkpoint.keep": 2, "clip": 1.0, "seed": 42,
    }  # fmt: skip
    typed = {"data.train_on": "answers", "data.packing": "pack", "data.sequence": 2048, "out": "tuned"}
    assert {word: read.command[word] for word in typed} == typed and read.open == {"data", "data.holdout"}
    assert not read.told("refused")


def test_arguments_as_json() -> None:
    read = example("transformers_args.json")
    assert read.words["strategy"] == "fsdp" and read.words["model.name"] == "me/small"
    assert read.words["optim.betas"] == [0.9, 0.95] and read.words["precision"] == "bf16"
    assert not read.asked and (read.words["epochs"], read.words["checkpoint.every"]) == (3, "epoch")


def test_every_argument_of_the_class_has_a_rule() -> None:
    assert {field.name for field in dataclasses.fields(TrainingArguments)} - {*RULES} == set()


def test_defaults_are_those_of_the_class(tmp_path: Path) -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    words = script(tmp_path, "max_steps=100").words
    assert words["optim.lr"] == RATES["TrainingArguments"] == theirs["learning_rate"]
    assert words["optim.betas"] == [theirs["adam_beta1"], theirs["adam_beta2"]]
    named = {
        "optim.eps": "adam_epsilon", "optim.weight_decay": "weight_decay", "microbatch": "per_device_train_batch_size", "clip": "max_grad_norm",
        "accumulate": "gradient_accumulation_steps", "seed": "seed", "schedule.warmup": "warmup_steps",
    }  # fmt: skip
    assert {word: words[word] for word in named} == {word: theirs[name] for word, name in named.items()}
    assert theirs["lr_scheduler_type"] == "linear" and words["schedule"] == "linear" and words["schedule.floor"] == 0.0
    assert theirs["optim"] == "adamw_torch_fused" and words["optim"] == "adamw" and words["precision"] == "fp32"


@pytest.mark.campaign("documents")
def test_defaults_of_trl_are_those_of_its_classes() -> None:
    import trl

    for name in ("SFTConfig", "DPOConfig"):
        fields = {field.name: field.default for field in dataclasses.fields(getattr(trl, name))}
        assert fields["learning_rate"] == RATES[name] and fields["gradient_checkpointing"] is True
        assert fields["bf16"] is None and fields["max_length"] == 1024
        assert {*fields} - {*RULES} == set()
    assert fields["beta"] == 0.1


def test_dpo(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        DPO.format(
            model="'me/tuned', dtype='bfloat16'",
            arguments="beta=0.2, loss_type=['ipo'], max_steps=9, lr_scheduler_type='constant'",
        )
    )
    read = imported(path)
    assert {word: value for word, value in read.words.items() if word.startswith(("objective", "model"))} == {
        "objective": "dpo", "objective.loss": "ipo", "objective.beta": 0.2, "model": "hf", "model.name": "me/tuned", "model.task": "causal_lm",
    }  # fmt: skip
    assert read.words["optim.lr"] == 1e-6 and read.words["schedule.warmup"] == 0
    assert read.words["precision"] == "bf16_true"


@pytest.mark.parametrize(
    ("arguments", "more", "asked"),
    [
        ("num_train_epochs=passes", "", {"epochs"}),
        ("num_train_epochs=2, max_steps=most", "", {"steps"}),
        ("max_steps=5, optim='paged_adamw_8bit'", "", {"optim", "optim.lr", "optim.weight_decay", "optim.betas"}),
        ("max_steps=5, learning_rate=float(lr)", "", {"optim.lr"}),
        ("max_steps=5, bf16=torch.cuda.is_bf16_supported()", "", {"precision"}),
        ("max_steps=n * 2, learning_rate=lr, warmup_ratio=w, lr_scheduler_type='cosine'", "", {"steps", "optim.lr", "schedule.warmup"}),
        ("max_steps=5, **more()", "", {"precision", "optim.lr"}),
        ("max_steps=5", "AutoModelForCausalLM.from_pretrained(args.model)", {"model.name"}),
        ("max_steps=5", "LoraConfig(r=4, target_modules='.*q')", {"adapter.targets"}),
        ("max_steps=5", "LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=['q'])", {"adapter.alpha"}),
        ("max_steps=5", "AutoModelForCausalLM.from_pretrained('a', quantization_config=Four(load=1))", {"adapter"}),
    ],
)  # fmt: skip
def test_what_the_file_does_not_say_is_asked_for(arguments: str, more: str, asked: set[str], tmp_path: Path) -> None:
    read = script(tmp_path, arguments, more=more)
    assert read.asked - {"data.train_on"} == asked
    assert {word for word in asked if read.ledger.words[word] != "???"} == set()


def test_the_adapter_of_a_quantised_base_is_on_the_command_line(tmp_path: Path) -> None:
    more = "AutoModelForCausalLM.from_pretrained('a', quantization_config=Four(load=1))\nLoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=['q'])"
    read = script(tmp_path, "max_steps=5", more=more)
    assert {word: value for word, value in read.command.items() if word.startswith("adapter")} == {
        "adapter": "<lora>", "adapter.rank": 4, "adapter.alpha": 8, "adapter.targets": "[q]",
    }  # fmt: skip
    assert not [word for word in read.words if word.startswith("adapter")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("eval_strategy='no', eval_steps=7", {"evaluate.every": 0}),
        ("eval_strategy='epoch', eval_steps=7", {"evaluate.every": "epoch"}),
        ("eval_steps=7", {"evaluate.every": 7}),
        ("max_grad_norm=0", {"clip": None}),
        ("fp16=True", {"precision": "fp16"}),
        ("fsdp='shard_grad_op'", {"strategy": "fsdp", "strategy.reshard": "never"}),
        (
            "warmup_steps=0.1, lr_scheduler_type='cosine'",
            {"schedule": "cosine", "schedule.warmup": 0.1, "schedule.floor": 0.0},
        ),
        ("warmup_ratio=0.06", {"schedule": "linear", "schedule.warmup": 0.06, "schedule.floor": 0.0}),
        ("warmup_steps=5, lr_scheduler_type='constant'", {"schedule": "constant", "schedule.warmup": 0}),
        ("lr_scheduler_type='constant_with_warmup', warmup_steps=5", {"schedule": "constant", "schedule.warmup": 5}),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}",
            {"schedule": "cosine", "schedule.floor": 0.1},
        ),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr': 1e-5}, learning_rate=1e-4",
            {"schedule": "cosine", "schedule.floor": 0.1},
        ),
    ],
)
def test_what_each_argument_means(arguments: str, words: dict[str, Any], tmp_path: Path) -> None:
    read = script(tmp_path, f"max_steps=50, {arguments}")
    assert {word: read.words.get(word, "none") for word in words} == words
    assert words or "evaluate.every" not in read.words
    assert read.plan(tmp_path).steps == 50


def test_the_output_folder_is_the_first_argument(tmp_path: Path) -> None:
    read = script(tmp_path, "'runs/a', max_steps=3")
    assert read.command["out"] == "runs/a" and not read.told("refused").keys() & {"TrainingArguments.args.0"}


def test_a_revision_is_a_part_of_the_name_and_one_report_a_logger(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: me/small\nmodel_revision: v2\ndataset_name: me/chats\npacking: true\nreport_to: [tensorboard]\n"
    )
    read = imported(path)
    assert read.words["model.name"] == "me/small@v2" and read.words["logger"] == ["console", "tensorboard"]
    assert {*read.told("refused")} == {"dataset_name"}


def test_an_argument_that_is_an_object_has_the_rule_of_its_name(tmp_path: Path) -> None:
    read = script(tmp_path, "max_steps=5, hub_token=Folder.get(), logging_steps=every(3), learning_rate=rate(2)")
    assert "TrainingArguments.hub_token.class_path" in read.told("unneeded")
    assert "Type log.every=" in read.told("refused")["TrainingArguments.logging_steps.class_path"]
    assert "optim.lr" in read.asked and not [why for why in read.told("refused").values() if "no such key" in why]


@pytest.mark.parametrize(("more", "warmup"), [(", warmup_steps=30", 30), ("", 0)])
def test_a_schedule_of_deepspeed_is_filled_in_by_the_arguments(more: str, warmup: int, tmp_path: Path) -> None:
    params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    file = {"scheduler": {"type": "WarmupDecayLR", "params": params}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(file))
    read = script(tmp_path, f"num_train_epochs=2, learning_rate=1e-4, deepspeed='ds.json'{more}")
    assert {word: read.words.get(word) for word in ("schedule", "schedule.warmup", "epochs", "optim.lr")} == {
        "schedule": "linear", "schedule.warmup": warmup, "epochs": 2, "optim.lr": 1e-4,
    }  # fmt: skip
    assert not read.asked and "logarithmic" in read.told("carried")["ds.json: scheduler.type"]
