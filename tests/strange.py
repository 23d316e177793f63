"""Models and data of other people's, each legal and each odd in its own way."""

from collections import namedtuple
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Odd(nn.Module):
    """[B, ...] -> [B, 10] by parameters of every shape that torch takes: of no dims, empty, cut out of a larger one, in lists and mappings, normed by their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.LazyLinear(16)
        self.scale, self.nothing = nn.Parameter(torch.ones(1)), nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.eye(16).t())
        self.several = nn.ParameterList([torch.ones(16), torch.zeros(16)])
        self.named = nn.ParameterDict({"up": torch.eye(16), "down": torch.eye(16)})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("unset", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(16, 10)
        self.inputs(torch.zeros(1, 64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.inputs(nn.functional.pad(x.flatten(1), (0, 64 - x.flatten(1).shape[1]))) * self.scale
        x = x @ self.turned * self.several[0] + self.several[1] + self.normed(x) @ self.named["up"] @ self.named["down"]
        for layer in self.body:
            x = x + layer(x)
        return {"logits": self.out(x)}


class Rows:
    """Twelve tokens and what follows each, as lists of Python's numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < 40:
            raise IndexError(index)
        row = [(index * 7 + place) % 29 for place in range(13)]
        return row[:-1], row[1:]


class Bytes:
    """Sixteen uint16 tokens, of numpy."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        row = (np.arange(17) * 3 + index).astype(np.uint16) % 29
        return row[:-1], row[1:]


Sample = namedtuple("Sample", ("image", "label"))


class Named:
    """Tokens in a namedtuple."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        row = torch.arange(9) + index
        return Sample(row[:-1] % 29, row[1:] % 29)


class Labelled:
    """Features and one of ten labels, as a number of numpy; `classes` is how many there are."""

    classes = 10

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).normal(size=64).astype(np.float32), np.int32(index % 10)


class Doubles:
    """Ten float64 targets for float64 features, all of them lists of numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return {0: np.random.default_rng(index).normal(size=64).tolist(), 1: [float(index)] * 10}


class One:
    """A single sample."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return torch.ones(64), torch.tensor(3)


class Switches:
    """Targets that are true or false."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), float(index)), index % 2 == 0


class Pictures:
    """Bytes [1, 8, 8], as an image is stored, and a label."""

    classes = tuple("0123456789")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.randint(
            256, (1, 8, 8), generator=torch.Generator().manual_seed(index), dtype=torch.uint8
        ), index % 10


class Complex(nn.Module):
    """A weight of complex numbers, as in spectral layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(64, 16), nn.Linear(16, 10)
        self.spectrum = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.inputs(x).to(torch.complex64) @ self.spectrum).abs())


class Empty(nn.Module):
    """A parameter without numbers, one that is turned, one that is expanded, one of whole numbers, one in a list and one in a mapping; buffers that are not set."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(64, 64).t() * 0.1)
        self.expanded = nn.Parameter(torch.ones(1).expand(64))
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)
        self.listed, self.named = nn.ParameterList([torch.ones(64)]), nn.ParameterDict({"a": torch.ones(64)})
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(64, 10))
        self.register_buffer("unset", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.out(x @ self.turned * self.expanded * self.listed[0] * self.named["a"])
            + self.nothing.sum()
            + self.whole.sum()
        )


class Double(nn.Module):
    """A layer in 64 bits, apart from the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(64, 64).double()])
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body[0](x.double()).float())


class Mixed(nn.Module):
    """Two types in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(64, 64).double(), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.double()).float())


class Sparse(nn.Module):
    """Rows of a table that are looked up, with gradients for those alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(29, 16, sparse=True)
        self.table, self.out = nn.Embedding(29, 16, sparse=True), nn.Linear(16, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x) + self.bag(x)[:, None])


class SparseByHand(Sparse):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.embedding(x, self.table.weight, sparse=True) + self.bag(x)[:, None])


class Lazy(nn.Module):
    """Parameters that get their shape from the first sample."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.LazyLinear(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Frozen(nn.Module):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Wide(nn.Module):
    """Complex numbers of 128 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.ones(64, 10, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.spectrum).abs().float()
