"""Whether a model must be told where rows were padded, and under which name it takes its tokens."""

import inspect
from typing import Any

from torch import nn

from dtrain.errors import WordsError, an

MASK = "attention_mask"


def mask_beside(model: nn.Module) -> str | None:
    """The name of the model's first argument, if its forward takes an `attention_mask` that padding changes; None if
    it takes none, or if it is causal: padding behind a row is then after all that a token sees, and the kernels
    without a mask are faster. A model is causal if all of its modules that state `is_causal` do, as transformers'
    attention does, and no loss of a router counts all tokens.
    """
    takes = inspect.signature(model.forward).parameters
    first = next((name for name in takes if name != MASK), None)
    if MASK not in takes or first is None or takes[first].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return None if _is_causal(model) and not _routes(model) else first


def unmasked(model: nn.Module, pad: float | None, inputs: Any) -> list[str]:
    """A sentence about a model that gets padded rows and no mask; none if it takes one or is known to be causal."""
    takes, named = inspect.signature(model.forward).parameters, [inputs] if isinstance(inputs, str) else inputs or ()
    if pad is None or MASK in takes or any("mask" in str(name) for name in named) or _is_causal(model):
        return []
    if type(model).__module__.startswith("dtrain."):
        return []
    let = "Let it take attention_mask [B, T]: 1 for a row, 0 for padding"
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        let = f"If its **{[*takes][-1]} may have it, type data.inputs=[<the inputs>,{MASK}]; else let it take one"
    return [
        f"data.pad: the forward of {type(model).__name__} takes no attention_mask. Unless it is causal, or passes over "
        f"{pad:g} itself, its numbers depend on how far rows are padded, and so on the ranks and on the batch of a "
        f"prediction. {let}."
    ]


def check_padding(model: nn.Module, pad: float | None) -> None:
    """Raises WordsError for padding that a causal classifier of transformers takes for the last token of a row: it
    looks for the last one that is not its pad_token_id, and reads no mask.
    """
    config: Any = getattr(model, "config", None)
    if pad is None or not type(model).__name__.endswith("ForSequenceClassification") or not _is_causal(model):
        return
    told = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "pad_token_id", None)
    if told != pad:
        raise WordsError(
            f"data.pad={pad:g}: {an(model)} reads the class of a row from its last token that is not pad_token_id, "
            f"which is {told} in its config.json. Type data.pad={'<the padding token>' if told is None else told}, or "
            f"model.config={{pad_token_id: {pad:g}}}."
        )


def _is_causal(model: nn.Module) -> bool:
    stated = {each for module in model.modules() if isinstance(each := getattr(module, "is_causal", None), bool)}
    return stated == {True}


def _routes(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))
