"""Checkpoints of torch's own torch.distributed.checkpoint."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from dtrain.checkpoint.adopt import read
from dtrain.weights import ForeignError, place

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHTS = {"a.weight": torch.randn(4, 6), "b": torch.randn(3).bfloat16(), "steps": torch.tensor(7)}


def save(folder: Path, state: dict[str, Any]) -> str:
    dcp.save(state, checkpoint_id=str(folder))
    return str(folder)


@pytest.mark.parametrize(
    "state",
    [
        WEIGHTS,
        {"model": WEIGHTS, "optimizer": {"state": {"a.weight": {"exp_avg": torch.zeros(4, 6)}}}, "step": 3},
        {**WEIGHTS, "optimizer": {"a": torch.zeros(2)}, "name": "run"},
        {"app": {"model": WEIGHTS, "optim": {"x": torch.zeros(1)}}},
    ],
    ids=["alone", "model", "at the top", "app"],
)
def test_the_weights_in_a_state_are_found(state: dict[str, Any], tmp_path: Path) -> None:
    weights = place.open_at(save(tmp_path / "dcp", state))
    assert weights.tensors.keys() == WEIGHTS.keys()
    for name, expected in WEIGHTS.items():
        (piece,) = weights.tensors[name].pieces
        box = tuple(slice(0, size) for size in expected.shape)
        assert torch.equal(read(piece, weights.tensors[name].dtype, box), expected)


def changed(folder: str, change: Any) -> None:
    metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
    change(metadata)
    (Path(folder) / ".metadata").write_bytes(pickle.dumps(metadata))


def elsewhere(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def encoded(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]


def beyond(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).length += 1 << 40


def lost(metadata: Metadata) -> None:
    metadata.storage_data.clear()


def odd(metadata: Metadata) -> None:
    metadata.state_dict_metadata = [1]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (elsewhere, "lies in ../secret, which is not a file beside it"),
        (encoded, r"is encoded with \['stream.zstd'\]"),
        (beyond, "which is missing or cut off"),
        (lost, "it is not as torch writes it"),
        (odd, "it is not as torch writes it"),
    ],
)
def test_metadata_that_lies_is_refused(change: Any, cause: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"w": torch.zeros(3)})
    changed(folder, change)
    with pytest.raises(ForeignError, match=cause):
        place.open_at(folder)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"w": torch.zeros(3)})
    next(Path(folder).glob("*.distcp")).unlink()
    with pytest.raises(ForeignError, match=r"w lies in __0_0\.distcp, which is missing or cut off"):
        place.open_at(folder)
