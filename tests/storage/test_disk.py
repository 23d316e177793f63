"""The local disk: whole files or none, durable where it is said, on filesystems that cannot do everything too."""

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.errors import StoreError
from dtrain.storage import store
from dtrain.storage.disk import Disk, create, makedirs, place, remove
from dtrain.testing import faults


class Lame(Disk):
    """A filesystem without hard links, whose folders cannot be synced, and which takes three bytes at a time."""

    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    def write(self, descriptor: int, data: memoryview) -> int:
        return super().write(descriptor, data[:3])


def test_parts_of_any_kind_become_one_file(tmp_path: Path) -> None:
    import numpy as np

    parts = [b"", b"ab", bytearray(b"cd"), memoryview(b"efgh")[1:3], np.array([[1, 2]], np.int16), np.empty((0, 3))]
    create(Lame(), tmp_path / "a", parts)  # type: ignore[arg-type] # numpy has no __buffer__ before Python 3.12
    assert (tmp_path / "a").read_bytes() == b"abcdfg" + np.array([1, 2], np.int16).tobytes()
    with pytest.raises(FileExistsError):
        create(Disk(), tmp_path / "a", [b"x"])


def test_where_there_are_no_links_a_file_is_created_all_the_same(tmp_path: Path) -> None:
    disk = Lame()
    place(disk, tmp_path / "deep" / "a", b"something", disk.link)
    with pytest.raises(FileExistsError):
        place(disk, tmp_path / "deep" / "a", b"other", disk.link)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "deep").iterdir()] == [("a", b"something")]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES])
def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open" if number == errno.EACCES else "fsync", refuse)
    Disk().sync(tmp_path)


def test_a_folder_whose_sync_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        Disk().sync(tmp_path)


def test_a_file_and_then_its_name_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, or after a power cut there may be a name with nothing behind it."""
    synced, fsync = list[str](), os.fsync

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append("folder" if path.is_dir() else path.read_text())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    place(Disk(), tmp_path / "a", b"something", Disk().link)
    assert synced == ["something", "folder"]


def test_a_file_in_new_folders_outlasts_a_power_cut(tmp_path: Path) -> None:
    with faults.crashing(tmp_path, at=100) as disk:
        store.write(f"{tmp_path}/a/b/file", b"something")
    disk.cut_power(None)
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"something"


def test_folders_are_made_once_by_several(tmp_path: Path) -> None:
    makedirs(Disk(), tmp_path / "a" / "b")
    makedirs(Disk(), tmp_path / "a" / "b" / "c")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        makedirs(Disk(), tmp_path / "file" / "a")


def test_a_link_to_a_folder_goes_and_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "kept")
    remove(Disk(), tmp_path / "run")
    remove(Disk(), tmp_path / "run")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["kept", "kept/a"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "small"
    place.mkdir()
    if not hasattr(libc, "mount") or libc.mount(b"none", bytes(place), b"tmpfs", 0, b"size=1m"):
        pytest.skip("only root may mount a small disk")
    try:
        yield place
    finally:
        libc.umount2(bytes(place), 2)


def test_a_disk_that_is_full_is_told_at_once_and_nothing_is_left_of_the_try(small_disk: Path) -> None:
    store.put(f"{small_disk}/run/a", [bytes(500_000)])
    for act in (store.write, store.publish, lambda url, data: store.put(url, [data, data])):
        with pytest.raises(
            StoreError, match=r"run/b: No space left on device\. Free space there, or type out=<elsewhere>"
        ) as caught:
            act(f"{small_disk}/run/b", bytes(700_000))
        assert caught.value.kind == "full"
        assert [path.name for path in (small_disk / "run").iterdir()] == ["a"]
    store.put(f"{small_disk}/run/b", [bytes(400_000)])
