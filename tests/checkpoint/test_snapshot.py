"""The copy that the loop waits for: whole, in files of a bounded size, in the same memory every time."""

from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load

from dtrain.checkpoint import snapshot
from dtrain.checkpoint.snapshot import Snapshot
from dtrain.errors import StoreError

FIRST = {"batch": 0, "tp": 0, "expert_copy": 0}


def state() -> dict[str, torch.Tensor]:
    return {
        "large": torch.randn(100, 7),
        "half": torch.randn(5).bfloat16(),
        "flag": torch.tensor(True),
        "turned": torch.randn(4, 6).T,
        "number": torch.tensor(3.0),
        "small": torch.randn(9),
        "long": torch.arange(4),
        "empty": torch.empty(0, 3),
    }


def read(files: list[snapshot.File]) -> dict[str, torch.Tensor]:
    """Every tensor, put together from what the format's own reader finds in the files."""
    found: dict[str, list[torch.Tensor]] = {}
    for file in files:
        tensors = load(b"".join(file.parts))
        for piece in file.pieces:
            found.setdefault(piece.name, []).append(tensors[piece.key])
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def same(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], tensor) for name, tensor in expected.items()
    )


@pytest.mark.parametrize("limit", [1, 60, 200, 1 << 20])
def test_the_copy_is_whole_and_no_file_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    tensors = state()
    monkeypatch.setattr(snapshot.pack, "__defaults__", (limit,))
    files = Snapshot(0, FIRST).take(tensors)
    assert same(read(files), tensors)
    row = 28
    assert all(len(file.parts[1]) <= max(limit, row) for file in files)
    assert len({file.name for file in files}) == len(files)


def test_what_changes_afterwards_changes_the_copy_only_with_the_next_one() -> None:
    tensors, taken = state(), Snapshot(0, FIRST)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    files = taken.take(tensors)
    for name in ("large", "half", "small"):
        tensors[name].add_(1)
    assert same(read(files), before)
    memory = [id(file) for file in files]
    assert [id(file) for file in taken.take(tensors)] == memory, "the same memory"
    assert same(read(files), tensors)


def test_tensors_that_come_or_grow_get_room() -> None:
    tensors, taken = state(), Snapshot(0, FIRST)
    taken.take(tensors)
    tensors |= {"new": torch.ones(3), "small": torch.randn(20), "half": tensors["half"].float()}
    assert same(read(taken.take(tensors)), tensors)
    assert taken.take({}) == []


def test_a_rank_copies_what_it_is_the_one_to_write() -> None:
    assert Snapshot(1, FIRST | {"batch": 1}).take(state()) == []


def test_a_type_without_a_name_in_the_format_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"cannot save odd: safetensors has no dtype for torch\.complex128"):
        Snapshot(0, FIRST).take({"odd": torch.zeros(2, dtype=torch.complex128)})
