"""A model that keeps keys and values says what it says without, for sequences of any lengths."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from dtrain.model.cache import ROOM, kv_cache
from dtrain.model.gpt import GPT
from dtrain.model.moe import MoE
from dtrain.model.sampling import complete

SIZES = {"vocab": 32, "layers": 2, "heads": 4, "width": 32}
MODELS = {
    "gpt": lambda: GPT(**SIZES), "grouped": lambda: GPT(**SIZES, kv_heads=2),
    "moe": lambda: MoE(**SIZES, experts=4, active=2),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made = MODELS[request.param]().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2, generator=draw)
    return made


@torch.no_grad()
@pytest.mark.parametrize("tokens", [ROOM + 40])
def test_logits_are_those_of_the_whole_sequence(model: nn.Module, tokens: int) -> None:
    """Of two sequences whose parts are of different lengths, and padded."""
    text = torch.randint(32, (2, tokens), generator=torch.Generator().manual_seed(1))
    whole = model(text)
    cuts = [[0, 7, 8, 9, tokens // 2, tokens], [0, 3, 8, 20, tokens - 5, tokens]]
    with kv_cache(model) as cache:
        assert cache
        cache.begin(2)
        for (first, second), (third, fourth) in zip(*map(pairwise, cuts), strict=True):
            parts = [text[0, first:second], text[1, third:fourth]]
            logits = model(nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=5))
            cache.advance(torch.tensor([len(part) for part in parts]))
            for row, begin in enumerate((first, third)):
                torch.testing.assert_close(logits[row, : len(parts[row])], whole[row, begin : begin + len(parts[row])])
    torch.testing.assert_close(model(text), whole, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_same_beyond_the_context_too(model: nn.Module, temperature: float) -> None:
    words = {"tokens": 40, "context": 24, "temperature": temperature, "seed": 3, "top_p": 0.9}
    seen = list[int]()

    def watching(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.shape[1])
        return model(tokens)  # type: ignore[no-any-return]

    alone = complete(model, [1, 2, 3], **words)  # type: ignore[arg-type]
    with kv_cache(model) as cache:
        assert complete(watching, [1, 2, 3], cache=cache, **words) == alone  # type: ignore[arg-type]
    assert seen == [3, *[1] * 21, *[24] * 18]


def test_another_model_keeps_nothing() -> None:
    with kv_cache(nn.Linear(2, 2)) as cache:
        assert cache is None
