"""Rows of text as tokens, as a model that classifies them reads them: with the special tokens that their tokenizer puts
around a text, and without what is beyond the longest row.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.chat.tokenizer import Described, Tokenizer, described
from dtrain.errors import PreflightError

UNLIMITED = 1 << 20
"""A `model_max_length` from here on means that the tokenizer knows none."""


class RowText:
    """The tokenizer at `name`, for rows of at most `most` tokens; None: of `model_max_length`, if it states one. Raises
    PreflightError.
    """

    def __init__(self, name: str, most: int | None) -> None:
        self._described = described(name, None)
        self._tokenizer = Tokenizer(self._described)
        self.most = longest(self._described) if most is None else most
        self._whole = self._tokenizer.inner
        self._cut = type(self._whole).from_str(self._whole.to_str())
        if self.most is not None:
            self._cut.enable_truncation(self.most)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self._described.digest}-{self.most}".encode()).hexdigest()

    def tokens(self, text: str) -> NDArray[np.int64]:
        return np.array(self._cut.encode(text).ids, np.int64)

    def is_cut(self, text: str) -> bool:
        return self.most is not None and len(self._whole.encode(text).ids) > self.most


def encoder_of(data: Mapping[str, Any]) -> RowText | None:
    """The tokenizer of the rows of text of a part of data; None if they are numbers. Raises PreflightError."""
    return RowText(data["tokenizer"], data["sequence"] or data["length"]) if data.get("tokenizer") else None


def padding(name: str) -> int:
    """The token of padding of the tokenizer at `name`. Raises PreflightError if it has none."""
    number = Tokenizer(described(name, None)).number("pad_token")
    if number is None:
        raise PreflightError(
            f"data.tokenizer={name}: it has no pad_token. Type data.pad=<the number of one of its tokens>, that of "
            "eos_token for a model that reads from left to right."
        )
    return number


def longest(of: Described) -> int | None:
    """The `model_max_length` of a tokenizer; None if it states none."""
    stated: Any = of.config.get("model_max_length")
    return int(stated) if isinstance(stated, int | float) and 0 < stated < UNLIMITED else None
