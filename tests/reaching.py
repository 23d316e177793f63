"""Models of whose parameters a sample reaches only some, so that ranks reach different ones."""

from typing import Any, ClassVar

import torch
from small import PARTS
from torch import Tensor, nn

from dtrain.model.moe import Mixture


class Ways(nn.Module):
    """A sample goes left or right, by the sign of its first number; nothing goes to `spare`."""

    pipeline = ("entry", "ways", "exit")
    tp_plan: ClassVar = {"exit.0": "colwise", "exit.2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 8)
        self.ways = Fork()
        self.exit = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.exit(self.ways(self.entry(x)))
        return out


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.spare = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        lefts = x[:, 0] > 0
        out = x.new_zeros(x.shape)
        if lefts.any():
            out = out.index_add(0, lefts.nonzero()[:, 0], (self.left(x[lefts]) + self.shift).to(x.dtype))
        if not lefts.all():
            out = out.index_add(0, (~lefts).nonzero()[:, 0], self.right(x[~lefts]).relu().to(x.dtype))
        return torch.tanh(out)


class Piped(Ways):
    """The ways are elements of lists, which fsdp shards one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.ways.left, self.ways.right = nn.Sequential(self.ways.left), nn.Sequential(self.ways.right)  # type: ignore[assignment]


class Repeated(nn.Module):
    """Elements of a list that are called again: both times with samples, then with what came out, and once for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.forks = nn.ModuleList([Fork(), Fork()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.forks
        x = x.repeat(1, 2)
        x = second(first(x) + first(-x))
        x = x + first(x)
        second(x)
        out: Tensor = self.head(x)
        return out


class Scales(Ways):
    """Numbers without dims: one for all samples, one for those that go left, one for none, one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.left, self.spare = (nn.Parameter(torch.tensor(value)) for value in (0.5, 0.1, 0.1))
        self.fixed = nn.Parameter(torch.tensor(0.9), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out, lefts = super().forward(x) * self.scale.exp() * self.fixed, x[:, 0] > 0
        return out.index_add(0, lefts.nonzero()[:, 0], (self.left * x[lefts, :3]).to(out.dtype)) if lefts.any() else out


class Statistics(nn.Module):
    """BatchNorm, a codebook kept by exponential averages, and a count: all in buffers."""

    tp_plan: ClassVar = {"entry": "colwise_gather_output"}
    codes: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.exit = nn.Linear(8, 3)
        self.register_buffer("codes", torch.arange(24.0).view(3, 8) / 24)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.entry(x))
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            for code in nearest.unique():
                self.codes[code].lerp_(x.detach()[nearest == code].mean(0), 0.1)
            self.seen += 1
        out: Tensor = self.exit(x + self.codes[nearest])
        return out


class Layered(nn.Module):
    """Statistics inside of the blocks that are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Statistics(), nn.Linear(3, 4), Statistics())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class Tokens(nn.Module):
    """Tokens [B, T] -> logits: attention, then each token goes its own way, to experts where there are some."""

    pipeline = ("embed", "blocks", "head")
    tp_plan: ClassVar = {"head": "colwise_gather_output"}

    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList([Mixing(), Mixing()])
        if experts:
            self.blocks.append(Mixture(8, 8, experts=4, active=1, shared=0, rate=0.0))
            for weight in self.blocks[2].parameters():
                nn.init.normal_(weight, std=0.3)
        self.head = nn.Linear(8, 13)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(x) if not x.is_floating_point() else x
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fork = Fork()

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (2, 4)).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)
        ways: Tensor = self.fork(seen.flatten(0, 1))
        return ways.view_as(x)


def parts(model: str, **changed: Any) -> dict[str, Any]:
    return PARTS | {
        "model": {"_target_": f"reaching.{model}"},
        "objective": {"_target_": "dtrain.objective.classification.Classification"},
        "data": PARTS["data"] | {"task": "classification", "inputs": [4]},
        "optim": {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
    } | changed  # fmt: skip


class Branches(nn.Module):
    """Two towers whose layers fsdp shards one by one; a rank calls that of its first sample."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.right = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) if x[0, 0] > 0 else self.right(x)
        return out


class Lost(Branches):
    """Calls both towers and answers with one of them."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        out: Tensor = left if x[0, 0] > 0 else right
        return out


class Late(Branches):
    """Calls the same layers on all ranks for three forwards, then leaves one out where the sample says so."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 3 and x[0, 0] > 0:
            out: Tensor = self.left[0](x)[:, :3]
            return out
        return super().forward(x.abs())


class Skipping(nn.Module):
    """Two mixtures of experts, of which a rank leaves out the second, or does not use what it says, by the sign of its first number; not in `calm` forwards."""

    calls = 0

    def __init__(self, unused: bool = False, calm: int = 0) -> None:
        super().__init__()
        self.unused, self.calm = unused, calm
        self.mixtures = nn.ModuleList(Mixture(4, 8, experts=4, active=1, shared=0, rate=0.0) for _ in range(2))
        for weight in self.mixtures.parameters():
            nn.init.normal_(weight, std=0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.mixtures[0](x)
        if self.calls <= self.calm or x[0, 0] > 0:
            x = x + self.mixtures[1](x)
        elif self.unused:
            self.mixtures[1](x)
        out: Tensor = self.head(x)
        return out


class Knotted(nn.Module):
    """One weight in two elements of a list, and elements that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.spare = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


class Lent(nn.Module):
    """Elements of a list with a weight of a layer outside of it, and with a layer that the model calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.side, self.again = nn.Linear(4, 4), self.layers[1][0]
        self.side.weight = self.layers[0][0].weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(self.side(x) + self.again(x))
        return out


def token_parts(**changed: Any) -> dict[str, Any]:
    """Of Tokens."""
    return (
        PARTS
        | {
            "model": {"_target_": "reaching.Tokens"},
            "optim": parts("Ways")["optim"],
            "data": PARTS["data"] | {"sequence": 8},
        }
        | changed
    )


class Borrowing(nn.Module):
    """A parent that uses the weights of its elements itself: before and after it calls them, and without calling one of them. `penalty` on all of them."""

    def __init__(self, penalty: float = 0.0) -> None:
        super().__init__()
        self.penalty = penalty
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.linear(self.entry(x), self.layers[1][0].weight)
        for layer in self.layers[:3]:
            x = layer(x)
        x = self.layers[0][0](x) + self.layers[3][0].weight.sum(0) * x.mean(1, keepdim=True)
        out: Tensor = self.head(x)
        return (
            out + self.penalty * x.mean(1, keepdim=True) * sum(p.square().sum() for p in self.parameters())
            if self.penalty
            else out
        )
