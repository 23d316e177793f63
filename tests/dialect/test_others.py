"""Files of tools that are not read: one line, with the words to type instead."""

import ast

import pytest

from dtrain.dialect import others, recognise
from dtrain.dialect.read import parse
from dtrain.errors import WordsError

ARGUMENTS = "output_dir='o', per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=5e-5, num_train_epochs=3, bf16=True, warmup_ratio=0.03"


def test_training_arguments_in_python_are_told_in_words() -> None:
    text = f"from transformers import Trainer, TrainingArguments\nargs = TrainingArguments({ARGUMENTS}, lr_scheduler_type='cosine')\ntrainer = Trainer(model, args)\n"
    with pytest.raises(WordsError) as told:
        parse(text.encode(), "train.py")
    for word in (
        "microbatch=8",
        "accumulate=2",
        "optim.lr=5e-05",
        "precision=bf16",
        "schedule=cosine",
        "schedule.warmup=0.03",
        "steps=<3 x samples / batch>",
    ):
        assert f" {word}" in str(told.value), word


def test_training_arguments_as_json_are_told_in_words() -> None:
    with pytest.raises(WordsError, match=r"TrainingArguments of Hugging Face.*microbatch=4 .*steps=100"):
        recognise({"per_device_train_batch_size": 4, "max_steps": 100, "bf16": False}, "args.json")


def test_a_config_of_torchtitan_in_python_is_to_be_written_as_json() -> None:
    text = "from torchtitan.trainer import Trainer\n\ndef llama3_8b() -> Trainer.Config:\n    return Trainer.Config(steps=1000)\n"
    with pytest.raises(WordsError, match=r"torchtitan in Python.*import llama3_8b as f; .*json\.dumps.*config\.json"):
        parse(text.encode(), "config_registry.py")


@pytest.mark.parametrize("tree", [{"distributed_type": "FSDP", "fsdp_config": {}}, {"base_model": "x", "micro_batch_size": 1, "save_total_limit": 2}])
def test_those_who_share_names_with_them_are_not_meant(tree: dict[str, object]) -> None:
    others.refuse(tree, "config.yaml")
    others.refuse_python(ast.parse("from lightning import Trainer\nTrainer(max_steps=1)"), {}, "train.py")
