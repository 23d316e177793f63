"""Text from a model, token by token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.model.cache import KVCache
from dtrain.model.seeds import generator


def complete(
    forward: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    tokens: int,
    context: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
    cache: KVCache | None = None,
    show: Callable[[list[int]], object] | None = None,
) -> list[int]:
    """`prompt` and `tokens` more. `forward` maps tokens [1, T] to logits [1, T, V]; it sees the last `context` tokens.
    `cache`: that of the model behind `forward`, used as long as no token leaves the context. `show` is called with all
    tokens so far after each new one.

    Temperature 0 takes the likeliest token; otherwise one is drawn of the likeliest that together have the probability
    `top_p` (nucleus sampling, arXiv 1904.09751). The draws depend on the seed alone, so all ranks of a mesh agree.
    """
    draw, text = generator(seed, "sample"), list(prompt)
    new = text
    if cache:
        cache.begin(1)
    for _ in range(tokens):
        is_kept = cache is not None and len(text) <= context
        if cache and not is_kept:
            cache.begin(1)
        seen = new if is_kept else text[-context:]
        logits = forward(torch.tensor([seen]))[0, -1].float().cpu()
        if cache and is_kept:
            cache.advance(torch.tensor([len(seen)]))
        new = [_next(logits, temperature, top_p, draw)]
        text += new
        if show:
            show(text)
    return text


def _next(logits_V: Tensor, temperature: float, top_p: float, draw: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    chances, tokens = (logits_V / temperature).softmax(0).sort(descending=True, stable=True)
    before = chances.cumsum(0) - chances
    return int(tokens[torch.multinomial(chances * (before < top_p), 1, generator=draw)])
