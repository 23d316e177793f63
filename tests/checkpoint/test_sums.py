"""A digest of tensors that are read in parts: the same for every cut, another one for any other byte."""

import random

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint.sums import Sums, digest, part_sum
from dtrain.weights import Stored

TYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64")


def drawn(shape: tuple[int, ...], dtype: str) -> Tensor:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    words = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size) if dtype != "bool" else shape).byte()
    return words.view(getattr(torch, dtype)).reshape(shape) if dtype != "bool" else words.bool()


def cut(shape: tuple[int, ...], chance: random.Random) -> list[tuple[slice, ...]]:
    """Boxes that cover a tensor once."""
    boxes = [tuple(slice(0, size) for size in shape)]
    for dim, size in enumerate(shape):
        at = chance.randrange(size + 1)
        boxes = [(*box[:dim], part, *box[dim + 1 :]) for box in boxes for part in (slice(0, at), slice(at, size))]
    return boxes


@pytest.mark.parametrize("dtype", TYPES)
def test_any_cut_has_the_sum_of_the_whole(dtype: str) -> None:
    chance = random.Random(dtype)
    for shape in ((), (7,), (5, 6), (3, 4, 5), (2, 3, 4, 3), (70_001, 1), (2, 70_001)):
        tensor = drawn(shape, dtype)
        parts = [(box, tensor[box]) for box in cut(shape, chance)]
        total = sum(part_sum(part, [each.start for each in box], shape) for box, part in parts)
        assert total % 2**64 == part_sum(tensor, [0] * len(shape), shape) % 2**64


@pytest.mark.parametrize("dtype", TYPES)
def test_any_other_bit_gives_another_sum(dtype: str) -> None:
    tensor = drawn((6, 5), dtype)
    whole = part_sum(tensor, (0, 0), (6, 5))
    data = tensor.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(1 if dtype == "bool" else 8):
            data.view(-1)[place] ^= 1 << bit
            assert part_sum(tensor, (0, 0), (6, 5)) != whole, (place, bit)
            data.view(-1)[place] ^= 1 << bit
    assert part_sum(tensor, (0, 0), (6, 5)) == whole


def test_moved_and_negated_numbers_give_another_sum() -> None:
    tensor = torch.randn(6, 5)
    others = [tensor.flip(0), tensor.flip(1), -tensor, tensor.roll(1, 0), tensor.roll(1, 1)]
    for one, other in ((0, 7), (3, 28), (11, 16)):
        swapped, negated = tensor.clone().view(-1), tensor.clone().view(-1)
        swapped[[one, other]] = swapped[[other, one]]
        negated[[one, other]] *= -1
        others += [swapped.view(6, 5), negated.view(6, 5)]
    sums = {part_sum(each, (0, 0), (6, 5)) for each in (tensor, *others)}
    assert len(sums) == 1 + len(others)


def test_a_digest_counts_copies_once_and_wants_the_whole() -> None:
    tensor, sums = torch.randn(4, 6), Sums()
    tensors = {"a": Stored("float32", (4, 6), ()), "b": Stored("float32", (0, 6), ())}
    sums.add("a", (0, 0), tensor[:2], (4, 6))
    with pytest.raises(ValueError, match="of a 12 elements were read"):
        digest(sums.rows, tensors)
    sums.add("a", (2, 0), tensor[2:], (4, 6))
    whole = Sums()
    whole.add("a", (0, 0), tensor, (4, 6))
    assert digest(sums.rows * 2, tensors) == digest(whole.rows, tensors)
    assert digest(whole.rows, tensors) != digest(whole.rows, {"a": tensors["a"]})
    with pytest.raises(KeyError):
        digest(whole.rows, {"b": tensors["b"]})
