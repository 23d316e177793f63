"""Datasets of axolotl: what its loaders read is what data=chat reads."""

import os
from pathlib import Path
from typing import Any

import commands
import pytest
import yaml
from imported import Imported, example, imported

from dtrain.chat.turns import conversations

ROWS = {"path": "rows.jsonl", "type": "chat_template"}


def config(folder: Path, *datasets: dict[str, Any], **keys: Any) -> Imported:
    path = folder / "axolotl.yaml"
    tree = {"base_model": "me/small", "sequence_len": 128, "micro_batch_size": 1, "datasets": [*datasets], **keys}
    path.write_text(yaml.safe_dump(tree))
    return imported(path)


def words(read: Imported) -> dict[str, Any]:
    return {word: value for word, value in read.words.items() if word.split(".")[0] == "data"}


DEFAULTS = {
    "data": "chat", "data.path": "rows.jsonl", "data.kind": "messages", "data.tokenizer": "me/small", "data.sequence": 128,
    "data.long": "skip", "data.padding": "longest", "data.holdout": 0.0,
}  # fmt: skip


def test_conversations() -> None:
    read = example("axolotl_chat_lora.yaml")
    assert not read.told("refused") and not read.asked
    assert {**words(read), "data.template": "..."} == {
        "data": "chat", "data.path": ["data/chats.jsonl", "data/more.parquet"], "data.kind": "conversations", "data.columns": {"conversations": "turns"},
        "data.template": "...", "data.template_args": {"enable_thinking": False}, "data.train_on": "answers", "data.sequence": 2048, "data.packing": "pack",
        "data.long": "skip", "data.holdout": 0.05, "data.tokenizer": "Qwen/Qwen2.5-0.5B-Instruct@v1",
    }  # fmt: skip
    assert read.words["data.template"].startswith("{% for message in messages %}")


def test_the_template_survives_the_recipe(tmp_path: Path) -> None:
    read = example("axolotl_chat_lora.yaml")
    plan = read.plan(tmp_path)
    assert plan.data["template"] == read.ledger.leaves["chat_template_jinja"]
    assert plan.data["template_args"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("dataset", "keys", "more"),
    [
        (ROWS, {}, {}),
        ({**ROWS, "path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, {}, {"data.path": ["a.jsonl", "b.jsonl"]}),
        ({**ROWS, "path": "s3://bucket/rows.parquet", "ds_type": "parquet"}, {}, {"data.path": "s3://bucket/rows.parquet"}),
        ({**ROWS, "field_messages": "turns", "field_tools": "functions"}, {}, {"data.columns": {"messages": "turns", "tools": "functions"}}),
        ({**ROWS, "message_field_role": "from", "message_field_content": "value", "field_messages": "conversations"}, {}, {"data.kind": "conversations"}),
        ({**ROWS, "message_field_training": "train"}, {}, {}),
        (ROWS, {"tokenizer_config": None, "val_set_size": None, "excess_length_strategy": None}, {}),
        (ROWS, {"tokenizer_config": "other"}, {"data.tokenizer": "other"}),
        (ROWS, {"sequence_len": None}, {"data.sequence": 512}),
        (ROWS, {"val_set_size": 0.1}, {"data.holdout": 0.1}),
        (ROWS, {"pad_to_sequence_len": True}, {"data.padding": "sequence"}),
        (ROWS, {"excess_length_strategy": "raise"}, {"data.long": "refuse"}),
    ],
)  # fmt: skip
def test_what_each_key_means(
    dataset: dict[str, Any], keys: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    read = config(tmp_path, dataset, **keys)
    assert words(read) == {**DEFAULTS, **more}
    assert not [key for key in read.told("refused") if key.startswith("datasets")]
    assert read.plan(tmp_path, "steps=2").data["sequence"] == words(read)["data.sequence"]


def test_names_of_messages_that_are_unneeded_are_read() -> None:
    """What an import calls not needed is what the rows are read with."""
    row = {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"role": "tool", "content": "c"},
        ]
    }
    (read,) = conversations("conversations", row)
    assert [message["role"] for message in read.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("dataset", "keys", "why", "asked"),
    [
        ({**ROWS, "path": "org/rows", "name": "en", "split": "train[:9]"}, {}, 'f("org/rows", "en", split="train[:9]")', {"data.path"}),
        (ROWS, {"chat_template": "llama3"}, "a template of axolotl", {"data.template"}),
        (ROWS, {"chat_template_jinja": "${secret}"}, "Write it to a file", {"data.template"}),
        ({**ROWS, "roles_to_train": ["user", "assistant"]}, {}, "data.train_on=all", {"data.train_on"}),
        (ROWS, {"train_on_inputs": True}, "data.train_on=all", {"data.train_on"}),
        (ROWS, {"val_set_size": 200}, "<200 / samples>", {"data.holdout"}),
        ({**ROWS, "train_on_eos": "all"}, {}, "of no other message", set()),
        ({**ROWS, "split": "test"}, {}, "read whole", set()),
        ({**ROWS, "message_field_training": "learn"}, {}, "Rename the field", set()),
        ({**ROWS, "drop_system_message": True}, {}, "Change them in the files", set()),
        ({**ROWS, "roles": {"user": ["client"]}}, {}, "Rename them", set()),
        (ROWS, {"special_tokens": {"eos_token": "</s>"}}, "tokens of the tokenizer", set()),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_asked_for(
    dataset: dict[str, Any], keys: dict[str, Any], why: str, asked: set[str], tmp_path: Path
) -> None:
    read = config(tmp_path, dataset, **keys)
    assert any(why in each for each in read.told("refused").values())
    assert {word for word in read.open if word.startswith("data")} == asked
    assert {word for word in asked if read.ledger.words[word] != "???"} == set(), "a default does not take its place"


@pytest.mark.parametrize(
    ("dataset", "typed"),
    [
        ({"path": "a", "type": "alpaca"}, "data.kind=instruction"),
        ({"path": "a", "type": "completion", "field": "body"}, "data=text data.path=<files> data.column=body"),
        ({"path": "a", "type": "sharegpt"}, "data.kind=conversations"),
        ({"path": "a", "type": "input_output"}, "data=jsonl"),
        ({"path": "a", "type": {"field_instruction": "q", "format": "{instruction}"}}, "data.template=<your file>"),
    ],
)  # fmt: skip
def test_prompts_of_axolotl_stay_comments(dataset: dict[str, Any], typed: str, tmp_path: Path) -> None:
    read = config(tmp_path, dataset)
    assert not words(read)
    assert all(typed in why for key, why in read.told("refused").items() if key.startswith("datasets"))
    assert "data.sequence" in read.command


def test_datasets_of_different_columns_are_not_one(tmp_path: Path) -> None:
    read = config(tmp_path, ROWS, {**ROWS, "path": "b.jsonl", "field_messages": "turns"})
    assert not words(read)
    assert "different columns" in read.told("refused")["datasets.1.path"]


def test_pairs() -> None:
    read = example("axolotl_dpo_dora.yaml")
    assert {word: value for word, value in read.words.items() if word.startswith("objective")} == {
        "objective": "dpo", "objective.loss": "ipo", "objective.beta": 0.2,
    }  # fmt: skip
    assert {word: value for word, value in words(read).items() if word in ("data.kind", "data.columns", "data.long")} == {
        "data.kind": "pairs", "data.columns": {"rejected": "worse"}, "data.long": "cut",
    }  # fmt: skip
    assert {"data.path", "data.template"} <= read.asked


def test_preferences_have_the_defaults_of_trl(tmp_path: Path) -> None:
    pairs = {"path": "pairs.jsonl", "type": "chat_template.argilla_chat"}
    read = config(tmp_path, pairs, rl="dpo", rl_beta=None, sample_packing=True, max_steps=3)
    assert read.words["objective.beta"] == 0.1 and read.words["objective.loss"] == "sigmoid"
    assert read.plan(tmp_path).data["kind"] == "pairs" and "not packed" in read.told("refused")["sample_packing"]
    other = config(tmp_path, {"path": "org/pairs", "type": "chatml.intel"}, rl="dpo")
    assert not words(other) and "data" in other.open
    assert config(tmp_path, ROWS, rl="kto").asked >= {"objective"}


MODEL = """
import json
from pathlib import Path
import transformers
from chat.talks import talks, tokenizer
tokenizer(Path("model"))
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **sizes)).save_pretrained("model")
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in talks(40)))
"""


@pytest.mark.campaign("documents")
def test_an_imported_file_trains(tmp_path: Path) -> None:
    """The adapter of a model of transformers on packed conversations, without another word."""
    tests = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    assert commands.python("-c", MODEL, cwd=tmp_path, env=tests).returncode == 0
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    keys = {"base_model": "model", "max_steps": 4, "learning_rate": 0.01, "sample_packing": True, "val_set_size": 0.1, "gradient_accumulation_steps": 1}  # fmt: skip
    config(tmp_path, ROWS, **lora, **keys, early_stopping_patience=2, eval_steps=2)
    assert commands.run("import", "axolotl.yaml", "to=mine.yaml", cwd=tmp_path).returncode == 0
    done = commands.run("recipe=mine.yaml", "data.cache=cache", "out=out", "hook=[]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished after 4 steps" in done.stdout + done.stderr
