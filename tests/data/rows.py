"""Rows of several lengths, and how users would collate them: a module of its own, which loading processes import fast."""

from typing import Any

import torch
import torch.distributed as dist

LENGTHS = (5, 3, 7, 1, 4, 6, 2, 8)


class Rows:
    """Sixteen rows of 1 to 8 tokens and what follows each, as lists."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        row = [(3 * index + place) % 13 for place in range(LENGTHS[index % 8] + 1)]
        return {"input_ids": row[:-1], "labels": row[1:]}


class ByRank(Rows):
    """A row more on rank 1, as where the files of two hosts differ."""

    def __len__(self) -> int:
        return 16 + dist.get_rank()


class Filled(Rows):
    """The same, filled up by hand."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        missing = 8 - len(sample["labels"])
        return {"input_ids": sample["input_ids"] + [0] * missing, "labels": sample["labels"] + [-100] * missing}


def by_hand(samples: list[Any]) -> Any:
    """A collate function of a user's own."""
    longest = max(len(each["labels"]) for each in samples)
    return {
        key: torch.tensor([each[key] + [fill] * (longest - len(each[key])) for each in samples])
        for key, fill in (("input_ids", 0), ("labels", -100))
    }


class ByHand:
    def __init__(self, fill: int) -> None:
        self._fill = fill

    def __call__(self, samples: list[Any]) -> Any:
        batch = by_hand(samples)
        return {**batch, "labels": torch.where(batch["labels"] == -100, self._fill, batch["labels"])}


def masked(sample: Any, generator: torch.Generator | None) -> Any:
    """A transform of a user's own: some tokens become 12; none of a held-out sample."""
    tokens = torch.tensor(sample["input_ids"])
    if generator is not None:
        tokens[torch.rand(len(tokens), generator=generator) < 0.5] = 12
    return {**sample, "input_ids": tokens}


def noisy(sample: Any, generator: torch.Generator | None) -> Any:
    """Of rows of files: (input, target)."""
    x, y = sample
    return (x + torch.rand(len(x), generator=generator).numpy() if generator else x), y
