"""Models of transformers on every mesh, from the shards that their own save_pretrained writes: bit for bit, whatever the
names and pieces on the disk are.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.test_base import save, sharded
from small import PARTS, STRATEGIES, on_mesh
from torch import Tensor, nn

from dtrain.__main__ import main
from dtrain.build import build
from dtrain.checkpoint.adopt import adopt, fill, find
from dtrain.checkpoint.conversions import join, stack, whole_of
from dtrain.checkpoint.state import TrainState
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, offset
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape
from dtrain.weights import place

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "tied": ("LlamaForCausalLM", "LlamaConfig", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | {"head_dim": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", GROUPED),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", GROUPED | {"eos_token_id": 1}),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
    ),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        SIZES | {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {**SIZES, "vocab_size": None, "image_size": 16, "patch_size": 4},
    ),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {
            "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
}  # fmt: skip
SPLIT = ("llama", "qwen3", "qwen3_moe", "mistral")
"""Those with a plan of their own for tp and pp."""
CASES = [
    *((kind, {}) for kind in KINDS),
    *((kind, {"dp_shard": 4}) for kind in KINDS),
    *((kind, {"dp_shard": 2, "tp": 2}) for kind in SPLIT),
    *((kind, {"pp": 2}) for kind in SPLIT),
]


def model(kind: str, seed: int) -> nn.Module:
    import transformers

    name, config, settings = KINDS[kind]
    torch.manual_seed(seed)
    settings = {key: value for key, value in settings.items() if value is not None or key != "vocab_size"}
    return getattr(transformers, name)(getattr(transformers, config)(**settings))  # type: ignore[no-any-return]


def saved(kind: str, folder: Path) -> dict[str, Tensor]:
    """The weights of a model in six shards or more."""
    made: Any = model(kind, 0)
    total = sum(parameter.numel() * 4 for parameter in made.parameters())
    made.save_pretrained(folder, max_shard_size=f"{total // 8000}KB")
    assert len(list(folder.glob("*.safetensors"))) >= 5
    return dict(made.state_dict())


def filled(mesh: Mesh, kind: str, source: str, out: Path) -> dict[str, tuple[Any, ...]]:
    """Name -> (offset, values) of this rank's parts, begun from other weights; saved under `out`."""
    made = model(kind, 1)
    strategy = build(STRATEGIES["fsdp"] if mesh.shape.dp_shard > 1 else PARTS["strategy"])
    pipeline = PipelineShape() if mesh.shape.pp > 1 else None
    parallelize(made, mesh, strategy, precision=build(PARTS["precision"]), seed=0, brought=True, pipeline=pipeline)
    state = TrainState(made)
    adopt(source, state, mesh)
    save(sharded(mesh, out), state)
    return {name: (offset(tensor), local(tensor).detach().clone()) for name, tensor in made.state_dict().items()}


def check(kind: str, degrees: dict[str, int], folder: Path) -> None:
    expected = saved(kind, folder / "hf")
    seen = dict.fromkeys(expected, 0)
    for parts in on_mesh(lambda mesh: filled(mesh, kind, str(folder / "hf"), folder / "run"), **degrees):
        for name, (begin, part) in parts.items():
            box = tuple(slice(a, a + n) for a, n in zip(begin, part.shape, strict=True))
            assert torch.equal(part, expected[name][box]), name
            seen[name] += part.numel()
    assert all(seen[name] >= tensor.numel() for name, tensor in expected.items())
    assert main(["checkpoint", "export", f"out={folder}/run", f"to={folder}/out", "shard=2KB"]) == 0
    leaves_as_it_came(kind, folder)


def leaves_as_it_came(kind: str, folder: Path) -> None:
    """Weights and outputs of the export are those of the folder that came in, to the last bit, in its own library."""
    import transformers

    whole: Any = getattr(transformers, KINDS[kind][0])
    theirs, ours = (whole.from_pretrained(folder / name, output_loading_info=True) for name in ("hf", "out"))
    assert not any(ours[1].values()), ours[1]
    before, after = theirs[0].state_dict(), ours[0].state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    assert (folder / "out/model.safetensors.index.json").exists()
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (2, 7), generator=draw)
    if kind == "whisper":
        sound = torch.randn(1, 80, 3000, generator=draw)
        outputs = [model.eval().model.encoder(sound).last_hidden_state for model, _ in (theirs, ours)]
    else:
        image = torch.randn(2, 3, 16, 16, generator=draw)
        inputs = {"pixel_values": image} if kind in ("vit", "resnet") else {"input_ids": tokens}
        inputs |= {"decoder_input_ids": tokens} if kind == "t5" else {}
        outputs = [model.eval()(**inputs).logits for model, _ in (theirs, ours)]
    assert torch.equal(*outputs)


def test_experts_that_lie_alone_are_stacked(tmp_path: Path) -> None:
    check("qwen3_moe", {"dp_shard": 2}, tmp_path)


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize(("kind", "degrees"), CASES, ids=str)
def test_sixteen_models_of_transformers_are_filled_bit_for_bit(
    kind: str, degrees: dict[str, int], tmp_path: Path
) -> None:
    check(kind, degrees, tmp_path)


def test_stacked_and_joined_pieces_are_as_torch_makes_them(tmp_path: Path) -> None:
    """Of a file, and of the shards of torch DCP."""
    tensors = {str(n): torch.randn(3, 4) for n in range(4)}
    tensors["3"] = tensors["3"].t().contiguous().t()
    torch.save(tensors, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(tensors, checkpoint_id=str(tmp_path / "dcp"))
    for source in (tmp_path / "a.pt", tmp_path / "dcp"):
        weights = place.open_at(str(source))
        parts = [weights.tensors[name] for name in sorted(weights.tensors)]
        for dim in (0, 1, 2):
            target = torch.zeros(torch.stack([*tensors.values()], dim).shape)
            weights = type(weights)("", "", {"x": stack(parts, dim)})
            fill(weights, {"x": "x"}, {"x": target})
            assert torch.equal(target, torch.stack([*tensors.values()], dim))
        for dim in (0, 1):
            target = torch.zeros(torch.cat([*tensors.values()], dim).shape)
            weights = type(weights)("", "", {"x": join(parts, dim)})
            fill(weights, {"x": "x"}, {"x": target})
            assert torch.equal(target, torch.cat([*tensors.values()], dim))
    with pytest.raises(ValueError, match="several shapes or types"):
        stack([parts[0], join(parts, 0)], 0)


def test_models_that_are_not_of_transformers_keep_their_names(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(2, 2)}, tmp_path / "a.pt")
    weights = place.open_at(str(tmp_path / "a.pt"))
    found, matched = find(weights, ["weight"], {}, (), partial(whole_of, nn.Linear(2, 2)))
    assert found is weights and matched.faults == ["missing (1): weight", "left over (1): x"]
