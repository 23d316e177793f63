"""Files of torch.save, read without torch."""

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.checkpoint.adopt import read
from dtrain.weights import SIZES, ForeignError, Weights, place, torchfile
from dtrain.weights.pickles import RefusedError


def value(weights: Weights, name: str) -> torch.Tensor:
    stored = weights.tensors[name]
    return read(stored.pieces[0], stored.dtype, tuple(slice(0, size) for size in stored.shape))


@pytest.mark.parametrize("dtype", SIZES)
def test_every_type_is_read_as_torch_reads_it(dtype: str, tmp_path: Path) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    torch.save({"x": tensor, "view": tensor[1:, :2], "none": tensor[:0], "one": tensor[1, 2]}, tmp_path / "a.pt")
    weights = place.open_at(str(tmp_path / "a.pt"))
    for name, expected in torch.load(tmp_path / "a.pt", weights_only=True).items():
        seen = value(weights, name)
        assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
        assert torch.equal(
            seen.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
        )


def test_the_weights_are_found_beside_what_else_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    more = {
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "args": argparse.Namespace(a=1),
    }
    for number, state in enumerate(
        (model.state_dict(), {"state_dict": model.state_dict(), **more}, {"model": model.state_dict(), **more},
         {"app": {"model": model.state_dict()}, "optimizer": optimizer.state_dict()})
    ):  # fmt: skip
        file = tmp_path / f"{number}.pth"
        torch.save(state, file)
        weights = place.open_at(str(file))
        assert list(weights.tensors) == list(model.state_dict())
        assert all(torch.equal(value(weights, name), tensor) for name, tensor in model.state_dict().items())
    torch.save({"left": {"a": torch.zeros(1)}, "right": {"a": torch.zeros(1)}}, tmp_path / "two.pt")
    with pytest.raises(ForeignError, match="its tensors are in left, right, and none is called as a state dict is"):
        place.open_at(str(tmp_path / "two.pt"))
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(ForeignError, match="it has no tensors"):
        place.open_at(str(tmp_path / "none.pt"))


def test_a_whole_module_is_refused_by_its_class(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(
        ForeignError, match=r"its pickle names torch.nn.modules.linear.Linear.* torch.save\(<its state dict>"
    ):
        place.open_at(str(tmp_path / "a.pt"))


def test_the_old_format_and_a_program_are_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ForeignError, match=r"it is not a whole file of torch\.save in its zip format"):
        place.open_at(str(tmp_path / "old.pt"))
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"N.")
        archive.writestr("a/constants.pkl", b"N.")
    with pytest.raises(ForeignError, match="it holds a program of TorchScript"):
        place.open_at(str(tmp_path / "script.pt"))


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(100)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / "b.pt").write_bytes(whole[:length])
        with pytest.raises(ForeignError):
            place.open_at(str(tmp_path / "b.pt"))


def test_a_view_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(4)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old:
        entries = {one.filename: old.read(one) for one in old.infolist()}
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name, data in entries.items():
            new.writestr(name, data.replace(b"K\x04\x85", b"K\x05\x85") if name.endswith("data.pkl") else data)
    with pytest.raises(ForeignError, match="a tensor reaches beyond its storage 0"):
        place.open_at(str(tmp_path / "b.pt"))


@pytest.mark.parametrize("view", [torch._neg_view, torch.conj])
def test_a_view_whose_storage_holds_other_numbers_is_refused(view: Any, tmp_path: Path) -> None:
    torch.save({"x": view(torch.ones(2, dtype=torch.complex64))}, tmp_path / "a.pt")
    with pytest.raises(ForeignError, match=r"is a view that is (neg|conj): its storage holds other numbers"):
        place.open_at(str(tmp_path / "a.pt"))


@pytest.mark.parametrize("shape", [(2**40,), (0, 2**70)])
def test_a_size_that_no_storage_has_is_refused(shape: tuple[int, ...]) -> None:
    view = torchfile.View(torchfile.Storage("float32", "0"), 0, shape, (0,) * len(shape))
    with pytest.raises(RefusedError, match="impossible size"):
        torchfile._stored(view, "", {"data/0": (0, 16)}, "a.pt")


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(4)}, tmp_path / "a.pt")
    code = (
        "import sys; from dtrain.weights import place; print(place.open_at(sys.argv[1]).tensors['x'].shape);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.pt")], check=True, capture_output=True, text=True
    )
    assert done.stdout == "(4,)\n"


@pytest.mark.campaign("documents")
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning_is_read(tmp_path: Path) -> None:
    """Written by its own Trainer, with hyperparameters, callbacks and the state of an optimizer."""
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, width: int, extra: argparse.Namespace) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(3, width)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 3)))
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    model = Model(4, argparse.Namespace(a=1))
    trainer.fit(model, rows)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    weights = place.open_at(str(tmp_path / "last.ckpt"))
    assert list(weights.tensors) == ["net.weight", "net.bias"]
    assert torch.equal(value(weights, "net.weight"), model.net.weight)


def test_ranges_are_read_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    ranged = torchfile.Ranged(str(tmp_path / "x"), 10, 20)
    assert ranged.seek(-5, 2) == 15
    assert ranged.read(99) == bytes(range(25, 30))
    with pytest.raises(OSError, match="it begins after that"):
        ranged.seek(-1)
