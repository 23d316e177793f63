"""Masked language modelling (BERT, arXiv 1810.04805): some tokens are hidden, and the model says what they were."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dtrain.data import IGNORE, Batch, Growing, Indices, Loading, Ordered, Source
from dtrain.errors import WordsError, nearest
from dtrain.objective import Loss, logits_of
from dtrain.objective.vocabulary import LARGEST_EXPONENT, cross_entropy

USUAL = ("[MASK]", "<mask>", "<|mask|>")
"""Names of the mask token in tokenizers."""
BITS = (1 << 64) - 1


class Masked:
    """Outputs [B, T, V]; of every row `part` of the tokens are targets [B, T], all others are -100. The model sees the
    mask token in place of `hidden` of them, a token of the vocabulary in place of `random` of them, and the rest as it
    is. `token`: the mask token; None: the one of the tokenizer with a usual name. The loss is in nats per target.
    `chunk`: tokens whose logits exist at a time.
    """

    unit = "tokens"

    def __init__(self, *, part: float, hidden: float, random: float, token: str | None, chunk: int | str = 0) -> None:
        self._part, self._hidden, self._random, self._token, self.chunk = part, hidden, random, token, chunk

    def prepared(self, source: Source, *, seed: int) -> Source:
        """The rows of `source` with tokens hidden. Raises WordsError if it has no mask token."""
        specials: Mapping[str, int] = getattr(source, "specials", {})
        names = [self._token] if self._token else USUAL
        token = next((specials[name] for name in names if name in specials), None)
        if token is None or isinstance(source, Ordered | Growing):
            has = f" Its special tokens are {', '.join(list(specials)[:6])}." if specials else ""
            near = nearest(self._token, specials) if self._token else ""
            raise WordsError(
                f"objective=masked: the tokenizer of the data has no {' nor '.join(names)}.{near}{has} Type "
                "data=text data.tokenizer=<a tokenizer.json with one>, or objective.token=<its name> if it is "
                "another."
            )
        return Hiding(source, seed, token, sorted(specials.values()), (self._part, self._hidden, self._random))

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        return Loss(cross_entropy(logits_of(outputs), batch["targets"]))

    def figures(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:
        """Perplexity of the hidden tokens."""
        return {"perplexity": math.exp(min(sums["loss"] / count, LARGEST_EXPONENT))}


class Hiding:
    """A Source whose rows are those of another with tokens hidden: which ones depends on the seed, the row and the pass
    alone, so they are the same on every mesh and after every restart. `specials` are never hidden. `parts`: of targets
    among the tokens, and among the targets of mask tokens and of random ones.
    """

    dense = False

    def __init__(
        self, inner: Source, seed: int, token: int, specials: list[int], parts: tuple[float, float, float]
    ) -> None:
        self._inner, self._seed, self._token, self._parts = inner, seed, token, parts
        self._specials = np.array(specials)

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._inner.facts

    @property
    def loading(self) -> Loading:
        return self._inner.loading

    @property
    def fingerprint(self) -> str:
        return f"{self._inner.fingerprint}-masked-{self._token}-{'-'.join(map(str, self._parts))}"

    def __len__(self) -> int:
        return len(self._inner)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        tokens: NDArray[np.int64] = self._inner.take(index, epoch)["inputs"].numpy()
        seen, targets = tokens.copy(), np.full_like(tokens, IGNORE)
        for row, (sample, turn) in enumerate(zip(index.tolist(), epoch.tolist(), strict=True)):
            self._hide(tokens[row], seen[row], targets[row], sample, turn)
        return {"inputs": torch.from_numpy(seen), "targets": torch.from_numpy(targets)}

    def _hide(
        self, row: NDArray[np.int64], seen: NDArray[np.int64], targets: NDArray[np.int64], sample: int, turn: int
    ) -> None:
        draw = np.random.Generator(np.random.Philox(key=[self._seed & BITS, sample], counter=[0, 0, 0, turn]))
        part, hidden, random = self._parts
        chosen = (draw.random(len(row)) < part) & ~np.isin(row, self._specials)
        way = draw.random(len(row))
        others = draw.integers(self.facts["vocab"], size=len(row))
        targets[chosen] = row[chosen]
        seen[chosen & (way < hidden)] = self._token
        swapped = chosen & (way >= hidden) & (way < hidden + random)
        seen[swapped] = others[swapped]

    def holdout(self) -> "Hiding | None":
        kept = self._inner.holdout()
        if kept is None:
            return None
        return Hiding(kept, self._seed, self._token, self._specials.tolist(), self._parts)
