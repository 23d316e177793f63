"""Pairs of answers for tests, and 20 steps of dpo on a mesh."""

from functools import partial
from typing import Any

import torch
from adapted import part
from pool import resident
from small import PARTS, few_steps, joined
from torch import Tensor

T = 10


class Pairs:
    """Two answers to one prompt, of different lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        rows = torch.randint(13, (2, T + 1), generator=draw)
        prompt = int(torch.randint(1, 5, (), generator=draw))
        rows[1, : prompt + 1] = rows[0, : prompt + 1]
        ends = torch.randint(prompt + 2, T + 1, (2, 1), generator=draw)
        places = torch.arange(T)
        return rows[:, :-1], torch.where((places >= prompt) & (places < ends), rows[:, 1:], -100)


class Empty(Pairs):
    """The rejected answer of one pair has no token that counts."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        if index == 3:
            targets[1] = -100
        return inputs, targets


class Rows(Pairs):
    """No pairs."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs[0], targets[0]


def dpo(**changed: Any) -> dict[str, Any]:
    arguments = {"beta": 0.3, "loss": "sigmoid", "label_smoothing": 0.0, **changed}
    return {"_target_": "dtrain.objective.dpo.DPO", **arguments, "_about_": {"reference": "start", "pairs": True}}


def parts_of(*, adapter: str | None = None, objective: Any = None) -> dict[str, Any]:
    """A GPT in which no matrix is zero, with an adapter or none."""
    dataset = {"_target_": "dtrain.data.dataset.Dataset", "dataset": {"_target_": "paired.Pairs"}}
    parts = PARTS | {
        "model": PARTS["model"] | {"_target_": "adapted.filled", "tied": False},
        "objective": objective or dpo(),
        "data": {**dataset, "holdout": 0.0, "outputs": 13},
    }
    return parts | {"adapter": part(adapter) | {"_about_": {"trains": "adapter"}}} if adapter else parts


def twenty_steps(parts: dict[str, Any], mesh: tuple[Any, dict[str, int]]) -> dict[str, Any]:
    """The run of `few_steps` on a mesh."""
    strategy, degrees = mesh
    world = 1
    for degree in degrees.values():
        world *= degree
    microbatch = 8 // world if "pp" in degrees else 4
    runs = resident(world, partial(few_steps, parts | {"strategy": strategy}, degrees, steps=20, microbatch=microbatch))
    return joined(runs[:: degrees.get("dp_replicate", 1)]) if "pp" in degrees else runs[0]  # of one replica
