"""safetensors and JSON: what is written is what the format's own reader reads, and nothing that comes is believed."""

import json
from typing import Any

import pytest
import safetensors.torch
import torch

from dtrain.checkpoint.format import DTYPES, Entry, header, parse
from dtrain.checkpoint.load import tensor_of
from dtrain.weights.safetensors import strict


def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("name", DTYPES)
def test_the_formats_own_reader_reads_every_type_and_we_read_its_writer(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(DTYPES[name])
    data = header({"x": Entry(DTYPES[name], (2, 3), 0)}) + bytes(tensor.contiguous().view(torch.uint8).numpy())
    assert torch.equal(safetensors.torch.load(data)["x"].view(torch.uint8), tensor.view(torch.uint8))
    theirs = safetensors.torch.save({"a": tensor, "b": torch.tensor(3.5), "c": torch.zeros(0, 4)})
    found, _ = parse(theirs)
    assert {name: entry.shape for name, entry in found.items()} == {"a": (2, 3), "b": (), "c": (0, 4)}
    assert torch.equal(tensor_of(theirs, found["a"]).view(torch.uint8), tensor.view(torch.uint8))


def entry(**changed: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed}


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "five bytes": b"12345",
    "a header of 2^63 bytes": file({}, length=2**63),
    "a header that is longer than the file": file({}, length=3),
    "a pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a header that is a pickle": file(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "nested": file(b"[" * 100_000),
    "a list": file([1]),
    "an entry that is none": file({"x": 1}),
    "a type that is none": file(entry(dtype="F31"), bytes(8)),
    "a type that is code": file(entry(dtype="__import__('os')"), bytes(8)),
    "a huge shape": file(entry(shape=[2**62, 2**62]), bytes(8)),
    "a shape below zero": file(entry(shape=[-2]), bytes(8)),
    "a shape of no numbers": file(entry(shape=["2"]), bytes(8)),
    "behind the end": file(entry(data_offsets=[4, 12]), bytes(8)),
    "before the beginning": file(entry(data_offsets=[-8, 0]), bytes(8)),
    "more bytes than the shape has": file(entry(data_offsets=[0, 12]), bytes(12)),
    "three offsets": file(entry(data_offsets=[0, 8, 8]), bytes(8)),
    "no offsets": file({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a name twice": file(
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_safetensors_file_is_refused_in_one_line(kind: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(HOSTILE[kind])
    assert len(str(caught.value)) < 300


def test_a_header_without_end_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.weights.safetensors.HEADER_BYTES", 10)
    with pytest.raises(ValueError, match="the length of its header is wrong"):
        parse(file(entry(), bytes(8)))


def test_json_is_as_it_was_written() -> None:
    assert strict(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    with pytest.raises(ValueError, match="it has a name twice"):
        strict(b'{"a": {"b": 1, "b": 2}}')
