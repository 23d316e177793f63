"""Preparation of Hugging Face models for packed rows and for a split: where that is of the sequence they must build no
masks, and their configuration has the numbers of heads.
"""

import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtrain.errors import WordsError
from dtrain.model import documents
from dtrain.parallel.context import innermost


def adapt(model: nn.Module) -> None:
    """Prepare the Hugging Face models in `model` that use sdpa for a Context. Outside of a Context nothing changes, nor
    do other models.

    transformers reads positions that jump as packed sequences and masks them, unless there is an attention_mask: so the
    model gets one of ones. Where transformers asks for a mask it gets None or the documents of packed rows, or
    WordsError if the mask would hide more than later tokens.
    """
    module: Any
    for module in model.modules():
        transformers = sys.modules.get("transformers")
        if (
            transformers
            and isinstance(module, transformers.PreTrainedModel)
            and module.config._attn_implementation == "sdpa"
        ):
            # https://huggingface.co/docs/transformers/attention_interface
            transformers.AttentionInterface.register("sdpa_context", transformers.AttentionInterface()["sdpa"])
            transformers.AttentionMaskInterface.register("sdpa_context", _mask)
            module.set_attn_implementation("sdpa_context")
            module.register_forward_pre_hook(_with_ones, with_kwargs=True)


def packs(model: nn.Module) -> None:
    """Have the Hugging Face models in `model` see where documents of packed rows begin. Other models are left alone."""
    transformers = sys.modules.get("transformers")
    for module in model.modules():
        takes = inspect.signature(module.forward).parameters if transformers else {}
        if transformers and isinstance(module, transformers.PreTrainedModel) and "use_cache" in takes:
            module.register_forward_pre_hook(documents.without_cache, with_kwargs=True)


def _with_ones(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    inputs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments if innermost() else {}
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    context = innermost()
    if context and inputs.get(documents.POSITIONS) is not None:
        context.held = context.documents(inputs[documents.POSITIONS])
    if tokens is None or inputs.get("attention_mask") is not None:
        return None
    return args, kwargs | {"attention_mask": torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)}


def _mask(**asked: Any) -> Any:
    """The mask that transformers asks for: its own for whole sequences, None or the documents for a split one."""
    context = innermost()
    if context is None:
        return sys.modules["transformers"].AttentionMaskInterface()["sdpa"](**asked)
    mask, window = asked.get("attention_mask"), asked.get("local_size")
    plain = asked.get("allow_is_causal_skip") or asked.get("allow_is_bidirectional_skip")
    is_narrow = window is not None and window < asked["q_length"] * context.size
    if not plain or is_narrow or (mask is not None and not mask.all()):
        raise WordsError(
            f"mesh.cp={context.size}: the model's attention mask is more than causal (a window, padding, a prefix). "
            "Type mesh.cp=1."
        )
    return context.held


def untied(model: nn.Module) -> str:
    """The setting that makes embedding and head of the model two weights."""
    foreign = any(hasattr(getattr(module, "config", None), "tie_word_embeddings") for module in model.modules())
    if foreign:
        return "tie_word_embeddings=false in its config"
    takes = inspect.signature(type(model)).parameters
    return "model.tied=false" if "tied" in takes else "two parameters in its __init__"


def shared_key_width(model: nn.Module) -> int:
    """The number of outputs of DeepSeek's kv_a projection that are the key shared by all heads; 0 for other models."""
    sizes = (getattr(getattr(module, "config", None), "qk_rope_head_dim", None) for module in model.modules())
    return next((size for size in sizes if isinstance(size, int)), 0)


def check_heads(model: nn.Module, split: Sequence[str], degree: int) -> None:
    """Raises WordsError if `degree` does not divide the heads whose projections are `split` by their outputs."""
    for name, module in model.named_modules():
        heads: dict[str, int] = {}
        for key, projection in (("num_attention_heads", "q_"), ("num_key_value_heads", "k_")):
            size = getattr(getattr(module, "config", None), key, None)
            if isinstance(size, int) and any(each.startswith(f"{name}.{projection}") for each in split):
                heads[key] = size
        wrong = next((key for key, size in heads.items() if size % degree), None)
        if wrong:
            most = math.gcd(*heads.values())
            fits = [str(each) for each in range(1, most + 1) if most % each == 0]
            raise WordsError(
                f"mesh.tp={degree} does not divide {wrong}={heads[wrong]} of {type(module).__name__}. Type "
                f"mesh.tp={' or mesh.tp='.join(fits[-3:])}."
            )
