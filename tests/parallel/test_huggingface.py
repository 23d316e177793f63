"""Hugging Face models and what peft makes of them, split over tp and pp: the numbers of one process, or a refusal that says why."""

import warnings
from typing import Any

import pytest
from invariance.run import reference, run, worst
from pool import RankFailed
from torch import nn

SMALL: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
ROUTED = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,
    "head_dim": 8,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}  # fmt: skip


def model(*, kind: str, config: dict[str, Any] | None = None, vocab: int = 29) -> nn.Module:
    import transformers

    settings = (
        SMALL
        | (ROUTED if "Mixtral" in kind or "Moe" in kind else {})
        | (LATENT if "Deepseek" in kind else {})
        | (config or {})
    )
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))  # type: ignore[no-any-return]


def adapted(*, kind: str = "Llama", vocab: int = 29, **options: Any) -> nn.Module:
    import peft
    import torch

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what it calls old
        made = peft.get_peft_model(model(kind=kind), peft.LoraConfig(r=4, target_modules=names, **options))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # which begins as zero, and would hide what is wrong with the others
            torch.nn.init.normal_(parameter, std=0.2)
    return made  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """A class of a user's own around a model that has the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model(kind="Llama")

    def forward(self, tokens: Any, **others: Any) -> Any:
        return self.net(tokens, **others).logits


DATA = "trust=[parallel] data=synthetic objective=next_token data.sequence=8 data.vocab=29"
HERE = "model._target_=parallel.test_huggingface"
MODELS = {
    "mixtral": f"{HERE}.model model.kind=Mixtral {DATA}",
    "qwen3_moe": f"{HERE}.model model.kind=Qwen3Moe {DATA}",
    "phi3": f"{HERE}.model model.kind=Phi3 {DATA}",
    "deepseek_v3": f"{HERE}.model model.kind=DeepseekV3 {DATA}",
    "deepseek_v2": f"{HERE}.model model.kind=DeepseekV2 {DATA}",
    "lora": f"{HERE}.adapted {DATA}",
    "saved": f"{HERE}.adapted model.modules_to_save=[lm_head] {DATA}",
    "wrapped": f"{HERE}.Wrapped {DATA}",
}


@pytest.mark.parametrize(
    ("name", "words"),
    [("mixtral", "mesh.tp=2 strategy=ddp"), ("lora", "mesh.tp=2 strategy=ddp"), ("lora", "mesh.pp=2 strategy=ddp"), ("wrapped", "mesh.tp=2 strategy=ddp"),
     ("deepseek_v2", "mesh.tp=2 strategy=ddp"), ("phi3", "mesh.tp=2 strategy=ddp tensor.loss=split"), *(pytest.param(name, words, marks=pytest.mark.slow) for name, words in (
         ("qwen3_moe", "mesh.tp=2 strategy=ddp"), ("deepseek_v3", "mesh.tp=2 strategy=ddp"), ("saved", "mesh.tp=2 strategy=ddp"), ("wrapped", "mesh.pp=2 strategy=ddp"),
         ("mixtral", "mesh.tp=2 strategy=fsdp devices=4"), ("lora", "mesh.tp=2 strategy=fsdp devices=4"), ("lora", "strategy=fsdp"),
     ))],
)  # fmt: skip
def test_two_ranks_are_one_process(name: str, words: str) -> None:
    words = words if "devices" in words else f"{words} devices=2"
    differences = worst(run(MODELS[name], words, steps=3), reference(MODELS[name], 3))
    assert differences["losses"] <= 2e-6 and differences["gradients"] <= 2e-6, (words, differences)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{HERE}.model model.kind=Llama model.config.num_attention_heads=3 model.config.num_key_value_heads=3 model.config.hidden_size=36 mesh.tp=2",
         r"mesh\.tp=2 does not divide num_attention_heads=3 of LlamaAttention\. Type mesh\.tp=1 or mesh\.tp=3"),
        (f"{HERE}.model model.kind=Llama model.config.num_key_value_heads=1 mesh.tp=2", r"does not divide num_key_value_heads=1"),
        (f"{HERE}.model model.kind=Llama model.config.tie_word_embeddings=true mesh.pp=2", r"Build the model untied \(tie_word_embeddings=false in its config\)"),
        (f"{HERE}.adapted model.use_dora=true mesh.tp=2", r"q_proj is adapted by \w+; only LoRA without DoRA can be split"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_what_to_type(words: str, why: str) -> None:
    with pytest.raises(RankFailed, match=why):
        run(f"{words} {DATA}", "strategy=ddp devices=2", steps=1)
