"""One random stream per purpose, each a function of the seed and a name, so that no mesh, order or restart can shift
them.
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.mesh.sharding import local, region
from dtrain.model import InitByName, head
from dtrain.model.adapted import added, packed

Init = Callable[[Tensor, torch.Generator], None]
AHEAD = 1 << 28
"""Numbers of whole tensors that are filled at a time, unless one alone has more."""


def derive(seed: int, *purpose: object) -> int:
    """63 bits that depend on the seed and on what they are for."""
    text = "\x1f".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A CPU generator of its own: the same numbers whatever device or rank asks."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def fill(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a materialised model by its name: each rank draws the whole tensor and keeps its shard.
    As many at a time as there are threads.
    """
    assert isinstance(model, InitByName)
    others, narrow = added(model), packed(model)
    _fill_each(
        {
            name: (parameter, partial(model.init_weight, name))
            for name, parameter in model.named_parameters()
            if name not in others and name not in narrow
        },
        seed,
    )
    for name, layer in narrow.items():
        whole = torch.empty(model.get_parameter(name).shape)
        model.init_weight(name, whole, generator(seed, "weight", name))
        layer.pack(whole)


def fill_added(model: nn.Module, seed: int) -> None:
    """The same for the parameters that an adapter added."""
    layers = added(model)
    _fill_each(
        {
            name: (parameter, partial(layers[name].init_added, name.rpartition(".")[2]))
            for name, parameter in model.named_parameters()
            if name in layers
        },
        seed,
    )


def fill_head(model: nn.Module, seed: int) -> None:
    """The same for a new head of a model of transformers."""
    parameters, std = dict(model.named_parameters()), head.std_of(model)
    names = head.new(model, parameters) | head.pooler(model, parameters)
    _fill_each({name: (parameters[name], partial(head.init, name, std)) for name in sorted(names)}, seed)


def _fill_each(wanted: Mapping[str, tuple[nn.Parameter, Init]], seed: int) -> None:
    threads, waiting = torch.get_num_threads(), deque[tuple[int, Future[None]]]()
    with ThreadPoolExecutor(threads) as pool:
        for name, (parameter, init) in wanted.items():
            target, where, numbers = local(parameter.detach()), region(parameter), parameter.numel()
            while waiting and sum(size for size, _ in waiting) + numbers > AHEAD:
                waiting.popleft()[1].result()
            if threads == 1:
                _fill(init, seed, name, shape=parameter.shape, target=target, where=where)
            else:
                waiting.append(
                    (numbers, pool.submit(_fill, init, seed, name, shape=parameter.shape, target=target, where=where))
                )
        for _, future in waiting:
            future.result()


@torch.no_grad()
def _fill(init: Init, seed: int, name: str, shape: torch.Size, target: Tensor, where: tuple[slice, ...]) -> None:
    whole = torch.empty(shape)
    init(whole, generator(seed, "weight", name))
    target.copy_(whole[where])


def reseed(seed: int, step: int, rank: int) -> None:
    """A model's draws from the generators of torch, numpy and Python is a function of (seed, step, rank of the
    batch): a resumed run draws what the uninterrupted one did, whatever was drawn in between. Five microseconds. A
    generator of the model's own cannot be seen from here.
    """
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & 0x7FFFFFFFFFFFFFFF
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def drawn(seed: int, step: int, rank: int) -> list[str]:
    """The generators (torch, cuda, numpy, python) from which something was drawn since `reseed` with the same
    arguments. Changes nothing.
    """
    now = _states()
    with kept():
        reseed(seed, step, rank)
        fresh = _states()
    return [name for name, state in fresh.items() if state != now[name]]


@contextmanager
def kept() -> Iterator[None]:
    """A context after which the generators of torch, cuda, numpy and Python are where they were."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _states() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]),
        "python": random.getstate(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state().numpy().tobytes()} if torch.cuda.is_initialized() else {})
