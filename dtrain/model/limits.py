"""Tokens and positions for which a model has embeddings. Batches are compared with them on the CPU: a token beyond them
ends the process of a GPU, and under mesh.tp it passes as a row of zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dtrain.errors import WordsError, an
from dtrain.model import own_class, tables
from dtrain.model.documents import POSITIONS


@dataclass(frozen=True)
class Limits:
    """Rows of a model's embedding of tokens, and of its table of positions; None: not known, or no such table."""

    model: str
    tokens: int | None = None
    positions: int | None = None

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raises WordsError for a batch on the CPU with a token, or a length, that the model has no embedding of."""
        inputs = batch["inputs"]
        named = isinstance(inputs, Mapping)
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
        if not isinstance(tokens, Tensor) or not tokens.numel() or self.tokens is None:
            return
        if tokens.is_floating_point():
            if named:
                raise WordsError(
                    "data: input_ids has fractions, and tokens are whole numbers. Write them without a dot."
                )
            return
        least, most = (int(each) for each in tokens.aminmax())
        if least < 0 or most >= self.tokens:
            raise WordsError(
                f"data: a row has the token {least if least < 0 else most}, and {self.model} has embeddings of the "
                f"tokens 0 to {self.tokens - 1}. Make the rows with the tokenizer of the model."
            )
        longest = int(inputs[POSITIONS].max()) + 1 if named and POSITIONS in inputs else tokens.shape[-1]
        if self.positions is not None and longest > self.positions:
            raise WordsError(
                f"data: a row has {longest} tokens, and {self.model} has positions for {self.positions}. Type "
                f"data.sequence={self.positions}, or cut the rows."
            )


def limits_of(model: nn.Module) -> Limits:
    """Those of a model of transformers or of dtrain, whole or split; without limits if it is another."""
    owner = next((each for each in model.modules() if hasattr(each, "get_input_embeddings")), None)
    table = _embedding(model, owner)
    if not isinstance(table, nn.Embedding):
        return Limits(an(model))
    positions = [
        each.num_embeddings - int(getattr(each, "offset", 0))
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding) and _has_positions(name.rpartition(".")[2]) and each.padding_idx is None
    ]
    name = own_class(owner if owner is not None else model).__name__
    return Limits(name, table.num_embeddings, max(positions, default=None))


def _embedding(model: nn.Module, owner: nn.Module | None) -> Any:
    if owner is not None:
        try:
            return owner.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            return None
    prefix, names = next(tables(model, "pipeline"), ("", ()))
    first = f"{prefix}{next(iter(names), '')}"
    return dict(model.named_modules()).get(first) if first else None


def _has_positions(name: str) -> bool:
    return name == "wpe" or ("position" in name and "rel" not in name)
