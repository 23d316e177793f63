"""Models of users that are more than their modules and weights: what hangs on a parameter, what the forward writes, what `train` does.

model._target_=invariance.own.Clamped data=dataset data.dataset._target_=invariance.own.Rows trust=[invariance]
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, int(x[1] > 0)


class Net(nn.Module):
    """[B, WIDTH] -> [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out

    @property
    def first(self) -> nn.Linear:
        layer = self.layers[0]
        assert isinstance(layer, nn.Linear)
        return layer


class Hook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 0.5)


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class LateHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(halve)


class NodeHook(Net):
    """As libraries did before there were hooks on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = [self.first.weight.expand_as(self.first.weight).grad_fn.next_functions[0][0]]  # type: ignore[union-attr]
        self.nodes[0].register_prehook(lambda grads: (grads[0] * 0.5,))  # type: ignore[union-attr]


class Attribute(Net):
    """The forward reads an attribute of a parameter, and an optimizer may."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.times = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.first.weight, "times", 1.0)


class Mask(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.mask = torch.ones(WIDTH, WIDTH)  # type: ignore[attr-defined]


class Kind(nn.Parameter):
    pass


class Subclass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight = Kind(self.first.weight.detach())


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.used = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x @ self.used[0].T))


class Closure(Net):
    def __init__(self) -> None:
        super().__init__()
        weight = self.first.weight
        self.used = lambda x: x @ weight.T

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.used(x)))


class Normed(Net):
    """torch keeps the old weights in a graph, where nothing reads them any more."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            torch.nn.utils.weight_norm(layer)  # type: ignore[arg-type]


class Clamped(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampedData(Net):
    """Which no version counter shows."""

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.first.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Teacher(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        return super().forward(x + self.teacher(x).detach())


class ByBatch(Net):
    """Writes what its rank's samples say."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.bias.copy_(x.mean(0))
        return super().forward(x)


class Replaced(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.head.weight = nn.Parameter(self.head.weight.detach() * 2)
        return super().forward(x)


class MaxNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x.abs().long().clamp(max=3)).mean(1))


class BuiltInEval(Net):
    """As from_pretrained returns a model."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class FrozenNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> Any:  # it forgets to return itself, which torch never needs
        super().train(mode)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Merging(Net):
    """Its `train` does more than set modes: in evaluation a product of two matrices is part of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.ones(2, WIDTH) * 0.1), nn.Parameter(torch.ones(WIDTH, 2) * 0.1)
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.is_merged:
            with torch.no_grad():
                self.first.weight.add_(self.up @ self.down, alpha=-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.is_merged else x + x @ self.down.T @ self.up.T)


class Penalty(Net):
    """The gradient of the outputs is a part of the loss (WGAN-GP, arXiv 1704.00028)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        y = super().forward(x)
        if not self.training:
            return y
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + (grad.norm(dim=1, keepdim=True) - 1) ** 2


class Adversary(Net):
    """A gradient of the first order, of samples (arXiv 1412.6572)."""

    def forward(self, x: Tensor) -> Tensor:
        given = x.detach().requires_grad_(True)
        (grad,) = torch.autograd.grad(super().forward(given).sum(), given)
        return super().forward(x + 0.1 * grad.sign())


class Inner(nn.Module):
    """A step within the step, by functional_call (MAML, arXiv 1703.03400)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = torch.func.functional_call(self.net, weights, (torch.ones(1, WIDTH),)).pow(2).sum()
        grads = torch.autograd.grad(loss, list(weights.values()))
        moved = {name: weight - 0.01 * grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
        out: Tensor = torch.func.functional_call(self.net, moved, (x,))
        return out


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: weight * 1.1 for name, weight in self.net.named_parameters()}
        out: Tensor = torch.func.functional_call(self.net, weights, (x,))
        return out


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.part(x))


class Toggles(Net):
    """Its first layer is trained in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        self.first.requires_grad_(self.steps % 2 == 0)
        return super().forward(x)


class FrozenForOneUse(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.head.requires_grad_(False)
        once = super().forward(x)
        self.head.requires_grad_(True)
        return once + super().forward(x * 0.5)
