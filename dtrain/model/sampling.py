"""Text from a model, token by token."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from dtrain.model.cache import KVCache
from dtrain.model.seeds import generator

Show = Callable[[list[int]], object]


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
    ends: Collection[int] = (),
    show: Show | None = None,
) -> list[int]:
    """`prompt` and what `answers` gives for it alone. `show` is called with all tokens so far after each new one."""
    begun = list(prompt)
    shown = None if show is None else lambda new: show(begun + new)
    return begun + answers(
        forward, [prompt], tokens=tokens, context=context, temperature=temperature, seed=seed, top_p=top_p, cache=cache,
        ends=ends, show=shown,
    )[0]  # fmt: skip


@torch.no_grad()
def answers(
    forward: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    context: int,
    temperature: float,
    seed: int,
    top_p: float = 1.0,
    cache: KVCache | None = None,
    ends: Collection[int] = (),
    first: int = 0,
    show: Show | None = None,
    done: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, at most `tokens`, and none from one of `ends` on. `forward` maps tokens
    [B, T] to logits [B, T, V]; it sees the last `context` tokens of each. `cache`: that of the model behind `forward`,
    used as long as no token leaves the context. `show` is called with the first answer so far after each new token;
    `done` with each answer so far, which ends if it says so.

    Temperature 0 takes the likeliest token; otherwise one is drawn of the likeliest that together have the probability
    `top_p` (nucleus sampling, arXiv 1904.09751). The draws depend on the seed and the number of the prompt, `first` for
    the first one, so all ranks of a mesh agree, whatever is answered together.
    """
    draws = [
        generator(seed, f"sample {number}" if number else "sample") for number in range(first, first + len(prompts))
    ]
    texts, begun = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
    new, open_ = [list(text) for text in texts], [*range(len(texts))]
    if cache:
        cache.begin(len(texts))
    for _ in range(tokens):
        is_kept = cache is not None and max(map(len, texts)) <= context
        if cache and not is_kept:
            cache.begin(len(open_))
        rows = [*range(len(texts))] if is_kept else open_
        seen = [new[row] if is_kept else texts[row][-context:] for row in rows]
        logits = _last(forward, seen)
        if cache and is_kept:
            cache.advance(torch.tensor([len(each) for each in seen]))
        new = [list[int]() for _ in texts]
        for place, row in enumerate(rows):
            if row in open_:
                token = _next(logits[place], temperature, top_p, draws[row])
                new[row] = [] if token in ends else [token]
                texts[row] += new[row]
        open_ = [row for row in open_ if new[row] and not (done and done(texts[row][begun[row] :]))]
        if show and 0 in open_:
            show(texts[0][begun[0] :])
        if not open_:
            break
    return [text[begin:] for text, begin in zip(texts, begun, strict=True)]


def _last(forward: Callable[[Tensor], Tensor], seen: Sequence[Sequence[int]]) -> Tensor:
    """The logits [B, V] after the last token of each row; of a row without tokens, any."""
    longest = max(1, *map(len, seen))
    rows = torch.tensor([[*each, *[0] * (longest - len(each))] for each in seen])
    logits = forward(rows)
    if all(len(each) == longest for each in seen):
        return logits[:, -1].float().cpu()
    last = torch.tensor([max(0, len(each) - 1) for each in seen])
    return logits[torch.arange(len(seen), device=logits.device), last.to(logits.device)].float().cpu()


def _next(logits_V: Tensor, temperature: float, top_p: float, draw: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    chances, tokens = (logits_V / temperature).softmax(0).sort(descending=True, stable=True)
    before = chances.cumsum(0) - chances
    return int(tokens[torch.multinomial(chances * (before < top_p), 1, generator=draw)])
