"""One random stream per purpose, each a function of the seed and a name, so that no mesh, order or restart can shift them."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from dtrain.model import InitByName
from dtrain.sharding import local, piece


def derive(seed: int, *purpose: object) -> int:
    """63 bits that depend on the seed and on what they are for."""
    text = "\x1f".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator of its own: the same numbers whatever device or rank asks."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def fill(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a materialised model by its name: each rank draws the whole tensor and keeps its shard."""
    assert isinstance(model, InitByName)
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape)
        model.init_weight(name, whole, generator(seed, "weight", name))
        with torch.no_grad():
            local(parameter).copy_(piece(whole.to(parameter.device), parameter))


def reseed(seed: int, step: int, rank: int) -> None:
    """What a model draws from the generators of torch, numpy and Python is a function of (seed, step, rank of the batch): a resumed run draws what the
    uninterrupted one did, whatever was drawn in between. Five microseconds. A generator of the model's own cannot be seen from here.
    """
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def drawn(seed: int, step: int, rank: int) -> list[str]:
    """The generators (torch, cuda, numpy, python) from which something was drawn since `reseed` with the same arguments. Changes nothing."""
    now, kept = _states(), (torch.get_rng_state(), np.random.get_state(), random.getstate())
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    reseed(seed, step, rank)
    fresh = _states()
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])
    if device is not None:
        torch.cuda.set_rng_state(device)
    return [name for name, state in fresh.items() if state != now[name]]


def _states() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]),
        "python": random.getstate(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state().numpy().tobytes()} if torch.cuda.is_initialized() else {})
