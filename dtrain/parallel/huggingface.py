"""Preparation of Hugging Face models for a split: masks and packed sequences are theirs to make, and must not
be; heads are theirs to count.
"""

import inspect
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtrain.errors import WordsError
from dtrain.parallel.context import innermost


def adapt(model: nn.Module) -> None:
    """Make the Hugging Face models in `model` that attend by sdpa ready for a Context; outside it, and any other model,
    stays as it is.

    transformers takes positions that jump for packed sequences and masks them apart, unless there is an attention_mask:
    they get one of ones. Where it asks for a mask it is told that there is none to make, or WordsError when it would be
    other than causal or none.
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


def _with_ones(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments if innermost() else {}
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if tokens is None or given.get("attention_mask") is not None:
        return None
    return args, kwargs | {"attention_mask": torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)}


def _mask(**asked: Any) -> Any:
    """The mask that transformers asks for: its own for whole sequences, None for a part of one."""
    context = innermost()
    if context is None:
        return sys.modules["transformers"].AttentionMaskInterface()["sdpa"](**asked)
    given, window = asked.get("attention_mask"), asked.get("local_size")
    plain = asked.get("allow_is_causal_skip") or asked.get("allow_is_bidirectional_skip")
    if (
        not plain
        or (window is not None and window < asked["q_length"] * context.size)
        or (given is not None and not given.all())
    ):
        raise WordsError(
            f"mesh.cp={context.size}: the model hides tokens by more than causality (a window, padding, a prefix). "
            "Type mesh.cp=1."
        )
    return None


def untied(model: nn.Module) -> str:
    """The sentence for a model whose embedding and head are two weights."""
    foreign = any(hasattr(getattr(module, "config", None), "tie_word_embeddings") for module in model.modules())
    return "tie_word_embeddings=false in its config" if foreign else "model.tied=false"


def rotated(model: nn.Module) -> int:
    """How many outputs of a projection of DeepSeek's attention are the key that all heads share; 0 for others."""
    sizes = (getattr(getattr(module, "config", None), "qk_rope_head_dim", None) for module in model.modules())
    return next((size for size in sizes if isinstance(size, int)), 0)


def check_heads(model: nn.Module, split: Sequence[str], degree: int) -> None:
    """Raises WordsError where `degree` does not divide the heads whose projections are `split` by their outputs."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        queries, keys = (any(each.startswith(f"{name}.{part}") for each in split) for part in ("q_", "k_"))
        sizes = {
            each: getattr(config, each, None)
            for each, wanted in (("num_attention_heads", queries), ("num_key_value_heads", keys))
            if wanted
        }
        counted = {each: size for each, size in sizes.items() if isinstance(size, int)}
        wrong = next((each for each, size in counted.items() if size % degree), None)
        if wrong:
            most = math.gcd(*counted.values())
            fits = [str(each) for each in range(1, most + 1) if most % each == 0]
            raise WordsError(
                f"mesh.tp={degree} does not divide {wrong}={counted[wrong]} of {type(module).__name__}. Type "
                f"mesh.tp={' or mesh.tp='.join(fits[-3:])}."
            )
