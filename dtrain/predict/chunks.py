"""Tokens of a chunk of a loss that computes logits a chunk at a time (dtrain.objective.chunked), and the bytes that
losses have in fp32 at once. `dtrain plan` shows the first as `objective.chunk`.

On a CPU a chunk stays in a cache. On a GPU it is large: the gradient of hidden states, [rows, V] @ [V, C], has only as
many tiles as rows x C has, and every chunk reads and writes the gradient of the weight [V, C] once more.
"""

import math

from dtrain.planned import Plan
from dtrain.predict.shapes import Chunk

LARGE_VOCABULARY = 8192
"""The smallest vocabulary whose logits `objective.chunk=auto` computes in chunks."""
CACHED = 512
"""Tokens of a chunk on a CPU."""
WANTED, FILLING, LEAST = 8192, 17.3e6, 512
"""Tokens of a chunk on a GPU: at least `WANTED`, and with a width of C at least `FILLING` / C, four tiles of 128 x 256
for each of 132 multiprocessors; down to `LEAST` where memory is short.
"""
HEADROOM = 4 << 30
"""Bytes that are taken to be free for logits where memory is not predicted."""
BLOCK = {"cpu": 1 << 20, "cuda": 32 << 20}
"""Bytes of the logits that a loss has in fp32 at a time where it is not compiled, so that they stay in the cache of a
core, or of a GPU.
"""
LOSS_ROWS = 64 << 20
"""Bytes of the logits in 16 bits that any other loss has in fp32 at a time."""


def in_chunks(chunk: int | str, vocabulary: int) -> bool:
    """Whether an objective with this `chunk` computes the logits of so large a vocabulary in chunks."""
    return vocabulary >= LARGE_VOCABULARY if isinstance(chunk, str) else chunk > 0


def rows_for(tokens: int, *, width: int, vocabulary: int, bytes: int, device: str, headroom: float = HEADROOM) -> int:
    """Tokens of a chunk, of `tokens` of a microbatch on this rank. Logits have `vocabulary` numbers of `bytes` and take
    half of the `headroom` at most. Chunks are equal where that divides the tokens, so that one graph is compiled.
    """
    if device != "cuda":
        return CACHED
    rows = min(max(WANTED, FILLING / width), tokens)
    while rows > LEAST and rows * vocabulary * bytes > headroom / 2:
        rows = max(rows / 2, LEAST)
    fewest = math.ceil(tokens / max(rows, 1))
    count = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return max(1, tokens // count if tokens % count == 0 else 128 * math.ceil(tokens / count / 128))


def rows_of(plan: Plan, chunk: Chunk, headroom: float = HEADROOM) -> int:
    """Tokens of a chunk of this plan: those of its words, else of `rows_for`."""
    asked = plan.objective.get("chunk", chunk.rows)
    if not isinstance(asked, str):
        return int(asked)
    return rows_for(
        math.ceil(plan.batch.microbatch * chunk.tokens / plan.mesh.cp),
        width=chunk.numbers // max(1, chunk.vocabulary),
        vocabulary=math.ceil(chunk.vocabulary / (plan.mesh.tp if chunk.split else 1)),
        bytes=chunk.bytes,
        device=plan.device,
        headroom=headroom,
    )
