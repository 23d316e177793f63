"""An adapter leaves as peft's files or merged: peft loads the export over the exported base, and merges to the same bits."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapted import TARGETS, part
from checkpoint.test_base import ADAMW, save, sharded, train
from safetensors.torch import load_file
from small import mesh_of, small_gpt, tokens
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from dtrain.__main__ import main
from dtrain.build import build
from dtrain.checkpoint.state import TrainState
from dtrain.model.seeds import fill_added
from dtrain.optim.ema import EMA

LLAMA = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def saved(folder: Path, model: nn.Module, word: str, targets: list[str], *, base: bool = True) -> nn.Module:
    """Save a model under `base`, and under `adapter` what an adapter on it became in two steps."""
    with mesh_of(dp_shard=1) as mesh:
        save(sharded(mesh, folder / "base"), TrainState(model))
        tuned = deepcopy(model)
        build(part(word, targets=targets))(tuned)
        fill_added(tuned, 1)
        state = TrainState(tuned, build(ADAMW, model=tuned), None, None, EMA(tuned, 0.9))
        if base:
            sharded(mesh, folder / "adapter").load_weights(str(folder / "base"), state)
        train(state, 2)
        assert state.ema
        state.ema.update()
        save(sharded(mesh, folder / "adapter"), state)
    return tuned


def export(folder: Path, what: str, to: str, *words: str) -> int:
    return main(["checkpoint", "export", f"out={folder / what}", f"to={folder / to}", *words])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("word", ["lora", "dora"])
def test_peft_loads_the_export_and_merges_to_the_same_bits(word: str, tmp_path: Path) -> None:
    model = small_gpt()
    saved(tmp_path, model, word, TARGETS)
    codes = [
        export(tmp_path, "base", "to"),
        export(tmp_path, "adapter", "peft", "adapter=peft"),
        export(tmp_path, "adapter", "one", "adapter=merged"),
    ]
    assert codes == [0, 0, 0]
    plain = small_gpt(vocab=13)
    plain.load_state_dict(load_file(tmp_path / "to" / "model.safetensors"))
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft"))  # type: ignore[arg-type]
    merged = load_file(tmp_path / "one" / "model.safetensors")
    assert same(theirs.merge_and_unload().state_dict(), merged)
    changed = {name for name, weight in merged.items() if not torch.equal(weight, model.state_dict()[name])}
    assert {name.split(".")[-2] for name in changed} == set(TARGETS)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
@pytest.mark.parametrize("word", ["lora", "dora"])
def test_a_model_of_transformers_comes_back_with_the_same_logits(word: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    tuned = saved(tmp_path, model, word, ["q_proj", "down_proj"]).eval()
    codes = [
        export(tmp_path, "base", "to"),
        export(tmp_path, "adapter", "peft", "adapter=peft"),
        export(tmp_path, "adapter", "one", "adapter=merged"),
    ]
    assert codes == [0, 0, 0]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    assert theirs.peft_config["default"].task_type == "CAUSAL_LM"
    text = torch.arange(12)[None]
    torch.testing.assert_close(theirs(text).logits, tuned(text).logits, rtol=1e-5, atol=1e-6)
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert same(theirs.merge_and_unload().state_dict(), one.state_dict())
    torch.testing.assert_close(one(text).logits, tuned(text).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning", "ignore:Model has `tie_word")
@pytest.mark.parametrize("word", ["lora", "dora"])
def test_a_head_that_was_tied_leaves_as_a_weight_of_its_own(word: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True))
    tuned = saved(tmp_path, model, word, ["lm_head", "q_proj"]).eval()
    codes = [
        export(tmp_path, "base", "to"),
        export(tmp_path, "adapter", "peft", "adapter=peft"),
        export(tmp_path, "adapter", "one", "adapter=merged"),
        export(tmp_path, "adapter", "half", "adapter=merged", "dtype=bf16"),
    ]
    assert codes == [0] * 4
    text = torch.arange(12)[None]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
    loss = theirs(text, labels=text).loss
    torch.testing.assert_close(tuned(text, labels=text).loss, loss, rtol=1e-6, atol=0)
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert one.config.tie_word_embeddings is False
    assert torch.equal(one.model.embed_tokens.weight, model.model.embed_tokens.weight), "as it was"
    torch.testing.assert_close(one(text).logits, theirs(text).logits, rtol=1e-5, atol=1e-6)
    whole, half = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "half"))
    assert same({name: weight.bfloat16() for name, weight in whole.items()}, half)


def test_a_tied_gpt_is_merged_into_one_with_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = saved(tmp_path, small_gpt(tied=True), "lora", ["head"])
    assert export(tmp_path, "adapter", "one", "adapter=merged") == 0
    assert "is tied to" not in capsys.readouterr().out
    one = small_gpt(tied=False)
    one.load_state_dict(load_file(tmp_path / "one" / "model.safetensors"))
    torch.testing.assert_close(one(tokens(2, 6)), tuned(tokens(2, 6)), rtol=1e-5, atol=1e-6)


def test_a_weight_that_transformers_always_ties_is_not_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=13, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    saved(tmp_path, T5ForConditionalGeneration(config), "lora", ["lm_head"])
    assert export(tmp_path, "adapter", "one", "adapter=merged") == 2
    assert "a t5 of transformers always ties them. Type adapter=peft" in capsys.readouterr().err
    assert export(tmp_path, "adapter", "peft", "adapter=peft") == 0


def test_types_averages_and_an_adapter_that_was_saved_with_its_model(tmp_path: Path) -> None:
    tuned = saved(tmp_path, small_gpt(), "lora", ["q"], base=False)
    assert export(tmp_path, "adapter", "one", "adapter=merged") == 0
    assert export(tmp_path, "adapter", "half", "adapter=merged", "dtype=bf16") == 0
    assert export(tmp_path, "adapter", "average", "adapter=peft", "weights=ema") == 0
    one, half = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "half"))
    assert same({name: weight.bfloat16() for name, weight in one.items()}, half), "merged in fp32, then rounded"
    average = load_file(tmp_path / "average" / "adapter_model.safetensors")
    here = tuned.get_submodule("blocks.0.attention.q").lora_B  # type: ignore[attr-defined]
    assert not torch.equal(average["base_model.model.blocks.0.attention.q.lora_B.weight"], here)
    config = json.loads((tmp_path / "average" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None and config["r"] == 4 and config["lora_alpha"] == 8


def test_what_to_make_of_it_must_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, small_gpt(), "lora", ["q"])
    assert export(tmp_path, "adapter", "to") == 2
    assert "holds an adapter (lora). Type adapter=merged for one model, or adapter=peft" in capsys.readouterr().err
    assert export(tmp_path, "base", "to", "adapter=peft") == 2
    assert "holds a model without an adapter. Leave adapter out." in capsys.readouterr().err
    assert export(tmp_path, "adapter", "to", "adapter=peff") == 2
    assert "adapter=peff: Did you mean peft?" in capsys.readouterr().err
    (tmp_path / "base").rename(tmp_path / "moved")
    assert export(tmp_path, "adapter", "to", "adapter=merged") == 3
    assert "cannot load the base of the adapter from " in capsys.readouterr().err
    assert not list((tmp_path / "to").glob("*"))
    assert export(tmp_path, "adapter", "to", "adapter=peft") == 0
    assert export(tmp_path, "adapter", "to", "adapter=peft") == 3
    assert "it is there already" in capsys.readouterr().err
