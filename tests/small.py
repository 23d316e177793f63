"""Small parts that many tests build: a plan, a mesh on forked ranks, a small GPT, a batch of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache

import torch
import yaml
from torch import Tensor

from dtrain.backend.gloo import Gloo
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config import GROUPS, Config
from dtrain.mesh import Mesh
from dtrain.model.gpt import GPT
from dtrain.plan import MeshShape, Plan
from dtrain.resolve import resolve

CPUS = Cluster(gpus=0, cpus=8)
composed = cache(lambda *words: compose(words))


def config(*words: str) -> Config:
    """As compose makes it; plain numbers are set on a copy, because composing costs a fifth of a second."""
    plain = [word for word in words if word.split("=")[0].split(".")[0] not in (*GROUPS, "recipe")]
    made: Config = deepcopy(composed(*(word for word in words if word not in plain)))
    for word in plain:
        (*path, name), text = word.split("=", 1)[0].split("."), word.split("=", 1)[1]
        setattr(getattr(made, path[0]) if path else made, name, yaml.safe_load(text))
        made.sources[word.split("=", 1)[0]] = "command line"
    return made


def plan(*words: str, on: Cluster = CPUS) -> Plan:
    return resolve(config(*words), on)


@contextmanager
def mesh_of(**degrees: int) -> Iterator[Mesh]:
    """The mesh of this rank, for as long as the context lasts."""
    with Gloo(timeout=60).open():
        yield Mesh(MeshShape(**degrees), device="cpu")


def small_gpt(**changed: object) -> GPT:
    """Every matrix of another size, so that a mixed-up shape shows; filled so that no output is zero."""
    arguments = {"vocab": 13, "layers": 2, "heads": 2, "width": 8, "hidden": 12} | changed
    model = GPT(**arguments)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def tokens(batch: int, length: int, *, vocab: int = 13, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
