"""Everything in 32-bit floats, and products as they were asked for, whatever was chosen before."""

import torch
from pool import ranks
from small import mesh_of
from torch import nn

from dtrain.parallel.order import parallelize
from dtrain.precision import Precision, bf16, fp32, tf32
from dtrain.strategy.single import Single


def products(precision: Precision) -> tuple[str, bool]:
    """How a GPU multiplies fp32, and whether it rounds convolutions, after a model was built with this precision."""
    with mesh_of() as mesh:
        torch.set_float32_matmul_precision("medium")  # as imported code may
        parallelize(nn.Linear(2, 2), mesh, Single(), precision=precision, seed=0)
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_fp32_is_rounded_where_it_was_asked_for_alone() -> None:
    results = [ranks(1, products, word.build())[0] for word in (fp32, tf32, bf16)]
    assert results == [("highest", False), ("high", True), ("highest", False)]


def test_numbers_are_kept_as_they_are_in_fp32() -> None:
    precision = tf32.build()
    assert (precision.param, precision.compute, precision.reduce, precision.scale) == (
        torch.float32,
        torch.float32,
        torch.float32,
        None,
    )
