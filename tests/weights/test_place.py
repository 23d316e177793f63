"""What lies at a URL is found out by its files, and what cannot be read is refused with what to type."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dtrain.checkpoint.adopt import read
from dtrain.storage.attempts import folder
from dtrain.weights import ForeignError, place


def files(where: Path, *names: str) -> str:
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(b"{}")
    return str(where)


REFUSED = {
    "DeepSpeed": (
        ("zero_to_fp32.py", "latest", "global_step9/mp_rank_00_model_states.pt"),
        r"it holds shards of DeepSpeed. Type python (.*)/zero_to_fp32.py \1 <place> --safe_serialization",
    ),
    "DeepSpeed's step": (("mp_rank_00_model_states.pt",), "it holds shards of DeepSpeed"),
    "Megatron": (("latest_checkpointed_iteration.txt", "iter_0000010/x"), r"shards of Megatron. Type python -c .*AutoBridge"),
    "Megatron's step": (("common.pt", ".metadata", "__0_0.distcp"), "it holds shards of Megatron"),
    "an adapter": (("adapter_config.json", "adapter_model.safetensors"), r"adapter of peft.*merge_and_unload\(\)"),
    "diffusers": (("model_index.json", "unet/model.safetensors"), "a pipeline of diffusers.*Name one of them"),
    "gguf": (("model.gguf",), "transformers reads it"),
    "several": (("a.pt", "b.pt"), r"it holds a.pt, b.pt. Type init=.*/a.pt for one of its files"),
    "nothing of use": (("README.md",), r"it holds README.md$"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_no_checkpoint_is_told_with_what_to_type(name: str, tmp_path: Path) -> None:
    inside, cause = REFUSED[name]
    with pytest.raises(ForeignError, match=cause):
        place.open_at(files(tmp_path, *inside))


def test_a_place_that_is_not_there_has_a_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path, "llama/model.safetensors", "last.ckpt")
    with pytest.raises(ForeignError, match=f"nothing is there. Did you mean {tmp_path}/llama?"):
        place.open_at(f"{tmp_path}/lama/")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForeignError, match=r"nothing is there\. Did you mean last\.ckpt\?"):
        place.open_at("lst.ckpt")


def test_runs_of_dtrain_are_told_from_others(tmp_path: Path) -> None:
    attempt = "00000001-20260101T000000-0123abcd-0001"
    ours = folder(str(tmp_path), 7)
    files(Path(ours) / attempt, "COMMIT.json")
    assert all(map(place.is_ours, (str(tmp_path), f"{tmp_path}/checkpoints", ours, f"{ours}/{attempt}/")))
    assert not place.is_ours(files(tmp_path / "hf", "model.safetensors", "config.json"))
    assert not place.is_ours(f"{tmp_path}/hf/model.safetensors")


def sharded(where: Path, **changed: Any) -> str:
    save_file({"a": torch.zeros(2)}, where / "x.safetensors")
    places = {"a": "x.safetensors"} | changed
    (where / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(where)


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"b": "y.safetensors"}, "it lists 1 files that are not there: y.safetensors. Fetch the folder again"),
        ({"b": "../../etc/x.safetensors"}, "../../etc/x.safetensors is not a file beside it"),
        ({"b": "x.safetensors"}, r"tensors that are not in the file it names \(1\): b"),
        ({"b": 3}, "3 is not a file beside it"),
    ],
)
def test_an_index_that_lies_is_refused(changed: dict[str, Any], cause: str, tmp_path: Path) -> None:
    with pytest.raises(ForeignError, match=cause):
        place.open_at(sharded(tmp_path, **changed))


def test_a_damaged_index_is_one_line(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"weight_map": 3}', "[" * 100_000):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ForeignError) as caught:
            place.open_at(str(tmp_path))
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("safe", [True, False])
def test_six_shards_of_transformers_are_read_bit_for_bit(safe: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    if safe:
        model.save_pretrained(tmp_path, max_shard_size="12KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) >= 6
    else:
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        model.config.save_pretrained(tmp_path)
    weights = place.open_at(str(tmp_path))
    assert weights.config is not None
    assert weights.config["model_type"] == "llama"
    expected = model.state_dict()
    assert {*expected} - {*weights.tensors} <= {"lm_head.weight"}
    for name, stored in weights.tensors.items():
        box = tuple(slice(0, size) for size in stored.shape)
        assert torch.equal(read(stored.pieces[0], stored.dtype, box), expected[name])
