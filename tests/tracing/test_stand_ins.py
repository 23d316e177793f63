"""Operators that stand in for others have the shapes and sizes of those."""

import pytest
import torch
from metering import count
from pool import ranks
from small import plan
from torch import Tensor, nn

from dtrain.predict.memory import memory
from dtrain.tracing import shapes_of
from dtrain.tracing.stand_ins import LSTM, grouped, lstm


@pytest.mark.parametrize(
    ("steps", "samples", "inputs", "width"), [(64, 8, 256, 256), (32, 16, 512, 256), (48, 4, 96, 320)]
)
def test_the_workspace_of_an_lstm_is_as_large_as_the_real_one(
    steps: int, samples: int, inputs: int, width: int
) -> None:
    weights, state = nn.LSTM(inputs, width)._flat_weights, torch.zeros(samples, width)
    words = (*weights, state, state, False, [], 2, width, 1, True, False, False, True)
    real, stand_in = (run(torch.zeros(steps, samples, inputs), *words) for run in (LSTM, lstm))
    assert [each.shape for each in stand_in[:3]] == [each.shape for each in real[:3]]
    assert stand_in[3].nbytes == pytest.approx(real[3].nbytes, rel=0.05)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(13, 128), nn.LSTM(128, 128, 2), nn.Linear(128, 13)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x).transpose(0, 1))[0].transpose(0, 1))


def test_what_an_lstm_keeps_is_predicted() -> None:
    decided = plan(
        *("data=synthetic", "data.task=next_token", "data.vocab=13", "data.sequence=64", "objective=next_token"),
        *("model._target_=tracing.test_stand_ins.Recurrent", "trust=[tracing]", "batch=16"),
    )
    (found,) = ranks(1, count, decided)
    predicted = memory(decided, shapes_of(decided))
    assert predicted.activations == pytest.approx(found["kept"], rel=0.05)
    assert predicted.peak == pytest.approx(found["total"], rel=0.05)


@pytest.mark.parametrize(
    ("a", "b"), [((8, 16), (4, 16, 32)), ((8, 32), (32, 24)), ((4, 3, 8), (8, 32)), ((4, 3, 8), (4, 8, 16))]
)
def test_matrices_by_group_have_the_shapes_of_torch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    parted = {(2, 3): a[0], (2, 2): a[1], (3, 2): b[-1]}.get((len(a), len(b)))
    ends = parted and torch.arange(parted // 4, parted + 1, parted // 4, dtype=torch.int32)
    operands = torch.zeros(a, dtype=torch.bfloat16), torch.zeros(b, dtype=torch.bfloat16)
    assert grouped(*operands, ends).shape == torch._grouped_mm(*operands, offs=ends).shape


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_batch_norm_of_vectors_is_traced_though_one_sample_has_no_variance() -> None:
    decided = plan(
        *("data=synthetic", "objective=regression", "data.inputs=[24]", "data.outputs=3", "batch=512"),
        *("data.samples=2048", "model._target_=tracing.test_stand_ins.Normal", "trust=[tracing]"),
    )
    (found,), shapes = ranks(1, count, decided), shapes_of(decided)
    assert not shapes.unknown
    assert sum(size for floating, size in shapes.moving if floating) == 2 * 64 * 4
    assert memory(decided, shapes).activations == pytest.approx(found["kept"], rel=0.05)
