"""Files of tools that are not read: one line, with the words to type instead."""

import ast

import pytest

from dtrain.errors import WordsError
from dtrain.integrations.importers import others, recognise
from dtrain.integrations.importers.read import parse

ARGUMENTS = "output_dir='o', per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=5e-5, num_train_epochs=3, bf16=True, warmup_ratio=0.03"


@pytest.mark.parametrize("name", ["RewardConfig", "GRPOConfig"])
def test_other_arguments_in_python_are_told_in_words(name: str) -> None:
    text = f"from transformers import Trainer, {name}\nargs = {name}({ARGUMENTS}, lr_scheduler_type='cosine')\ntrainer = Trainer(model, args)\n"
    with pytest.raises(WordsError) as raised:
        parse(text.encode(), "train.py")
    for word in (
        "microbatch=8",
        "accumulate=2",
        "optim.lr=5e-05",
        "precision=bf16",
        "schedule=cosine schedule.floor=0",
        "schedule.warmup=0.03",
        "epochs=3",
        "optim.weight_decay=0 optim.betas=[0.9,0.999] clip=1",
    ):
        assert f" {word}" in str(raised.value), word


LITGPT = {
    "precision": "bf16-true", "devices": 4, "num_nodes": 1, "data": {"class_path": "litgpt.data.Alpaca2k"}, "seed": 1337,
    "train": {"save_interval": 200, "global_batch_size": 64, "micro_batch_size": 4, "lr_warmup_steps": 25, "epochs": 1, "max_steps": None},
    "eval": {"interval": 25}, "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
}  # fmt: skip
"""Facts of Lightning-AI/litgpt config_hub/finetune/llama-3-8b/full.yaml."""
LORA = {**LITGPT, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "devices": 1}
"""Of config_hub/finetune/falcon-7b/lora.yaml, whose names are axolotl's too."""
COMPOSER = {
    "max_seq_len": 128, "model": {"name": "mosaic_bert"}, "optimizer": {"name": "decoupled_adamw", "lr": 5e-4, "betas": [0.9, 0.98], "eps": 1e-6},
    "max_duration": "286720000sp", "global_train_batch_size": 4096, "seed": 17, "device_train_microbatch_size": 128, "precision": "amp_bf16",
}  # fmt: skip
"""Of mosaicml/examples examples/benchmarks/bert/yamls/main/mosaic-bert-base-uncased.yaml."""


@pytest.mark.parametrize(
    ("tree", "tool", "words"),
    [
        (
            LITGPT,
            "litgpt",
            "batch=64 microbatch=4 schedule.warmup=25 checkpoint.every=200 precision=bf16_true optim.lr=0.0002 epochs=1",
        ),
        (LORA, "litgpt", "batch=64 devices=1 optim.betas=[0.9,0.95]"),
        (COMPOSER, "Composer", "batch=4096 microbatch=128 seed=17 precision=bf16 optim.lr=0.0005 steps=<286720000sp"),
        ({**COMPOSER, "max_duration": "4800ba"}, "Composer", "steps=4800"),
        ({**COMPOSER, "max_duration": "2ep"}, "Composer", "epochs=2"),
    ],
)
def test_a_tool_that_is_not_read_is_named(tree: dict[str, object], tool: str, words: str) -> None:
    with pytest.raises(WordsError, match=f"does not import configs of {tool}") as raised:
        recognise(tree, "full.yaml")
    for word in words.split():
        assert f" {word}" in str(raised.value), word


FACTORY = {
    "model_name_or_path": "OpenMOSS-Team/MOSS-VL-Instruct-0708", "stage": "sft", "do_train": True, "finetuning_type": "full", "cutoff_len": 4096,
    "deepspeed": "examples/deepspeed/ds_z3_config.json", "output_dir": "saves/full/sft", "logging_steps": 10, "save_steps": 500, "learning_rate": 1e-5,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
}  # fmt: skip
"""Facts of hiyouga/LLaMA-Factory examples/train_full/mossvl_full_sft.yaml."""


def test_training_arguments_of_another_tool_are_told_in_words() -> None:
    with pytest.raises(WordsError, match="does not import TrainingArguments of LLaMA-Factory") as raised:
        recognise(FACTORY, "sft.yaml")
    for word in [
        "microbatch=1",
        "accumulate=1",
        "optim.lr=1e-05",
        "precision=bf16",
        "schedule=cosine",
        "schedule.warmup=0.1",
        "checkpoint.every=500",
        "epochs=3",
    ]:
        assert f" {word}" in str(raised.value), word
    silent = {key: value for key, value in FACTORY.items() if key not in ("lr_scheduler_type", "warmup_ratio")}
    with pytest.raises(WordsError, match=r"schedule=linear schedule\.warmup=0 epochs=3"):
        recognise(silent, "sft.yaml")


@pytest.mark.parametrize(("package", "tool"), [("transformers", "Hugging Face's Trainer"), ("composer", "Composer")])
def test_the_trainer_of_another_tool_is_not_taken_for_lightnings(package: str, tool: str) -> None:
    with pytest.raises(WordsError, match=f"a script of {tool} without its arguments"):
        parse(
            f"from {package} import Trainer\ntrainer = Trainer(model=model, args=parser.parse())\n".encode(), "train.py"
        )


def test_a_config_of_torchtitan_in_python_is_to_be_written_as_json() -> None:
    text = "from torchtitan.trainer import Trainer\n\ndef llama3_8b() -> Trainer.Config:\n    return Trainer.Config(steps=1000)\n"
    with pytest.raises(WordsError, match=r"torchtitan in Python.*import llama3_8b as f; .*json\.dumps.*config\.json"):
        parse(text.encode(), "config_registry.py")


@pytest.mark.parametrize(
    "tree",
    [
        {"distributed_type": "FSDP", "fsdp_config": {}},
        {"base_model": "x", "micro_batch_size": 1, "save_total_limit": 2},
    ],
)
def test_those_who_share_names_with_them_are_not_meant(tree: dict[str, object]) -> None:
    others.refuse(tree, "config.yaml")
    others.refuse_python(ast.parse("from lightning import Trainer\nTrainer(max_steps=1)"), {}, "train.py")


def test_what_a_file_looks_up_or_leaves_empty_is_not_suggested() -> None:
    tree = {
        "global_train_batch_size": 4096,
        "max_duration": None,
        "seed": "${global_seed}",
        "precision": "amp_bf16",
        "optimizer": {"lr": 1e-3},
    }
    with pytest.raises(WordsError) as raised:
        recognise({**tree, "max_duration": None}, "mcli.yaml")
    assert "steps=<number>" in str(raised.value) and "${" not in str(raised.value) and "null" not in str(raised.value)


NANOGPT = """
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
weight_decay = 1e-1
wandb_log = True
"""
"""Facts of karpathy/nanoGPT config/train_gpt2.py."""


def test_a_file_of_plain_values_is_told_in_words() -> None:
    with pytest.raises(WordsError, match="a file of plain values") as raised:
        parse(NANOGPT.encode(), "train_gpt2.py")
    for word in ("data.sequence=1024", "steps=600000", "evaluate.every=1000"):
        assert f" {word}" in str(raised.value), word
    assert "accumulate" not in str(raised.value)
