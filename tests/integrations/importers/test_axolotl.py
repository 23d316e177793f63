"""Values of axolotl's files, against its documentation and the defaults of transformers' Trainer."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import Imported, example, imported


def config(folder: Path, **keys: Any) -> Imported:
    path = folder / "axolotl.yaml"
    path.write_text(yaml.safe_dump({"base_model": "me/small", "sequence_len": 128, "micro_batch_size": 1, **keys}))
    return imported(path)


def test_full_finetuning() -> None:
    read = example("axolotl_fft.yaml")
    assert read.words == {
        "precision": "bf16_true", "model": "hf", "model.name": "meta-llama/Llama-3.2-1B", "model.task": "causal_lm", "optim": "adamw", "optim.betas": [0.9, 0.95], "optim.eps": 1e-8, "optim.weight_decay": 0.01, "optim.lr": 2e-5, "schedule": "cosine",
        "schedule.floor": 0.1, "schedule.warmup": 0.05, "strategy": "ddp", "microbatch": 2, "accumulate": 4, "clip": 0.5, "remat": "full", "log.every": 1, "epochs": 2,
        "checkpoint.every": "epoch", "seed": 42,
    }  # fmt: skip
    assert "trust" not in read.command
    assert read.command["data.sequence"] == 4096
    assert read.command["data.holdout"] == "0.02" and read.command["data.packing"] == "pack"
    assert read.command["evaluate.every"] == "<samples / batch / 4>"
    refused = read.told("refused")
    assert {
        "evals_per_epoch",
        "datasets.1.field_messages",
    } <= set(refused)
    assert "data.kind=instruction" in refused["datasets.0.type"]
    assert "another dataset" in refused["datasets.1.type"]


def test_deepspeed_by_a_file_that_axolotl_fills_in() -> None:
    read = example("axolotl_deepspeed.yaml")
    assert read.words == {
        "steps": 1000, "precision": "bf16", "model": "hf", "model.name": "mistralai/Mistral-7B-v0.3", "model.task": "causal_lm",
        "optim": "adamw", "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
        "optim.weight_decay": 0.0, "optim.lr": 1e-5, "schedule": "linear", "schedule.warmup": 50, "schedule.floor": 0.0, "strategy": "zero3",
        "log.every": 2000, "microbatch": 4, "accumulate": 2, "seed": 3407, "evaluate.every": 50, "checkpoint.every": 100, "checkpoint.keep": 2, "clip": 1.0,
    }  # fmt: skip
    assert read.told("unneeded")["ds_zero3_auto.json: train_batch_size"] == "filled in by axolotl's own keys"


def test_qlora_is_asked_for_and_what_is_left_is_typed() -> None:
    read = example("axolotl_qlora_fsdp.yaml")
    of_groups = ("adapter", "optim", "schedule", "data")
    assert [word for word in read.words if word.startswith(of_groups)] == ["schedule.warmup"]
    assert read.words["strategy.offload"] == "cpu"
    assert read.words["model.name"] == "NousResearch/Llama-2-7b-hf"
    assert read.command["optim.lr"] == "<0.0002 with paged_adamw_8bit>"
    assert read.command["optim"] == "<adamw, sgd, muon or adafactor>"
    assert {word: value for word, value in read.command.items() if word.startswith("adapter")} == {
        "adapter": "<lora>", "adapter.rank": 32, "adapter.alpha": 16, "adapter.dropout": 0.05, "adapter.targets": "null",
    }  # fmt: skip
    assert "quantise" in read.told("refused")["load_in_4bit"]
    assert "preference" in read.told("refused")["rl"]
    assert "objective" in read.asked


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "LlamaForCausalLM", "model_revision": "v1"}, {"model.name": "me/small@v1", "model.task": "causal_lm"}),
        ({"model_type": "AutoModelForSequenceClassification"}, {"model.name": "me/small", "model.task": "classification"}),
        ({"reinit_weights": True}, {"model.name": "me/small", "model.task": "causal_lm", "model.weights": "random"}),
        (
            {"overrides_of_model_config": {"rope_scaling": {"type": "linear", "factor": 2.0}}},
            {"model.name": "me/small", "model.task": "causal_lm", "model.config": {"rope_scaling": {"type": "linear", "factor": 2.0}}},
        ),
        ({"model_type": "MambaLMHeadModel"}, {}),
    ],
)  # fmt: skip
def test_models_of_the_hub(keys: dict[str, Any], words: dict[str, Any], tmp_path: Path) -> None:
    read = config(tmp_path, **keys)
    assert {word: value for word, value in read.words.items() if word.startswith("model.")} == words
    assert read.words.get("model") == ("hf" if words else None) and ("model" in read.open) == (not words)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"early_stopping_patience": 2, "val_set_size": 0.1}, {"stop.metric": "eval_loss", "stop.patience": 2}),
        ({"early_stopping_patience": 2, "val_set_size": 0.1, "metric_for_best_model": "bleu"}, {}),
        ({"early_stopping_patience": 2}, {}),
    ],
)
def test_early_stopping(keys: dict[str, Any], words: dict[str, Any], tmp_path: Path) -> None:
    read = config(tmp_path, **keys)
    assert {word: value for word, value in read.words.items() if word.startswith("stop")} == words
    assert ("early_stopping_patience" in read.told("refused")) == (not words)


@pytest.mark.parametrize(
    "odd",
    [{"warmup_steps": "many"}, {"warmup_steps": -4}, {"warmup_steps": True}, {"warmup_steps": {"a": 1}}, {"warmup_ratio": 3}],
)  # fmt: skip
def test_an_odd_warmup_is_asked_for(odd: dict[str, Any], tmp_path: Path) -> None:
    read = config(tmp_path, lr_scheduler="cosine", max_steps=100, **odd)
    assert "schedule.warmup" in read.asked and "schedule.warmup" not in read.words
    (said,) = [why for key, why in read.told("refused").items() if key.startswith("warmup")]
    assert said.startswith("a warm-up is a number of steps")


@pytest.mark.parametrize(
    ("keys", "warmup"),
    [
        ({"warmup_steps": 20}, 20),
        ({"warmup_ratio": 0.1, "max_steps": 255}, 25),
        ({"warmup_ratio": 0.1}, 0.1),
        ({"max_steps": 1000}, 30),
        ({"max_steps": 100_000}, 100),
        ({}, 0.03),
    ],
)
def test_warmup(keys: dict[str, Any], warmup: float, tmp_path: Path) -> None:
    assert config(tmp_path, lr_scheduler="cosine", **keys).words["schedule.warmup"] == warmup


def test_a_linear_decay_needs_no_steps(tmp_path: Path) -> None:
    read = config(tmp_path, lr_scheduler="linear", num_epochs=3, warmup_steps=10, cosine_min_lr_ratio=0.1)
    assert {word: value for word, value in read.words.items() if word.startswith(("schedule", "epochs"))} == {
        "schedule": "linear", "schedule.warmup": 10, "schedule.floor": 0.0, "epochs": 3,
    }  # fmt: skip
    assert "only the cosine" in read.told("unneeded")["cosine_min_lr_ratio"]


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({}, {"microbatch": 1, "accumulate": 1, "epochs": 1}),
        ({"micro_batch_size": 2, "batch_size": 8}, {"microbatch": 2, "accumulate": 4, "epochs": 1}),
        ({"batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 5}, {"microbatch": 1, "accumulate": 2, "steps": 5}),
    ],
)  # fmt: skip
def test_sizes_and_length_have_the_defaults_of_axolotl(
    keys: dict[str, Any], sizes: dict[str, int], tmp_path: Path
) -> None:
    words = config(tmp_path, **keys).words
    assert {word: words[word] for word in ("microbatch", "accumulate", "epochs", "steps") if word in words} == sizes


def test_held_out_samples_are_a_part(tmp_path: Path) -> None:
    assert "data.holdout=<200 / samples>" in config(tmp_path, val_set_size=200).told("refused")["val_set_size"]


def test_code_of_the_hub_is_not_run(tmp_path: Path) -> None:
    assert "does not run" in config(tmp_path, trust_remote_code=True).told("refused")["trust_remote_code"]
