"""A tensor and the pieces of it: every element is written once and found again, however it was cut."""

from typing import Any

import pytest
import torch
from pool import ranks
from small import on_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtrain.checkpoint import shards
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def cut(tensor: torch.Tensor, *sizes: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """`tensor` in pieces of these sizes along its first dim, one file each."""
    pieces, values, start = [], {}, 0
    for number, piece in enumerate(tensor.split(sizes)):
        values[str(number)] = piece
        pieces.append(
            {
                "name": "x",
                "key": "x",
                "file": str(number),
                "shape": list(piece.shape),
                "offset": [start] + [0] * (tensor.ndim - 1),
            }
        )
        start += len(piece)
    return pieces, values


def fill(target: torch.Tensor, pieces: list[dict[str, Any]], values: dict[str, torch.Tensor]) -> set[str]:
    """Into `target` from the pieces that it needs; the files of these."""
    overlap = shards.ShardOverlap(target, pieces)
    for number, (piece, *_) in enumerate(overlap.overlaps):
        overlap.fill(number, values[piece["file"]])
    return {piece["file"] for piece, *_ in overlap.overlaps}


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (1, 5, 1)])
def test_a_whole_tensor_is_put_together(sizes: tuple[int, ...]) -> None:
    pieces, values = cut(whole(7, 3), *sizes)
    target = torch.zeros(7, 3)
    assert fill(target, pieces, values) == set(values)
    assert torch.equal(target, whole(7, 3))


def placed(
    mesh: Mesh, pieces: list[dict[str, Any]], values: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> tuple[bool, int]:
    target = distribute_tensor(torch.zeros(shape), mesh.axis("dp_shard"), [Shard(0)])
    needed = fill(target, pieces, values)
    return torch.equal(target.full_tensor(), whole(*shape)), len(needed)


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (2, 2, 3), (1, 5, 1)])
def test_a_sharded_tensor_reads_only_what_overlaps_its_shard(sizes: tuple[int, ...]) -> None:
    pieces, values = cut(whole(7, 3), *sizes)
    for good, read in on_mesh(lambda mesh: placed(mesh, pieces, values, (7, 3)), dp_shard=2):
        assert good
        assert read <= len(sizes)
    assert all(read == 1 for _, read in on_mesh(lambda mesh: placed(mesh, *cut(whole(8, 2), 4, 4), (8, 2)), dp_shard=2))


def test_numbers_without_dims_are_tensors_too() -> None:
    target = torch.tensor(0.0)
    fill(target, [{"name": "x", "key": "x", "file": "a", "shape": [], "offset": []}], {"a": torch.tensor(3.5)})
    assert target.item() == 3.5


def test_another_type_is_converted() -> None:
    pieces, values = cut(whole(7, 3) + 0.001, 4, 3)
    target = torch.zeros(7, 3, dtype=torch.bfloat16)
    fill(target, pieces, values)
    assert torch.equal(target, (whole(7, 3) + 0.001).bfloat16())


def written(mesh: Mesh, shape: tuple[int, ...]) -> list[list[float]]:
    """What each rank would write of a hybrid tensor, a copy on all ranks, and a plain one."""
    both = mesh.axis("dp_replicate", "dp_shard")
    tensors = {
        "hybrid": distribute_tensor(whole(*shape), both, [Replicate(), Shard(0)]),
        "copies": distribute_tensor(whole(*shape), both, [Replicate(), Replicate()]),
        "plain": whole(*shape),
    }
    assert isinstance(tensors["hybrid"], DTensor)
    assert local(tensors["hybrid"]).numel() <= whole(*shape).numel()
    return [
        [name, *piece.flatten().tolist(), *offset] for name, piece, offset in shards.mine(tensors, mesh.replica_coords)
    ]


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_every_element_is_written_once(rows: int) -> None:
    """Also when a shard is smaller than the others, or empty."""
    pieces = [
        piece for rank in on_mesh(lambda mesh: written(mesh, (rows, 2)), dp_replicate=2, dp_shard=2) for piece in rank
    ]
    for name in ("hybrid", "copies", "plain"):
        elements = sorted(value for piece in pieces if piece[0] == name for value in piece[1:-2])
        assert elements == whole(rows, 2).flatten().tolist(), name


def test_the_private_function_of_torch_is_still_there() -> None:
    """torch has no public way to ask a DTensor where its shard lies."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    def offsets(mesh: Mesh) -> tuple[int, ...]:
        return tuple(compute_local_shape_and_global_offset(torch.Size((5, 2)), mesh.axis("dp_shard"), [Shard(0)])[1])

    assert on_mesh(offsets, dp_shard=2) == [(0, 0), (3, 0)]
    assert ranks(1, int) == [0]
