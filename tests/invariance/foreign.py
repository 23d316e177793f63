"""Models that other people wrote, small and of random weights, and data that they take: transformers, diffusers, peft, torchvision, timm.

model = build(name="bert")                                        # as `model._target_=invariance.foreign.build model.name=bert`
words = FOREIGN["bert"].words                                     # the data and the objective of a run of it
"""

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from invariance import samples
from torch import Tensor, nn

VOCAB, LENGTH, CLASSES = 64, 16, 6


def build(*, name: str) -> nn.Module:
    return FOREIGN[name].make()


@dataclass(frozen=True)
class Foreign:
    make: Callable[[], nn.Module]
    task: str
    """A key of TASKS: what a sample is, and what is learnt of it."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """axis -> what the refusal says of a mesh that splits it."""
    needs: str = "transformers"

    def words(self, name: str) -> str:
        data = f"data=dataset data.dataset._target_=invariance.foreign.Samples data.dataset.task={self.task} data.holdout=0"
        return f"model._target_=invariance.foreign.build model.name={name} trust=[invariance] {data} {TASKS[self.task].words}"


@dataclass(frozen=True)
class Task:
    words: str
    sample: Callable[[int, torch.Generator], dict[str, Tensor]]


def _tokens(length: int, g: torch.Generator) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=g)


def _causal(index: int, g: torch.Generator) -> dict[str, Tensor]:
    row = _tokens(LENGTH + 1, g)
    return {"input_ids": row[:-1], "targets": torch.where(torch.arange(LENGTH) < index % 7, -100, row[1:])}


def _masked(index: int, g: torch.Generator) -> dict[str, Tensor]:
    """A few words are hidden, of every sample another number, and those alone are guessed."""
    row, hidden = _tokens(LENGTH, g), torch.arange(LENGTH) % (2 + index % 5) == 0
    return {"input_ids": torch.where(hidden, 2, row), "targets": torch.where(hidden, row, -100)}


def _sentence(index: int, g: torch.Generator) -> dict[str, Tensor]:
    """Of several lengths, padded."""
    real = torch.arange(LENGTH) < 5 + index % 12
    return {
        "input_ids": torch.where(real, _tokens(LENGTH, g), 1),
        "attention_mask": real.long(),
        "targets": torch.tensor(index % CLASSES),
    }


def _translation(index: int, g: torch.Generator) -> dict[str, Tensor]:
    answer = _tokens(LENGTH + 1, g)
    return {"input_ids": _tokens(LENGTH, g), "decoder_input_ids": answer[:-1], "targets": answer[1:]}


def _speech(index: int, g: torch.Generator) -> dict[str, Tensor]:
    answer = _tokens(LENGTH + 1, g)
    return {
        "input_features": torch.randn(8, 2 * LENGTH, generator=g),
        "decoder_input_ids": answer[:-1],
        "targets": answer[1:],
    }


def _sound(index: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(400, generator=g), "targets": torch.tensor(index % CLASSES)}


def _image(index: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 32, 32, generator=g), "targets": torch.tensor(index % CLASSES)}


def _noise(index: int, g: torch.Generator) -> dict[str, Tensor]:
    return {
        "sample": torch.randn(4, 16, 16, generator=g),
        "timestep": torch.tensor(index),
        "targets": torch.randn(4, 16, 16, generator=g),
    }


_DATASET = "data.targets=targets data.inputs="
TASKS = {
    "causal": Task(f"{_DATASET}input_ids objective=next_token data.outputs={VOCAB}", _causal),
    "masked": Task(f"{_DATASET}input_ids objective=next_token data.outputs={VOCAB}", _masked),
    "sentence": Task(
        f"{_DATASET}[input_ids,attention_mask] objective=classification data.outputs={CLASSES}", _sentence
    ),
    "translation": Task(
        f"{_DATASET}[input_ids,decoder_input_ids] objective=next_token data.outputs={VOCAB}", _translation
    ),
    "speech": Task(f"{_DATASET}[input_features,decoder_input_ids] objective=next_token data.outputs={VOCAB}", _speech),
    "sound": Task(f"{_DATASET}input_values objective=classification data.outputs={CLASSES}", _sound),
    "image": Task(f"{_DATASET}pixel_values objective=classification data.outputs={CLASSES}", _image),
    "noise": Task(f"{_DATASET}[sample,timestep] objective=regression", _noise),
}


class Samples(samples.Samples):
    tasks = TASKS


_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_VISION = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _hf(kind: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    """`AutoModelFor<kind>` from a config without dropout: masks of it are others on another mesh."""

    def make() -> nn.Module:
        import transformers

        made = transformers.AutoConfig.for_model(config, **values)
        for part in (
            made,
            *(value for value in vars(made).values() if isinstance(value, transformers.PreTrainedConfig)),
        ):
            for key, value in vars(part).items():
                if isinstance(value, float) and (
                    "drop" in key or "mask_time_prob" in key or "mask_feature_prob" in key
                ):
                    setattr(part, key, 0.0)
        if kind == "ImageClassification" or kind.endswith("SequenceClassification") or kind == "AudioClassification":
            made.num_labels = CLASSES
        return getattr(transformers, f"AutoModelFor{kind}").from_config(made)  # type: ignore[no-any-return]

    return make


def _lora(base: str, targets: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, fan_in_fan_out=base == "gpt2")
        with warnings.catch_warnings():  # peft asks transformers for what that calls by another name since
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(FOREIGN[base].make(), config)  # type: ignore[return-value]

    return make


class Denoiser(nn.Module):
    """A model of diffusers as a user trains it: it returns the noise, not an object that has it."""

    def __init__(self, model: Any, **given: Tensor) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        given = {name: value.expand(len(sample)) for name, value in self.given.items()}
        noise: Tensor = self.model(sample, timestep, **given).sample
        return noise


def _unet() -> nn.Module:
    import diffusers

    return Denoiser(
        diffusers.UNet2DModel(
            sample_size=16, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
        )
    )  # fmt: skip


def _dit() -> nn.Module:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=16, patch_size=4, norm_num_groups=4,
        num_embeds_ada_norm=100, dropout=0.0,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return Denoiser(model, class_labels=torch.tensor(1))


def _classifier(path: str, **values: Any) -> Callable[[], nn.Module]:
    """What is called so in a library, of images."""
    return lambda: _at(path)(num_classes=CLASSES, **values)  # type: ignore[no-any-return]


def _at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


WHOLE = {"tp": "has no tensor-parallel plan", "pp": "does not say where it may be cut"}
WRAPPED = {
    "tp": "GPT2LMHeadModel has no tensor-parallel plan",
    "pp": "GPT2LMHeadModel does not say where it may be cut",
}
TIED = {"pp": "are one weight, and may be on two stages"}
FLOWS = {"pp": "changes hidden states outside of the modules of its table"}
NO_BLOCKS = {"pp": "names no list of blocks"}
PARTS_DIFFER = {"cp": "computes other values for a part of a sequence"}
NO_SDPA = {"cp": "never called F.scaled_dot_product_attention"}
MASKED = {"cp": "with an attn_mask, which covers only a part of the sequence"}
NO_TOKENS = {"cp": "dim 1 of the inputs is read as"}
NO_SEQUENCE = {"cp": "have no dim of tokens to split"}
PADDED = {**WHOLE, "cp": "hides tokens, which a split sequence cannot do"}
IMAGE = {**WHOLE, "cp": "have no sequence to split"}
NO_POSITIONS = {**WHOLE, "cp": "takes no position_ids"}
STATISTICS = {"data": "BatchNorm"}

# fmt: off
FOREIGN: dict[str, Foreign] = {
    # decoders
    "llama": Foreign(_hf("CausalLM", "llama", **_GROUPED), "causal"),
    "mistral": Foreign(_hf("CausalLM", "mistral", **_GROUPED, sliding_window=None), "causal"),
    "mistral_window": Foreign(_hf("CausalLM", "mistral", **_GROUPED, sliding_window=4), "causal", {"cp": "attention mask is more than causal"}),
    "qwen2": Foreign(_hf("CausalLM", "qwen2", **_GROUPED), "causal"),
    "qwen3": Foreign(_hf("CausalLM", "qwen3", **_GROUPED, head_dim=8), "causal"),
    "mixtral": Foreign(_hf("CausalLM", "mixtral", **_GROUPED, num_local_experts=4), "causal"),
    "qwen3_moe": Foreign(
        _hf("CausalLM", "qwen3_moe", **_GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), "causal",
    ),
    "gemma": Foreign(_hf("CausalLM", "gemma", **_GROUPED, head_dim=8), "causal", TIED),
    "gemma_untied": Foreign(_hf("CausalLM", "gemma", **_GROUPED, head_dim=8, tie_word_embeddings=False), "causal"),
    "gemma2": Foreign(_hf("CausalLM", "gemma2", **_GROUPED, head_dim=8, sliding_window=8), "causal", {**TIED, **NO_SDPA}),
    "phi": Foreign(_hf("CausalLM", "phi", **_TEXT), "causal"),
    "phi3": Foreign(_hf("CausalLM", "phi3", **_GROUPED), "causal"),
    "gpt2": Foreign(
        _hf("CausalLM", "gpt2", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None),
        "causal", WHOLE
    ),
    "gpt_neox": Foreign(_hf("CausalLM", "gpt_neox", **_TEXT), "causal"),
    "opt": Foreign(_hf("CausalLM", "opt", **{**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}), "causal", WHOLE),
    "bloom": Foreign(
        _hf("CausalLM", "bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None,
        pad_token_id=1), "causal", {**WHOLE, **NO_SDPA}
    ),
    "falcon": Foreign(_hf("CausalLM", "falcon", **_TEXT, new_decoder_architecture=True, num_kv_heads=2), "causal", {**WHOLE, **MASKED}),
    "olmo2": Foreign(_hf("CausalLM", "olmo2", **_GROUPED), "causal"),
    "stablelm": Foreign(_hf("CausalLM", "stablelm", **_GROUPED), "causal", WHOLE),
    "smollm3": Foreign(_hf("CausalLM", "smollm3", **_GROUPED), "causal", TIED),
    "cohere": Foreign(_hf("CausalLM", "cohere", **_GROUPED), "causal", TIED),
    "cohere_untied": Foreign(_hf("CausalLM", "cohere", **_GROUPED, tie_word_embeddings=False), "causal", FLOWS),
    "granite": Foreign(_hf("CausalLM", "granite", **_GROUPED), "causal"),
    "lfm2": Foreign(
        _hf("CausalLM", "lfm2", **_GROUPED, layer_types=["conv", "full_attention"]), "causal", {**NO_BLOCKS, **PARTS_DIFFER}
    ),
    "lfm2_untied": Foreign(
        _hf("CausalLM", "lfm2", **_GROUPED, layer_types=["conv", "full_attention"], tie_word_embeddings=False), "causal",
        {**NO_BLOCKS, **PARTS_DIFFER}
    ),
    "falcon_h1": Foreign(
        _hf("CausalLM", "falcon_h1", **_GROUPED, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        mamba_chunk_size=8), "causal", {**NO_BLOCKS, **PARTS_DIFFER}
    ),
    "mamba": Foreign(_hf("CausalLM", "mamba", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2), "causal", {**WHOLE, **NO_SDPA}),
    # encoders
    "bert": Foreign(_hf("MaskedLM", "bert", **_TEXT), "masked", WHOLE),
    "bert_classifier": Foreign(_hf("SequenceClassification", "bert", **_TEXT), "sentence", PADDED),
    "roberta": Foreign(_hf("SequenceClassification", "roberta", **_TEXT), "sentence", PADDED),
    "distilbert": Foreign(
        _hf("MaskedLM", "distilbert", vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64), "masked",
        WHOLE
    ),
    "albert": Foreign(_hf("MaskedLM", "albert", **_TEXT, embedding_size=16), "masked", WHOLE),
    "electra": Foreign(_hf("SequenceClassification", "electra", **_TEXT, embedding_size=16), "sentence", PADDED),
    "deberta": Foreign(
        _hf("SequenceClassification", "deberta-v2", **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]), "sentence", PADDED
    ),
    "modernbert": Foreign(_hf("MaskedLM", "modernbert", **_TEXT, cls_token_id=3, sep_token_id=3), "masked", WHOLE),
    # two towers
    "t5": Foreign(
        _hf("Seq2SeqLM", "t5", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=1, eos_token_id=None,
        decoder_start_token_id=1), "translation", {**WHOLE, **MASKED}
    ),
    "bart": Foreign(
        _hf("Seq2SeqLM", "bart", vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        forced_eos_token_id=None), "translation", {**WHOLE, **PARTS_DIFFER}
    ),
    "whisper": Foreign(
        _hf("SpeechSeq2Seq", "whisper", vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, num_mel_bins=8, max_source_positions=LENGTH,
        max_target_positions=64, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=0), "speech", {**WHOLE, **NO_TOKENS}
    ),
    # sound and images
    "wav2vec2": Foreign(
        _hf("AudioClassification", "wav2vec2", **_TEXT, conv_dim=[8, 8], conv_kernel=[10, 3], conv_stride=[5, 2], num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, feat_extract_norm="layer", classifier_proj_size=16), "sound", {**WHOLE, **NO_SEQUENCE}
    ),
    "vit": Foreign(_hf("ImageClassification", "vit", **_VISION), "image", IMAGE),
    "dinov2": Foreign(_hf("ImageClassification", "dinov2", **_VISION), "image", IMAGE),
    "clip": Foreign(
        _hf("ImageClassification", "clip", vision_config=_VISION, text_config={**_TEXT, "num_hidden_layers": 1}, projection_dim=16),
        "image", IMAGE
    ),
    "swin": Foreign(
        _hf("ImageClassification", "swin", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4),
        "image", IMAGE
    ),
    "convnext": Foreign(_hf("ImageClassification", "convnext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), "image", IMAGE),
    "resnet": Foreign(
        _hf("ImageClassification", "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"), "image",
        {**IMAGE, **STATISTICS}
    ),
    "unet": Foreign(_unet, "noise", NO_POSITIONS, needs="diffusers"),
    "dit": Foreign(_dit, "noise", NO_POSITIONS, needs="diffusers"),
    # adapters
    "lora_llama": Foreign(_lora("llama", ["q_proj", "v_proj"]), "causal", needs="peft"),
    "lora_gpt2": Foreign(_lora("gpt2", ["c_attn"]), "causal", WRAPPED, needs="peft"),
    # from libraries of images
    "torchvision_vit": Foreign(
        _classifier("torchvision.models.VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32,
        mlp_dim=48), "image", NO_POSITIONS, needs="torchvision"
    ),
    "torchvision_swin": Foreign(
        _classifier("torchvision.models.SwinTransformer", patch_size=[4, 4], embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=[4,
        4], stochastic_depth_prob=0.0), "image", NO_POSITIONS, needs="torchvision"
    ),
    # of the whole MobileNet the last maps are one pixel, and a rounding error of 1e-7 in its weights moves the loss by 5% in four steps
    "torchvision_mobilenet": Foreign(
        _classifier("torchvision.models.mobilenet_v2", width_mult=0.1, inverted_residual_setting=[[6, 8, 1, 1]], dropout=0.0), "image",
        {**NO_POSITIONS, **STATISTICS}, needs="torchvision"
    ),
    "timm_vit": Foreign(
        _classifier("timm.create_model", model_name="vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4, patch_size=8),
        "image", NO_POSITIONS, needs="timm"
    ),
    "timm_mixer": Foreign(
        _classifier("timm.models.mlp_mixer.MlpMixer", img_size=32, patch_size=8, num_blocks=2, embed_dim=32), "image", NO_POSITIONS, needs="timm"
    ),
    "timm_convnext": Foreign(
        _classifier("timm.create_model", model_name="convnext_atto", dims=(8, 16, 24, 32), depths=(1, 1, 1, 1)), "image", NO_POSITIONS,
        needs="timm"
    ),
    "timm_resnet": Foreign(
        _classifier("timm.create_model", model_name="resnet10t", channels=(8, 16, 24, 32), stem_width=8, norm_layer="groupnorm1"), "image",
        NO_POSITIONS, needs="timm"
    ),
}
# fmt: on

LAYOUTS = {
    "ddp": ("data", "strategy=ddp devices=2"),
    "fsdp": ("data", "strategy=fsdp devices=2"),
    "zero2": ("data", "strategy=zero2 devices=2 accumulate=2"),
    "tp": ("tp", "strategy=ddp devices=2 mesh.tp=2"),
    "tp_loss": ("tp", "strategy=ddp devices=2 mesh.tp=2 tensor.loss=split"),
    "ddp_tp": ("tp", "strategy=ddp devices=4 mesh.tp=2"),
    "fsdp_tp": ("tp", "strategy=fsdp devices=4 mesh.tp=2"),
    "pp": ("pp", "strategy=pipeline devices=2"),
    "fsdp_pp": ("pp", "strategy=fsdp devices=4 mesh.pp=2"),
    "cp": ("cp", "strategy=ddp devices=2 mesh.cp=2"),
    "ulysses": ("cp", "strategy=ddp devices=2 mesh.cp=2 context.attention=ulysses"),
    "fsdp_cp": ("cp", "strategy=fsdp devices=4 mesh.cp=2"),
    "ep": ("ep", "strategy=ddp devices=2 mesh.ep=2"),
}
"""name -> (the axis beside those of the data, words)."""
