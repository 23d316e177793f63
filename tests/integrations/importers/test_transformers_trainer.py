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


ADAM = {"optim", "optim.lr", "optim.weight_decay", "optim.betas"}
CURVE = {"schedule", "schedule.warmup"}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("optimizers=(SGD(model.parameters(), lr=0.1), None)", {"optim", "optim.lr", "optim.weight_decay"}),
        ("optimizers=(SGD(model.parameters()), Linear(3))", {"optim", "optim.lr", "optim.weight_decay", *CURVE}),
        ("optimizers=(AdamW(model.parameters()), None)", ADAM),
        ("optimizers=both", {*ADAM, *CURVE}),
        ("optimizers=(optimizer, None)", ADAM),
        ("optimizers=(None, None)", set()),
        ("optimizer_cls_and_kwargs=(SGD, {'lr': 0.1})", ADAM),
    ],
)
def test_optimizers_of_code_are_asked_for(given: str, asked: set[Any], tmp_path: Path) -> None:
    read = script(tmp_path, given)
    assert read.asked == asked
    assert bool(read.told("refused")) == bool(asked)
    assert ("optim.betas" in read.words) == ("optim" not in asked)


def test_a_trainer_of_the_file_is_named(tmp_path: Path) -> None:
    read = script(tmp_path, "callbacks=[EarlyStoppingCallback(2)]", kind="Mine")
    assert "its methods are not run, and its loss is its own. Type objective=" in read.told("refused")["Trainer.class"]
    assert read.words["stop.patience"] == 2


HEADED = """from transformers import Trainer, TrainingArguments, AutoModelForSequenceClassification, AutoConfig
names = {{0: 'NEGATIVE', 1: 'POSITIVE'}}
model = AutoModelForSequenceClassification.from_pretrained('me/base'{of_model})
trainer = Trainer(model, TrainingArguments('out', max_steps=9{of_args}), train_dataset=rows{given})
"""


def headed(folder: Path, of_model: str = "", given: str = "", of_args: str = "") -> Imported:
    path = folder / "train.py"
    path.write_text(HEADED.format(of_model=of_model, given=given, of_args=of_args))
    return imported(path)


@pytest.mark.parametrize(
    ("of_model", "words"),
    [
        (", num_labels=3", {"model.config": {"num_labels": 3}}),
        (", num_labels=2, id2label=names", {"model.config": {"num_labels": 2, "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}}),
        (", num_labels=1", {"model.config": {"num_labels": 1}, "objective": "regression"}),
        (", num_labels=2, ignore_mismatched_sizes=True", {"model.config": {"num_labels": 2}, "model.head": "new"}),
        (", config=AutoConfig.from_pretrained('me/base', num_labels=4, cache_dir='c')", {"model.config": {"num_labels": 4}}),
        (", revision='v2', torch_dtype=torch.bfloat16", {"model.name": "me/base@v2", "precision": "bf16_true"}),
        (", problem_type='single_label_classification'", {"objective": "classification"}),
    ],
)  # fmt: skip
def test_literals_of_the_model_are_its_words(of_model: str, words: dict[str, Any], tmp_path: Path) -> None:
    read = headed(tmp_path, of_model)
    wanted = {"model.name": "me/base", "model.task": "classification", **words}
    assert {word: value for word, value in read.words.items() if word in wanted} == wanted
    assert ("model.head" in read.asked) == ("model.head" not in words), "whether the weights have it is not in a file"
    assert not read.told("refused")


@pytest.mark.parametrize(
    ("of_model", "asked"),
    [
        (", num_labels=len(names), id2label=names", "<{num_labels: ..., id2label: {0: NEGATIVE, 1: POSITIVE}}>"),
        (", config=made()", "<{<entry of config.json>: <value>}>"),
        (", problem_type='multi_label_classification'", "<next_token, dpo, distill or your own>"),
    ],
)
def test_what_code_makes_of_the_model_is_asked_for(of_model: str, asked: str, tmp_path: Path) -> None:
    read = headed(tmp_path, of_model)
    word = "objective" if "problem" in of_model else "model.config"
    assert read.command[word] == asked and read.ledger.words[word] == "???"


@pytest.mark.parametrize(
    ("given", "of_args", "refused", "words"),
    [
        (", data_collator=DataCollatorWithPadding(tokenizer), processing_class=tokenizer", "", "", {"data.tokenizer": "me/base"}),
        (", data_collator=transformers.default_data_collator", "", "", {}),
        (", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)", "", "", {"objective": "next_token"}),
        (", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)", "", "", {"objective": "masked", "objective.part": 0.3}),
        (", max_seq_length=64, packing=True", "", "", {"data.sequence": 64, "data.packing": "pack"}),
        (", compute_metrics=f", "", "Trainer.compute_metrics", {"evaluate.metrics": "<value>"}),
        (", compute_metrics=f", ", load_best_model_at_end=True, metric_for_best_model='f1'", "", {"evaluate.metrics": ["f1"]}),
    ],
)  # fmt: skip
def test_no_line_contradicts_another(
    given: str, of_args: str, refused: str, words: dict[str, Any], tmp_path: Path
) -> None:
    read = headed(tmp_path, ", num_labels=2", given, of_args)
    assert {*read.told("refused")} == {refused} - {""}
    assert {word: {**read.command, **read.words}.get(word) for word in words} == words


def test_a_trainer_of_trl_loads_model_and_tokenizer_by_the_name_in_its_first_place(tmp_path: Path) -> None:
    path = tmp_path / "sft.py"
    path.write_text(
        "from trl import SFTConfig, SFTTrainer\nSFTTrainer('org/tiny', args=SFTConfig('o', max_steps=3), "
        "train_dataset=rows, eval_dataset=dev)\n"
    )
    read = imported(path)
    assert (read.words["model"], read.words["model.name"]) == ("hf", "org/tiny")
    assert "Trainer.model" not in read.told("refused")
    assert read.ledger.command["data.tokenizer"] == "org/tiny"
