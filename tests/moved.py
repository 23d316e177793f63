"""Runs a script of docs/moving.md with the first weights and the order of samples of dtrain, and prints its losses.

python tests/moved.py <script> <seed>
"""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.data_loader
import numpy as np
import torch
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from dtrain.data.dataset import Dataset
from dtrain.data.order import samples
from dtrain.model.seeds import derive

SCRIPT, SEED = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, str(Path(SCRIPT).parent))
losses: list[float] = []
passes = iter(range(100))
seeded, backward = torch.manual_seed, torch.Tensor.backward


def ordered(sampler: Any) -> Iterator[int]:
    """The samples of the next pass."""
    faces = sampler.data_source if hasattr(sampler, "data_source") else sampler.dataset
    places = np.arange(len(faces)) + next(passes) * len(faces)
    order, _ = samples(places, n=len(faces), seed=derive(SEED, "data"))
    yield from Dataset(faces, holdout=0.0).original(order).tolist()


def recorded(loss: torch.Tensor, *given: Any, **named: Any) -> None:
    losses.append(loss.item())
    backward(loss, *given, **named)


for sampler in (RandomSampler, DistributedSampler, accelerate.data_loader.SeedableRandomSampler):
    sampler.__iter__ = ordered  # type: ignore[method-assign]
torch.manual_seed = lambda _: seeded(derive(SEED, "model"))  # type: ignore[assignment]
torch.Tensor.backward = recorded  # type: ignore[assignment, method-assign]
runpy.run_path(SCRIPT, run_name="__main__")
print("\n" + json.dumps(losses))
