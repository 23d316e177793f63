"""The tensors of an export: as they are in the checkpoint, or those of a model of transformers that computes the same.

A gpt leaves as a Qwen3: the same blocks, with the factor of its embeddings in their weights, and norms of queries and
keys that have the weight one. A moe leaves as a GLM-4 MoE, whose router scores and balances experts in the same way;
without shared experts it has one of zeros there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrain.errors import WordsError

Box = tuple[slice, ...]

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK = {
    "attention_norm": "input_layernorm", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm", "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj", "feed_forward.down": "mlp.down_proj",
    "feed_forward.router": "mlp.gate", "feed_forward.shared.gate": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.up": "mlp.shared_experts.up_proj", "feed_forward.shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip
"""Module of a block -> its name in a layer of Qwen3 or GLM-4 MoE."""
PARAMETERS = {
    "feed_forward.bias": "mlp.gate.e_score_correction_bias", "feed_forward.experts.down": "mlp.experts.down_proj",
    "feed_forward.experts.gate": "mlp.experts.gate_up_proj", "feed_forward.experts.up": "mlp.experts.gate_up_proj",
}  # fmt: skip
"""Parameters that are no `weight`; gate and up are the halves of one there."""


@dataclass(frozen=True)
class Made:
    """A tensor of an export. `parts`: name in the checkpoint -> the box that it fills; then all is multiplied by
    `scale`. Without parts every element is `value`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Mapping[str, Box]
    scale: float = 1.0
    value: float = 0.0


def leave(made: Mapping[str, Made], config: Mapping[str, Any]) -> dict[str, Made]:
    """The tensors `made` of a gpt or moe, as those of the model of transformers with this `config`. Raises WordsError
    if there are others.
    """
    result = dict[str, Made]()
    for name, one in made.items():
        place = renamed(name)
        if place is None:
            raise WordsError(f"as=transformers: {name} has no place in a {config['model_type']}. Leave as out.")
        result[place] = _joined(result[place], one) if place in result else one
    embed = result[OUTSIDE["embed.weight"]]
    result[OUTSIDE["embed.weight"]] = replace(embed, scale=config["hidden_size"] ** 0.5)
    result.setdefault(OUTSIDE["head.weight"], embed)
    ones = Made((config["head_dim"],), result["model.norm.weight"].dtype, {}, value=1.0)
    for layer in range(config["num_hidden_layers"]):
        result |= {f"model.layers.{layer}.self_attn.{each}_norm.weight": ones for each in "qk"}
        shared = f"model.layers.{layer}.mlp.shared_experts"
        if "n_shared_experts" in config and f"{shared}.up_proj.weight" not in result:  # there is one at least
            none = replace(ones, shape=(config["moe_intermediate_size"], config["hidden_size"]), value=0.0)
            result |= {f"{shared}.{each}_proj.weight": none for each in ("gate", "up")}
            result[f"{shared}.down_proj.weight"] = replace(none, shape=none.shape[::-1])
    return result


def renamed(name: str) -> str | None:
    """The name in transformers of a tensor of a gpt or moe; None for another one."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    room, _, rest = name.partition(".")
    layer, _, own = rest.partition(".")
    module, _, kind = own.rpartition(".")
    there = PARAMETERS.get(own) or (f"{BLOCK[module]}.weight" if kind == "weight" and module in BLOCK else None)
    return f"model.layers.{layer}.{there}" if room == "blocks" and layer.isdecimal() and there else None


def _joined(first: Made, second: Made) -> Made:
    """Both as halves of dim 1."""
    half = first.shape[1]
    boxes = (slice(None), slice(0, half)), (slice(None), slice(half, 2 * half))
    (one,), (two,) = first.parts, second.parts
    shape = (first.shape[0], 2 * half, *first.shape[2:])
    return replace(first, shape=shape, parts=dict(zip((one, two), boxes, strict=True)))
