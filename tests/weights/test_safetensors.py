"""Headers of safetensors files, against the format's own writer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dtrain.weights import ForeignError, safetensors


def test_tensors_are_told_by_the_header_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(1000, 100), "b": torch.tensor(3.5).bfloat16()}, file)
    read = list[int]()
    parts, beginning = safetensors.store.parts, safetensors.store.beginning
    monkeypatch.setattr(safetensors.store, "parts", lambda url, begins, n: read.append(n) or parts(url, begins, n))  # type: ignore[func-returns-value]
    monkeypatch.setattr(safetensors.store, "beginning", lambda url, n: read.append(n) or beginning(url, n))  # type: ignore[func-returns-value]
    found = safetensors.tensors(str(file))
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        "a": ("float32", (1000, 100)),
        "b": ("bfloat16", ()),
    }
    assert sum(read) < 400


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(30)}, file)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ForeignError, match="it is not a whole safetensors file"):
            safetensors.tensors(str(file))


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ({"a": [[2], [0, 8]], "b": [[2], [4, 12]]}, "two entries for the same bytes"),
        ({"a": [[0, 2**70], [0, 0]]}, "impossible size"),
    ],
)
def test_a_header_that_no_writer_writes_is_refused(entries: Any, cause: str) -> None:
    head = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (shape, at) in entries.items()}
    with pytest.raises(ValueError, match=cause):
        safetensors.parse(json.dumps(head).encode(), 0, 12)
