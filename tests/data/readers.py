"""Models that read rows in both directions, and rows of several lengths for them."""

from typing import Any

import torch
from torch import Tensor, nn

SIZES = (5, 3, 7, 2, 8, 4, 6, 1)


class Classes(list[Any]):
    """Rows of 1 to 8 tokens with a class each."""

    classes = 3

    def __init__(self) -> None:
        super().__init__(([1 + (3 * i + place) % 12 for place in range(SIZES[i % 8])], i % 3) for i in range(16))


class Texts(list[Any]):
    """Pairs of sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__(
            {"x": [1 + (3 * i + place) % 12 for place in range(SIZES[i % 8])], "y": [2 + i % 5] * SIZES[(i + 3) % 8]}
            for i in range(16)
        )


class Series(list[Any]):
    """Rows of numbers with a whole number to predict for each."""

    def __init__(self) -> None:
        super().__init__(
            ([float((i + place) % 7) for place in range(size)], [(i * place) % 5 for place in range(size)])
            for i in range(16)
            for size in [SIZES[i % 8]]
        )


class Mean(nn.Module):
    """Of each number of a row and the mean of the row, by a mask of one's own name for the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, series: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(series) if attention_mask is None else attention_mask.to(series)
        mean = (series * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        out: Tensor = self.layer(torch.stack([series, mean.expand_as(series)], 2))[..., 0]
        return out


def bert(**given: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    made: nn.Module = BertForSequenceClassification(
        BertConfig(vocab_size=13, max_position_embeddings=16, num_labels=3, **small, **dropout, **given)
    )
    return made


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    made: nn.Module = T5ForConditionalGeneration(
        T5Config(
            vocab_size=13, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    return made
