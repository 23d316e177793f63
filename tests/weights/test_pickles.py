"""A pickle names what it wants called, and nothing is: hostile ones in every kind of checkpoint are refused by that name."""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dtrain.weights import ForeignError, pickles, place, torchfile
from dtrain.weights.pickles import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def in_zip(file: Path, payload: bytes) -> None:
    """In place of the pickle in a file of torch.save."""
    torch.save({"w": torch.zeros(3)}, file)
    with zipfile.ZipFile(file) as old:
        entries = {one.filename: old.read(one) for one in old.infolist()}
    with zipfile.ZipFile(file, "w") as new:
        for name, data in entries.items():
            new.writestr(name, payload if name.endswith("data.pkl") else data)


def in_metadata(folder: Path, payload: bytes) -> None:
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=str(folder), no_dist=True)
    (folder / ".metadata").write_bytes(payload)


def in_shard(folder: Path, payload: bytes) -> None:
    """The metadata is as it was; the file of the rank is hostile."""
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=str(folder), no_dist=True)
    in_zip(folder / "__0_0.distcp", payload)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


PLACES: dict[str, Callable[[Path, bytes], Any]] = {
    "model.pt": in_zip,
    "pytorch_model.bin": in_zip,
    "last.ckpt": in_zip,
    "legacy.pt": lambda file, payload: file.write_bytes(payload),
    "dcp": in_metadata,
}


@pytest.mark.parametrize("name", PLACES)
def test_a_hostile_pickle_runs_nothing_and_is_refused(name: str, tmp_path: Path) -> None:
    mark, where = tmp_path / "ran", tmp_path / name
    PLACES[name](where, pickle.dumps({"w": Hostile(mark)}, protocol=2))
    with pytest.raises(ForeignError) as caught:
        place.open_at(str(where))
    assert not mark.exists()
    if name != "legacy.pt":  # which is not even opened
        assert "its pickle names posix.mkdir, which no weights need and which could run code" in str(caught.value)
    pickle.loads(pickle.dumps(Hostile(mark)))
    assert mark.exists(), "it is hostile"


def test_a_hostile_pickle_in_a_shard_of_dcp_runs_nothing(tmp_path: Path) -> None:
    from dtrain.checkpoint.adopt import read

    mark, where = tmp_path / "ran", tmp_path / "dcp"
    in_shard(where, pickle.dumps(Hostile(mark), protocol=2))
    weights = place.open_at(str(where))
    with pytest.raises(ForeignError, match=r"its pickle names posix\.mkdir"):
        read(weights.tensors["w"].pieces[0], "float32", (slice(0, 3),))
    assert not mark.exists()


CALLS = {
    "builtins.eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "os.system": b"cos\nsystem\n(S'true'\ntR.",
    "builtins.getattr": b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nS'__class__'\ntR.",
    "torch.hub.load": b"ctorch.hub\nload\n(S'x'\ntR.",
    "dtrain.api.run": b"cdtrain.api\nrun\n)R.",
    "torch._utils._rebuild_tensor_v2.__globals__": b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
    "lightningx.run": b"clightningx\nrun\n)R.",
}


@pytest.mark.parametrize("name", CALLS)
def test_only_what_the_table_has_is_known(name: str) -> None:
    with pytest.raises(RefusedError, match=f"its pickle names {name}"):
        pickles.load(CALLS[name], torchfile.KNOWN, lambda pid: pid)


def test_what_stands_for_a_name_cannot_be_changed() -> None:
    """BUILD sets attributes of whatever is on the stack: of a function of ours it may not."""
    before = torchfile._tensor.__defaults__
    for data in (
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__defaults__'\n(I1\ntsttb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'function'\nI1\nsb.",
        b"ctorch\nSize\n}S'count'\nI1\nsb.",
    ):
        with pytest.raises(RefusedError):
            pickles.load(data, torchfile.KNOWN)
    assert torchfile._tensor.__defaults__ == before
    harmless = b"cargparse\nNamespace\n(N}S'__new__'\nI1\nstb."
    with pytest.raises(RefusedError):
        pickles.load(harmless, {})
    assert isinstance(pickles.load(b"cargparse\nNamespace\n)R.", {}), object)


def test_damage_of_any_byte_is_one_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3), "b": OrderedDict(c=torch.ones(2, 2).t())}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        data = archive.read("a/data.pkl")
    refused = 0
    for index in range(len(data)):
        for change in (0, 0xFF, data[index] ^ 1):
            with zipfile.ZipFile(tmp_path / "c.pt", "w") as new:
                new.writestr("a/data.pkl", data[:index] + bytes([change]) + data[index + 1 :])
            try:
                torchfile.tensors(str(tmp_path / "c.pt"))
            except ForeignError as error:
                refused += 1
                assert len(str(error).splitlines()) == 1
    assert refused > len(data)


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (b"\x80\x02}K\x01K\x02\x86" + b"2\x86" * 34 + b"Ns.", "a tuple of tuples"),
        (b"\x80\x02}(K\x01K\x02\x86" + b"2\x86" * 34 + b"Nu.", "a tuple of tuples"),
        (b"\x80\x04\x8f(K\x01K\x02\x86" + b"2\x86" * 34 + b"\x90.", "a tuple of tuples"),
        (b"\x80\x02K\x01r\x00\x00\x00\x18.", "402653184 places of its memo"),
    ],
)
def test_time_and_memory_of_a_pickle_have_bounds(payload: bytes, cause: str) -> None:
    with pytest.raises(RefusedError, match=cause):
        pickles.load(payload, {})
    assert pickles.load(pickle.dumps({("a", 1): [(2, (3,))], "b": {4}}), {}) == {("a", 1): [(2, (3,))], "b": {4}}
