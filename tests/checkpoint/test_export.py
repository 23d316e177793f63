"""The file that an export writes."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from dtrain.checkpoint.export import _files, _laid_out

TENSORS = {
    "a.mask": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "b.weight": torch.randn(3, 5),
    "c.half": torch.randn(7).bfloat16(),
    "d.steps": torch.tensor(2**40),
    "e.none": torch.zeros(0, 4),
}


def test_tensors_are_put_into_files_in_their_order() -> None:
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 4}
    assert _files(sizes, math.inf) == {"model.safetensors": [*sizes]}
    assert [*_files(sizes, 8).values()] == [["a", "b"], ["c"], ["d", "e"]]
    assert [*_files(sizes, 1)][-1] == "model-00005-of-00005.safetensors"
    assert _files({}, 1) == {"model.safetensors": []}


def test_tensors_of_all_sizes_are_aligned_in_one_file(tmp_path: Path) -> None:
    kinds = {name: tensor.dtype for name, tensor in TENSORS.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    with _laid_out(tmp_path / "file", kinds, shapes) as places:
        for name, place in places.items():
            assert place.data_ptr() % place.dtype.itemsize == 0
            place.copy_(TENSORS[name])
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
