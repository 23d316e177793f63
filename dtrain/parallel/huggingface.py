"""What Hugging Face models need before their sequences can be split: masks and packed sequences are theirs to make, and must not be."""

import inspect
import sys
from typing import Any

import torch
from torch import nn

from dtrain.errors import WordsError
from dtrain.parallel.context import innermost


def adapt(model: nn.Module) -> None:
    """Make the Hugging Face models in `model` that attend by sdpa ready for a Context; outside it, and any other model, stays as it is.

    transformers takes positions that jump for packed sequences and masks them apart, unless there is an attention_mask: they get one
    of ones. Where it asks for a mask it is told that there is none to make, or WordsError when it would be other than causal or none.
    """
    module: Any
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa" and "transformers" in sys.modules:
            transformers = sys.modules["transformers"]
            # https://huggingface.co/docs/transformers/attention_interface
            transformers.AttentionInterface.register("sdpa_context", transformers.AttentionInterface()["sdpa"])
            transformers.AttentionMaskInterface.register("sdpa_context", _mask)
            module.set_attn_implementation("sdpa_context")
            module.register_forward_pre_hook(_with_ones, with_kwargs=True)


def _with_ones(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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
    if not plain or (window is not None and window < asked["q_length"] * context.size) or (given is not None and not given.all()):
        raise WordsError(f"mesh.cp={context.size}: the model hides tokens by more than causality (a window, padding, a prefix). Type mesh.cp=1.")
    return None
