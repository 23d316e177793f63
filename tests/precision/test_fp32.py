"""Everything in 32-bit floats, and nothing cast on the way."""

import torch

from dtrain.precision.fp32 import build


def test_nothing_is_cast_and_nothing_is_scaled() -> None:
    precision = build()
    assert (precision.param, precision.compute, precision.reduce, precision.scale) == (
        torch.float32,
        torch.float32,
        torch.float32,
        None,
    )
    with precision.autocast(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
