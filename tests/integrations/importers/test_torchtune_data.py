"""LoRA, conversations and pairs of torchtune."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import Imported, example, imported

from dtrain.integrations.importers.torchtune_model import FAMILIES

FOLDER = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/data/model"}


def config(folder: Path, model: dict[str, Any] | str, **keys: Any) -> Imported:
    path = folder / "tune.yaml"
    model = {"_component_": f"torchtune.models.{model}"} if isinstance(model, str) else model
    tree = {"model": model, "checkpointer": FOLDER, "batch_size": 2, "epochs": 1, "max_steps_per_epoch": 5, **keys}
    path.write_text(yaml.safe_dump(tree))
    return imported(path)


def words(read: Imported, group: str) -> dict[str, Any]:
    return {word: value for word, value in read.words.items() if word.split(".")[0] == group}


def test_dora_on_conversations(tmp_path: Path) -> None:
    read = example("torchtune_dora.yaml")
    assert words(read, "adapter") == {
        "adapter": "dora", "adapter.rank": 64, "adapter.alpha": 128,
        "adapter.targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    assert words(read, "model") == {"model": "hf", "model.name": "/data/Llama-3.2-1B-Instruct"}
    assert words(read, "data") == {
        "data": "chat", "data.kind": "conversations", "data.columns": {"conversations": "dialogue"}, "data.path": "data/chats.jsonl",
        "data.packing": "pack", "data.train_on": "answers", "data.tokenizer": "/data/Llama-3.2-1B-Instruct", "data.sequence": 2048, "data.holdout": 0.0,
    }  # fmt: skip
    assert read.asked == {"data.template"}, "its tokenizer writes the turns in Python"
    assert read.plan(tmp_path).adapter["rank"] == 64


def test_dpo_on_pairs_of_the_hub(tmp_path: Path) -> None:
    read = example("torchtune_dpo.yaml")
    assert words(read, "objective") == {"objective": "dpo", "objective.beta": 0.05, "objective.label_smoothing": 0}
    assert words(read, "data")["data.columns"] == {"chosen": "better", "rejected": "worse"}
    assert read.asked == {"data.path", "data.template"}
    assert 'f("me/pairs", split="train")' in read.told("refused")["dataset.source"]
    assert "as here" in read.told("unneeded")["ref_checkpointer.checkpoint_dir"]
    assert read.plan(tmp_path).objective["beta"] == 0.05


def test_another_reference_is_refused(tmp_path: Path) -> None:
    read = config(
        tmp_path,
        "llama3.llama3_8b",
        loss={"_component_": "torchtune.rlhf.loss.DPOLoss"},
        ref_checkpointer={**FOLDER, "checkpoint_dir": "/data/other"},
    )
    assert "begins with" in read.told("refused")["ref_checkpointer.checkpoint_dir"]
    assert read.words["objective.beta"] == 0.1


@pytest.mark.parametrize("model", ["llama2.lora_llama2_7b", "llama2.qlora_llama2_7b"])
def test_a_quantised_base_is_asked_for(model: str, tmp_path: Path) -> None:
    arguments = {"lora_attn_modules": ["q_proj"], "lora_rank": 4, "lora_alpha": 8}
    read = config(tmp_path, {"_component_": f"torchtune.models.{model}", **arguments})
    quantised = "qlora" in model
    assert ("adapter" in read.asked) == quantised
    assert (read.command if quantised else read.words)["adapter.rank"] == 4
    assert (read.command if quantised else read.words)["adapter.targets"] == ("[q_proj]" if quantised else ["q_proj"])


def test_defaults_of_the_builders(tmp_path: Path) -> None:
    model = {"_component_": "torchtune.models.mistral.lora_mistral_7b", "lora_attn_modules": ["k_proj"], "apply_lora_to_output": True}  # fmt: skip
    assert words(config(tmp_path, model), "adapter") == {
        "adapter": "lora", "adapter.rank": 8, "adapter.alpha": 16, "adapter.targets": ["k_proj", "lm_head"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("phi3.phi3_mini", "hf"),
        ("phi3.lora_phi3_mini", None),
        ("llama2.llama2_reward_7b", "torchtune.models.llama2.llama2_reward_7b"),
        ("llama3_2_vision.llama3_2_vision_11b", "torchtune.models.llama3_2_vision.llama3_2_vision_11b"),
    ],
)
def test_models_that_transformers_has_too(model: str, word: str | None, tmp_path: Path) -> None:
    read = config(tmp_path, model)
    assert read.words.get("model", read.words.get("model._target_")) == word
    assert "llama3_2" in FAMILIES


def test_instructions_by_columns(tmp_path: Path) -> None:
    dataset = {
        "_component_": "torchtune.datasets.instruct_dataset", "source": "parquet", "data_files": "a.parquet",
        "column_map": {"input": "question", "output": "answer"}, "train_on_input": True, "new_system_prompt": "Be kind.",
    }  # fmt: skip
    read = config(tmp_path, "qwen2_5.qwen2_5_0_5b", dataset=dataset, tokenizer={"max_seq_len": None})
    assert words(read, "data") == {
        "data": "chat", "data.kind": "prompt", "data.columns": {"prompt": "question", "completion": "answer"}, "data.path": "a.parquet",
        "data.train_on": "all", "data.tokenizer": "/data/model", "data.padding": "longest", "data.holdout": 0.0,
    }  # fmt: skip
    assert "into the rows" in read.told("refused")["dataset.new_system_prompt"]
    assert read.asked == {"data.sequence", "data.template"}
