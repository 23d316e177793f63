"""Multiplications of operators, each against a count by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain.tracing.notes import Watch


def counted(module: nn.Module, *shape: int) -> tuple[int, int]:
    """Of a forward and a backward, the gradient of the input too."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        light = {name: fake.from_tensor(each) for name, each in module.named_parameters()}
        watch = Watch(nn.Identity(), [])
        with watch:
            out = torch.func.functional_call(module, light, torch.zeros(*shape, requires_grad=True))
            loss = (out[0] if isinstance(out, tuple) else out).sum()
            watch.begin_backward(loss)
            loss.backward()
    return sum(part.work for part in watch.parts), sum(part.backward_work for part in watch.parts)


@pytest.mark.parametrize(
    ("module", "shape", "count"),
    [
        (nn.Conv1d(64, 64, 4, groups=64, padding=3), (2, 64, 10), 2 * 13 * 64 * 4),
        (nn.Conv2d(8, 16, 3, groups=4, padding=1), (1, 8, 6, 6), 36 * 16 * 2 * 9),
        (nn.Conv2d(8, 16, 3, stride=2), (1, 8, 7, 7), 9 * 16 * 8 * 9),
        (nn.ConvTranspose2d(8, 4, 2, 2), (3, 8, 5, 5), 3 * 25 * 8 * 4 * 4),
        (nn.ConvTranspose1d(8, 4, 3, groups=2), (1, 8, 5), 5 * 8 * 2 * 3),
        (nn.LSTM(8, 16, 2, bidirectional=True), (5, 3, 8), 5 * 3 * 2 * 64 * (8 + 16 + 32 + 16)),
    ],
    ids=["depthwise", "groups", "conv", "transposed", "transposed-groups", "lstm"],
)
def test_a_backward_multiplies_twice_as_often_as_its_forward(
    module: nn.Module, shape: tuple[int, ...], count: int
) -> None:
    assert counted(module, *shape) == (count, 2 * count)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.full((4,), 2, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(x, self.weight, offs=ends) * 1


def test_matrices_by_expert_are_counted_in_any_dtype() -> None:
    assert counted(Experts(), 8, 16) == (8 * 16 * 32, 2 * 8 * 16 * 32)
