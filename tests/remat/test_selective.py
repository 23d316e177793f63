"""selective: matrix products and attention are kept, what is cheap is computed again; the numbers are the same bit for bit."""

import torch
from small import one_backward, same_bits

from dtrain.remat.full import build as full
from dtrain.remat.selective import KEPT, build

PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


def test_the_numbers_are_the_same_bit_for_bit() -> None:
    same_bits(one_backward(build()), one_backward(None))


def test_no_product_is_computed_again_and_what_is_cheap_is() -> None:
    reference, run, whole = one_backward(None), one_backward(build()), one_backward(full())
    assert run["visits"] == [2, 2, 2, 2]
    for name in PRODUCTS:
        assert run["backward"][name] == reference["backward"][name], name
    assert whole["backward"]["mm"] > reference["backward"]["mm"], "full computes them again"
    assert whole["backward"]["_scaled_dot_product_flash_attention_for_cpu"] == 4
    assert reference["backward"]["silu"] == 0
    assert run["backward"]["silu"] == 4, "one activation in each block"


def test_less_is_kept() -> None:
    assert one_backward(build())["saved"] < one_backward(None)["saved"]


def test_products_of_float8_and_of_experts_are_kept() -> None:
    assert {
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.dtrain.one_by_one.default,
    } <= set(KEPT)
