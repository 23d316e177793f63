"""Text from a model, token by token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtrain.model.seeds import generator


def complete(
    forward: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    tokens: int,
    context: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """`prompt` and `tokens` more. `forward` maps tokens [1, T] to logits [1, T, V]; it sees the last `context` tokens.

    Temperature 0 takes the likeliest token. The draws depend on the seed alone, so all ranks of a mesh agree.
    """
    draw, written = generator(seed, "sample"), list(prompt)
    for _ in range(tokens):
        logits = forward(torch.tensor([written[-context:]]))[0, -1].float().cpu()
        if temperature == 0:
            written.append(int(logits.argmax()))
        else:
            written.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=draw)))
    return written
