"""LoRA of axolotl, whose keys are arguments of peft: the layers and numbers that peft takes."""

from pathlib import Path
from typing import Any

import peft
import pytest
import yaml
from imported import Imported, example, imported
from torch import nn

from dtrain.adapter import LowRank, dora, lora

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "lora_target_modules": ["q_proj", "up_proj"]}  # fmt: skip


def config(folder: Path, **keys: Any) -> Imported:
    path = folder / "axolotl.yaml"
    path.write_text(yaml.safe_dump({"base_model": "me/small", "sequence_len": 128, "micro_batch_size": 1, **keys}))
    return imported(path)


def words(read: Imported) -> dict[str, Any]:
    return {word.removeprefix("adapter."): value for word, value in read.words.items() if word.startswith("adapter")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(4, 4)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(4, 4)


@pytest.mark.parametrize("keys", [LORA, {**LORA, "peft_use_dora": True}])
def test_the_layers_and_numbers_are_those_of_peft(keys: dict[str, Any], tmp_path: Path) -> None:
    arguments = words(config(tmp_path, **keys))
    word = arguments.pop("adapter")
    ours, theirs = Net(), Net()
    {"lora": lora, "dora": dora}[word].build(**arguments)(ours)
    given = peft.LoraConfig(
        r=keys["lora_r"], lora_alpha=keys["lora_alpha"], lora_dropout=keys["lora_dropout"],
        target_modules=keys["lora_target_modules"], use_dora=bool(keys.get("peft_use_dora")),
    )  # fmt: skip
    peft.inject_adapter_in_model(given, theirs)
    wrapped = {
        name: module for name, module in theirs.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    made = {name: module for name, module in ours.named_modules() if isinstance(module, LowRank)}
    assert made.keys() == wrapped.keys() and len(made) == 4
    for name, module in made.items():
        other = wrapped[name]
        assert module.lora_A.shape == other.lora_A["default"].weight.shape
        assert (module.scaling, module.dropout) == (other.scaling["default"], other.lora_dropout["default"].p)
        assert ("magnitude" in dict(module.named_parameters())) == other.use_dora["default"] == (word == "dora")


def test_dora_of_all_linear_layers() -> None:
    read = example("axolotl_dpo_dora.yaml")
    assert "adapter" in read.asked and "adapter=dora" in read.told("refused")["adapter"]
    assert "no other parameter" in read.told("refused")["lora_modules_to_save"]
    assert (read.command["adapter.rank"], read.command["adapter.targets"]) == (8, "null")
    assert read.words["optim.lr_of"] == {"lora_B": 8e-5}


@pytest.mark.parametrize(
    ("keys", "why", "asked"),
    [
        ({"adapter": "qlora", "load_in_4bit": True, "fsdp": ["full_shard"]}, "adapter=qlora alone", {"adapter"}),
        ({"adapter": "qlora", "load_in_4bit": True, "peft_use_dora": True}, "adapter=qlora alone", {"adapter"}),
        ({"load_in_8bit": True}, "adapter=qlora alone", {"adapter"}),
        ({"peft": {"backend": "bnb", "weight_dtype": "nf4"}}, "adapter=qlora alone", {"adapter"}),
        ({"adapter": "llama-adapter"}, "no adapter llama-adapter", {"adapter"}),
        ({"lora_model_dir": "old"}, "Merge it", {"adapter"}),
        ({"peft_use_rslora": True}, "adapter.alpha=45.2548339959", {"adapter.alpha"}),
        ({"lora_target_modules": None}, "peft chooses", {"adapter.targets"}),
        ({"lora_target_modules": "model.*[qv]_proj"}, "regular expression", {"adapter.targets"}),
        ({"peft_layers_to_transform": [0, 1]}, "layers.<number>", {"adapter.targets"}),
        ({"lora_target_linear": True, "lora_target_modules": ["lm_head"]}, "of the blocks", {"adapter.targets"}),
        ({"lora_rank_pattern": {"q_proj": 4}}, "does not have it", {"adapter"}),
        ({"lora_r": None, "lora_dropout": None}, "", {"adapter.rank"}),
    ],
)
def test_what_is_not_the_same_is_asked_for(keys: dict[str, Any], why: str, asked: set[str], tmp_path: Path) -> None:
    read = config(tmp_path, **{**LORA, **keys})
    assert {word for word in read.asked if word.startswith("adapter")} == asked
    assert not why or any(why in each for each in read.told("refused").values())
    if "adapter" in asked and "lora_r" not in keys:
        assert read.command["adapter.rank"] == 8 and "adapter" not in read.words


def test_a_base_in_4_bits_is_carried(tmp_path: Path) -> None:
    read = config(tmp_path, **{**LORA, "adapter": "qlora", "load_in_4bit": True})
    assert words(read) == {
        "adapter": "qlora", "double": True, "rank": 8, "alpha": 16, "dropout": 0.1, "targets": ["q_proj", "up_proj"],
    }  # fmt: skip
    assert "load_in_4bit" in read.told("unneeded")


def test_keys_of_lora_without_an_adapter_are_unused(tmp_path: Path) -> None:
    read = config(tmp_path, **{**LORA, "adapter": None, "lora_modules_to_save": ["embed_tokens"]})
    assert not words(read) and "adapter" not in read.asked
    assert {*LORA} - {"adapter"} <= {*read.told("unneeded")}


def test_an_adapter_stays_in_fp32_as_in_peft(tmp_path: Path) -> None:
    assert config(tmp_path, **LORA, bf16=True).words["precision"] == "bf16"
    assert config(tmp_path, **LORA, bf16=True, peft_autocast_adapter_dtype=False).words["precision"] == "bf16_true"
