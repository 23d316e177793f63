"""The arguments of Hugging Face's Trainer itself: each is listed, and those with a word become it."""

from pathlib import Path
from typing import Any

import pytest
from imported import Imported, imported

CODE = """from transformers import Trainer, TrainingArguments, EarlyStoppingCallback, AutoModelForCausalLM
raise SystemExit('not run')
model = AutoModelForCausalLM.from_pretrained('gpt2')
args = TrainingArguments('runs/a', max_steps=50, learning_rate=1e-3, lr_scheduler_type='cosine', {of_args})
class Mine(Trainer):
    pass
trainer = {kind}(model, args, {given})
"""


def script(folder: Path, given: str, kind: str = "Trainer", of_args: str = "") -> Imported:
    path = folder / "train.py"
    path.write_text(CODE.format(kind=kind, given=given, of_args=of_args))
    return imported(path)


def test_early_stopping_is_a_word(tmp_path: Path) -> None:
    given = "callbacks=[EarlyStoppingCallback(early_stopping_patience=4, early_stopping_threshold=0.01)]"
    read = script(tmp_path, given)
    assert {word: value for word, value in read.words.items() if word.startswith("stop")} == {
        "stop.metric": "eval_loss", "stop.patience": 4, "stop.least": 0.01,
    }  # fmt: skip
    assert not read.told("refused")
    assert script(tmp_path, "callbacks=[EarlyStoppingCallback()]").words["stop.patience"] == 1
    assert script(tmp_path, "callbacks=[EarlyStoppingCallback(7)]").words["stop.patience"] == 7
    listed = script(tmp_path, given, of_args="metric_for_best_model='f1'").words
    assert (listed["stop.metric"], listed["evaluate.metrics"], listed["stop.patience"]) == ("eval_f1", ["f1"], 4)
    other = script(tmp_path, given, of_args="metric_for_best_model='rouge'")
    assert "stop.patience" not in other.words
    assert "Type stop.metric=" in other.told("refused")["Trainer.callbacks.0.class_path"]


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ("model_init=make", "Trainer.model_init", "model._target_="),
        ("data_collator=Padded(3)", "Trainer.data_collator.class_path", "data.collate._target_="),
        ("collate", "Trainer.data_collator", "data.collate._target_="),
        ("compute_loss_func=loss", "Trainer.compute_loss_func", "objective._target_="),
        ("compute_metrics=f1", "Trainer.compute_metrics", "evaluate.metrics="),
        ("callbacks=[Own(3)]", "Trainer.callbacks.0.class_path", "Own is not run. Write a hook"),
        ("callbacks=made()", "Trainer.callbacks.class_path", "Write a hook"),
        ("callbacks=more", "Trainer.callbacks", "Write a hook"),
        ("peft_config=config", "Trainer.peft_config", "adapter=lora"),
        ("new_argument=3", "Trainer.new_argument", "no such key"),
    ],
)
def test_every_argument_is_listed(given: str, key: str, said: str, tmp_path: Path) -> None:
    assert said in script(tmp_path, given).told("refused")[key]


def test_what_data_names_is_not_needed(tmp_path: Path) -> None:
    read = script(tmp_path, "train_dataset=rows, eval_dataset=rows[:9], processing_class=tokenizer")
    names = ("train_dataset", "eval_dataset", "processing_class")
    assert {*read.told("unneeded")} >= {f"Trainer.{name}" for name in names}
    assert not read.told("refused")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("optimizers=(SGD(model.parameters(), lr=0.1), None)", {"optim", "optim.lr"}),
        ("optimizers=(SGD(model.parameters()), Linear(3))", {"optim", "optim.lr", "schedule"}),
        ("optimizers=both", {"optim", "optim.lr", "schedule"}),
        ("optimizers=(optimizer, None)", {"optim", "optim.lr"}),
        ("optimizers=(None, None)", set()),
        ("optimizer_cls_and_kwargs=(SGD, {'lr': 0.1})", {"optim", "optim.lr"}),
    ],
)
def test_optimizers_of_code_are_asked_for(given: str, asked: set[Any], tmp_path: Path) -> None:
    read = script(tmp_path, given)
    assert read.asked == asked
    assert bool(read.told("refused")) == bool(asked)
    assert ("optim.betas" in read.words) == ("optim" not in asked)


def test_a_trainer_of_the_file_is_named(tmp_path: Path) -> None:
    read = script(tmp_path, "callbacks=[EarlyStoppingCallback(2)]", kind="Mine")
    assert "are not run. Type objective._target_=" in read.told("refused")["Trainer.class"]
    assert read.words["stop.patience"] == 2
