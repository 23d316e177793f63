"""The index of tar shards: what tarfile reads, at any place; and shards that are no shards, named."""

import gzip
import io
import itertools
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from data.drawn import encoded, samples, shard

from dtrain.errors import DtrainError
from dtrain.files import tarindex
from dtrain.files.tarindex import Shards
from dtrain.storage import store

PICTURE = encoded(1)


def opened(path: Any, tmp_path: Path, **given: str) -> Shards:
    return tarindex.opened(path, tmp_path / "cache", **{"image": "auto", "label": "cls", **given})


def refused(path: Any, tmp_path: Path, **given: str) -> str:
    with pytest.raises(DtrainError) as error:
        opened(path, tmp_path, **given)
    return str(error.value).replace(str(tmp_path), "")


def made(tmp_path: Path, members: Mapping[str, bytes]) -> str:
    """A shard with these members after those of two good samples."""
    return shard(tmp_path / "a.tar", {**samples(0, 2), **members})


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_image_is_what_tarfile_reads(format: int, tmp_path: Path) -> None:
    """Names of more than 100 and, but for ustar, of more than 256 characters, and with any letters."""
    deep = "/".join(["folder" * 5] * (4 if format == tarfile.USTAR_FORMAT else 20))
    path = shard(tmp_path / "a.tar", {f"{deep}/ü {name}": data for name, data in samples(0, 20).items()}, format)
    images = opened(path, tmp_path)
    with tarfile.open(path) as archive:
        there = [archive.extractfile(name).read() for name in archive.getnames() if name.endswith(".jpg")]  # type: ignore[union-attr]
        names = [name for name in archive.getnames() if name.endswith(".jpg")]
    order = np.random.default_rng(0).permutation(len(there))
    assert images.read(order) == [there[number] for number in order]
    assert [images.name(number) for number in range(len(there))] == [f"{path}: {name}" for name in names]


def test_classes_are_numbers_or_sorted_names_and_may_be_a_field_of_json(tmp_path: Path) -> None:
    paths = [shard(tmp_path / f"{number}.tar", samples(7 * number, 7)) for number in range(3)]
    images = opened(paths, tmp_path)
    assert images.classes == 3 and images.labels(np.arange(21)).tolist() == [number % 3 for number in range(21)]
    named = opened(paths, tmp_path, label="json.about.kind")
    assert named.classes == ["kind 0", "kind 1", "kind 2"]
    assert named.labels(np.arange(20, -1, -1)).tolist() == [number % 3 for number in range(20, -1, -1)]
    assert refused(paths, tmp_path, label="json.about.king").endswith(
        "0000.json has no about.king, only about. Type data.label=json.<a field>."
    )
    assert "no class is there. It has about. Type" in refused(paths, tmp_path, label="json")
    assert "sample 0000 has no .txt, only .jpg, .cls, .json. Type data.label=" in refused(paths, tmp_path, label="txt")


def test_braces_globs_and_lists_name_shards(tmp_path: Path) -> None:
    assert list(tarindex.expanded("s3://b/{08..11}-{0..1}.tar")) == [
        f"s3://b/{a}-{b}.tar" for a, b in itertools.product(("08", "09", "10", "11"), (0, 1))
    ]
    assert list(tarindex.expanded("a.tar")) == ["a.tar"]
    for number in range(3):
        shard(tmp_path / f"{number:03d}.tar", samples(4 * number, 4))
    sizes = [
        len(opened(path, tmp_path)) for path in (f"{tmp_path}/{{000..001}}.tar", f"{tmp_path}/*.tar", str(tmp_path))
    ]
    assert sizes == [8, 12, 12]
    assert "no file is there" in refused(f"{tmp_path}/{{000..003}}.tar", tmp_path)
    assert "the braces stand for 0 shards" in refused("{3..1}.tar", tmp_path)


def test_members_that_belong_to_no_sample_are_passed_over_as_webdataset_does(tmp_path: Path) -> None:
    path = made(tmp_path, {"README": b"", "__meta__.json": b"{}", "._0000.jpg": b"\0", "d/.hidden": b""})
    assert len(opened(path, tmp_path)) == 2


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"x.jpg": PICTURE}, "sample x has no .cls, only .jpg."),
        ({"x.cls": b"1"}, "sample x has no image (.cls). Type data.image=<the ending of one>."),
        ({"x.jpg": PICTURE, "x.png": PICTURE, "x.cls": b"1"}, "sample x has several images (.jpg, .png)."),
        ({"x.jpg": PICTURE, "x.cls": b""}, "x.cls is empty, so its image has no class."),
        ({"x.jpg": b"", "x.cls": b"1"}, "x.jpg is empty."),
        ({"x.jpg": b"<html>", "x.cls": b"1"}, "x.jpg is no image."),
        ({"x.jpg": PICTURE, "x.cls": b"\xff"}, "x.cls cannot be read: 'utf-8' codec"),
        ({"x.jpg": PICTURE, "x.cls": b" " * 70000}, "x.cls has 70000 bytes, too many for a class."),
        ({"x.jpg": PICTURE, "x.cls": b"1", "x.JPG": PICTURE}, "two members have the name x.JPG. Rename one."),
        (
            {"x.jpg": PICTURE, "x.cls": b"1", "y.jpg": PICTURE, "y.cls": b"1", "x.txt": b""},
            "two samples have the name x.",
        ),
        ({"x.jpg": PICTURE, "x.cls": b"a"}, "cls has the number '0' among names, such as 'a'"),
    ],
)
def test_a_sample_without_an_image_or_a_class_is_named(
    members: dict[str, bytes], sentence: str, tmp_path: Path
) -> None:
    assert sentence in refused(made(tmp_path, members), tmp_path)


def test_a_torn_shard_is_named_with_its_place(tmp_path: Path) -> None:
    path = Path(shard(tmp_path / "a.tar", samples(0, 6)))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        end = archive.offset
    for cut in (members[-1].offset_data + 3, members[-1].offset_data, members[-1].offset + 100, end, 100):
        path.write_bytes(whole[:cut])
        text = refused(str(path), tmp_path)
        assert "a.tar is torn" in text if cut > 512 else "a.tar is no tar file" in text
        assert f" of {cut}" in text
    path.write_bytes(whole[: members[6].offset] + b"\xff" * 512 + whole[members[6].offset + 512 :])
    assert f"a.tar is torn: at byte {members[6].offset} of {len(whole)} there is neither a member" in refused(
        str(path), tmp_path
    )
    path.write_bytes(whole + whole)
    assert f"something follows its end at byte {end}" in refused(str(path), tmp_path)
    path.write_bytes(b"")
    assert "a.tar is no tar file" in refused(str(path), tmp_path)
    path.write_bytes(b"hello" * 1000)
    assert "a.tar is no tar file" in refused(str(path), tmp_path)


def test_packed_sparse_and_linked_members_have_no_place(tmp_path: Path) -> None:
    path = Path(made(tmp_path, {}))
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert "is packed with gzip: its members have no place. Unpack it" in refused(str(path), tmp_path)
    for kind, sentence in (
        (tarfile.SYMTYPE, "x.jpg is a link to 0000.jpg"),
        (tarfile.LNKTYPE, "x.jpg is a link to 0000.jpg"),
    ):
        with tarfile.open(path, "w") as archive:
            info = tarfile.TarInfo("x.jpg")
            info.type, info.linkname = kind, "0000.jpg"
            archive.addfile(info)
        assert sentence in refused(str(path), tmp_path)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("x.jpg")
        info.size, info.pax_headers = 8, {"GNU.sparse.map": "0,8", "GNU.sparse.size": "8"}
        archive.addfile(info, io.BytesIO(bytes(8)))
    assert "x.jpg is sparse" in refused(str(path), tmp_path)


def test_a_shard_that_changed_is_named_and_its_index_made_again(tmp_path: Path) -> None:
    path = shard(tmp_path / "a.tar", samples(0, 6))
    images = opened(path, tmp_path)
    shard(tmp_path / "a.tar", samples(3, 9))
    with pytest.raises(DtrainError, match=r"a.tar changed since its index was made"):
        images.read(np.arange(6))
    again = opened(path, tmp_path)
    assert again.read(np.arange(9)) == [encoded(number) for number in range(3, 12)]


def test_other_storage_is_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, there = Path(shard(tmp_path / "a.tar", samples(0, 30))), fsspec.filesystem("memory")
    there.pipe_file(f"/{tmp_path.name}/a.tar", path.read_bytes())
    url, asked = f"memory://{tmp_path.name}/a.tar", list[tuple[int, int]]()
    images = opened(url, tmp_path)
    parts = store.parts
    monkeypatch.setattr(
        store, "parts", lambda url, begins, count: asked.extend([(begins[0], count)]) or parts(url, begins, count)
    )  # type: ignore[func-returns-value]
    assert images.read(np.array([7, 2])) == [encoded(7), encoded(2)]
    assert sorted(size for _, size in asked) == sorted([len(encoded(7)), len(encoded(2))])
    there.pipe_file(f"/{tmp_path.name}/a.tar", path.read_bytes()[:9000])
    assert "a.tar is torn" in refused(url, tmp_path)


def test_names_with_a_dot_are_told_and_numbers_of_json_are_classes(tmp_path: Path) -> None:
    said = refused(made(tmp_path, {"22.05.jpg": PICTURE, "22.05.cls": b"1"}), tmp_path)
    assert (
        "sample 22 has no image" in said
        and "so 22.05.jpg is no image. Write the shard again with names such as 22_05.jpg." in said
    )
    for one, other in ((b"1.0", b"0.0"), (b"true", b"false")):
        members = {"a.jpg": PICTURE, "a.json": b'{"l": %s}' % one, "b.jpg": PICTURE, "b.json": b'{"l": %s}' % other}
        images = opened(shard(tmp_path / f"{one!r}.tar", members), tmp_path, label="json.l")
        assert images.labels(np.arange(2)).tolist() == [1, 0] and images.classes == 2
    (tmp_path / "d").mkdir()
    shard(tmp_path / "d/a.tar", samples(0, 2))
    (tmp_path / "d/b.tar.gz").write_bytes(b"x")
    (note,) = opened(str(tmp_path / "d/*"), tmp_path).notes
    assert "1 file(s) that it matches are not read: b.tar.gz. What is packed" in note
