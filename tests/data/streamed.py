"""Streams and a model that counts the rows it has seen, for runs that name them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Rows:
    """Row n of a shard is number n x shards + shard; goes on from its state."""

    def __init__(self, shard: int, shards: int, count: int) -> None:
        self.numbers, self.at = list(range(shard, count, shards)), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < len(self.numbers):
            self.at += 1
            yield row(self.numbers[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def row(number: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([float(number), number % 7 / 7, 1.0]), torch.tensor([number % 5 / 5])


def make(shard: int, shards: int, count: int = 1000) -> Rows:
    return Rows(shard, shards, count)


def plain(shard: int, shards: int, count: int = 1000) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(Rows(shard, shards, count))


def uneven(shard: int, shards: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of the last shard there are fewer."""
    return (row(number) for number in range(9 if shard == shards - 1 else 20))


class Counting(nn.Module):
    """`seen`: how often each row came, over the ranks, of which the buffers are averaged after every step."""

    about = {"takes": "features"}  # noqa: RUF012 # read off the source

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            ones = torch.ones(len(x), device=x.device)
            self.seen.index_add_(0, x[:, 0].long(), ones)  # type: ignore[operator]
        return self.linear(x[:, 1:])
