"""Small parts that many tests build: a mesh on forked ranks, a small GPT, a batch of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dtrain.backend.gloo import Gloo
from dtrain.mesh import Mesh
from dtrain.model.gpt import GPT
from dtrain.plan import MeshShape


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
