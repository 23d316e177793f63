"""The index of images: those of class folders and of tables, sorted, kept, and made again; and what is refused."""

import json
import os
import re
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.drawn import encoded, folder

from dtrain.errors import DtrainError, PreflightError
from dtrain.files import imagefiles, imageindex
from dtrain.files.imagefiles import url_of
from dtrain.files.imageindex import Images


def opened(path: Any, tmp_path: Path, **given: str) -> Images:
    return imageindex.opened(str(path), tmp_path / "cache", **{"image": "image", "label": "label", **given})


def everything(images: Images) -> list[tuple[str, bytes, int]]:
    index = np.arange(len(images))
    return [
        (images.name(n), *each)
        for n, each in enumerate(zip(images.read(index), images.labels(index).tolist(), strict=True))
    ]


def refused(path: Any, tmp_path: Path, **given: str) -> str:
    with pytest.raises(DtrainError) as error:
        opened(path, tmp_path, **given)
    return str(error.value)


def test_classes_are_the_folders_by_name_and_images_are_found_below_them(tmp_path: Path) -> None:
    root = folder(tmp_path / "flowers", 3)
    (root / "rose/more/x").mkdir(parents=True)
    (root / "rose/more/x/9.PNG").write_bytes(encoded(9, "PNG"))
    (root / "rose/notes.txt").write_text("no image")
    (root / ".ipynb_checkpoints").mkdir()
    (root / ".DS_Store").write_text("")
    images = opened(root, tmp_path)
    assert images.classes == ["daisy", "rose", "tulip"]
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".png"))
    assert everything(images) == [
        (str(file), file.read_bytes(), images.classes.index(file.relative_to(root).parts[0])) for file in files
    ]


def test_images_to_predict_need_no_class(tmp_path: Path) -> None:
    flat, root = tmp_path / "flat", folder(tmp_path / "flowers", 3)
    flat.mkdir()
    for number in range(3):
        (flat / f"{number}.png").write_bytes(encoded(number, "PNG"))
    (flat / "rows.csv").write_text("image\n0.png\n2.png\n")
    for path, count in (flat, 3), (root, 9), (flat / "rows.csv", 2):
        images = imageindex.opened(str(path), tmp_path / "cache", image="image", label=None)
        assert len(images.read(np.arange(count))) == len(images) == count
    assert "in no class folder" in refused(flat, tmp_path) and "no column label" in refused(flat / "rows.csv", tmp_path)
    assert opened(root, tmp_path).classes == ["daisy", "rose", "tulip"]


def test_files_in_class_folders_that_are_no_images_are_counted(tmp_path: Path) -> None:
    root = folder(tmp_path / "flowers", 3)
    assert opened(root, tmp_path).notes == []
    for name in ("rose/a.svg", "daisy/b.heic", "rose/.hidden", "README.md"):
        (root / name).write_text("")
    (note,) = opened(root, tmp_path).notes
    assert note.startswith("2 files in class folders, such as daisy/b.heic, are passed over: names of images end in")


def test_an_index_is_kept_until_a_file_comes_goes_or_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, made = folder(tmp_path / "flowers", 3), list[int]()
    listed = imageindex.listed
    monkeypatch.setattr(imageindex, "listed", lambda *given: made.append(1) or listed(*given))  # type: ignore[func-returns-value]
    first = opened(root, tmp_path)
    assert opened(root, tmp_path).digest == first.digest and len(made) == 1
    (root / "rose/more").mkdir()
    (root / "rose/more/7.jpg").write_bytes(encoded(7))
    assert len(opened(root, tmp_path)) == 10
    (root / "rose/more/7.jpg").write_bytes(encoded(8, width=30))
    assert everything(opened(root, tmp_path))[6][1] == encoded(8, width=30)
    (root / "rose/more/7.jpg").unlink()
    (root / "rose/more").rmdir()
    assert opened(root, tmp_path).digest == first.digest, "the same images"
    assert len(made) == 4


def test_a_file_that_changed_since_is_named_and_the_next_run_makes_the_index_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagefiles, "LOOKED_AT", 1)
    root = folder(tmp_path / "flowers", 3)
    images = opened(root, tmp_path)
    (root / "rose/1.jpg").write_bytes(encoded(8, width=30))
    with pytest.raises(DtrainError, match=r"rose/1.jpg changed since its index was made. Leave the files"):
        images.read(np.arange(9))
    assert everything(opened(root, tmp_path))[4][1] == encoded(8, width=30)
    (root / "daisy/0.jpg").unlink()
    with pytest.raises(DtrainError, match=r"daisy/0.jpg cannot be read any more: No such file"):
        images.read(np.arange(1))


def test_names_may_have_any_characters(tmp_path: Path) -> None:
    root = tmp_path / "odd"
    names = ["a b", "ü=ñ", "new\nline", "*?[x]", os.fsdecode(b"\xff\xfe")]
    for number, name in enumerate(names):
        (root / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        (root / f"c{number % 2}" / f"{name}.jpg").write_bytes(encoded(number))
    images = opened(root, tmp_path)
    assert {data for _, data, _ in everything(images)} == {encoded(number) for number in range(5)}
    (root / "c0" / "new\nline.jpg").unlink()
    with pytest.raises(DtrainError) as error:
        images.read(np.arange(5))
    assert "c0/new\\nline.jpg cannot be read" in str(error.value)
    (root / "c0" / os.fsdecode(b"\xff\xfe.jpg")).write_bytes(b"")
    assert "c0/\\xff\\xfe.jpg is empty" in refused(root, tmp_path)


def test_a_link_to_a_folder_is_followed_and_one_that_leads_back_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "flowers", 2, ["rose"])
    folder(tmp_path / "elsewhere", 2, ["daisy"])
    (root / "daisy").symlink_to(tmp_path / "elsewhere/daisy")
    assert len(opened(root, tmp_path)) == 4
    (root / "daisy/back").symlink_to(root)
    assert refused(root, tmp_path) == f"data.path: the link {root}/daisy/back leads back to {root}. Remove it."


def test_a_folder_that_is_no_folder_of_classes_is_refused(tmp_path: Path) -> None:
    assert "no folder is there" in refused(tmp_path / "none", tmp_path)
    root = tmp_path / "a"
    root.mkdir()
    assert "no image is there. Names of images end in .jpg," in refused(root, tmp_path)
    (root / "000.tar").write_bytes(b"")
    assert refused(root, tmp_path).endswith("For its tar shards type data=webdataset.")
    (root / "1.jpg").write_bytes(encoded(1))
    assert "its 1 images are in no class folder" in refused(root, tmp_path)
    assert "this is a file, and no table" in refused(root / "1.jpg", tmp_path)
    folder(root, 2)
    assert "1 image(s) are beside the class folders, such as 1.jpg" in refused(root, tmp_path)
    one = folder(tmp_path / "one", 2, ["rose"])
    assert "rose is the only class" in refused(one, tmp_path)
    (one / "daisy").mkdir()
    assert "1 class folder(s) have no image, such as daisy" in refused(one, tmp_path)
    split = folder(tmp_path / "split/train", 1).parent
    folder(split / "val", 1)
    assert f"Type data.path={split}/train data.holdout_path={split}/val." in refused(split, tmp_path)


@pytest.mark.parametrize(("data", "sentence"), [(b"", "is empty"), (b"<html>", "is no image")])
def test_a_file_that_is_no_image_is_told_before_the_launch(data: bytes, sentence: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "flowers", 3)
    for name in ("rose/1.jpg", "tulip/2.jpg"):
        (root / name).write_bytes(data)
    assert refused(root, tmp_path) == f"data.path: {root}/rose/1.jpg {sentence}, and 1 more. Remove what is no image."


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    root = folder(tmp_path / "flowers", 3)
    os.mkfifo(root / "rose/pipe.jpg")
    assert refused(root, tmp_path) == f"data.path: {root}/rose/pipe.jpg is no file. Remove what is no image."
    (tmp_path / "table.csv").write_text("image,label\nflowers/rose/pipe.jpg,a\nflowers/rose/0.jpg,b\n")
    assert "1 image(s) are not there, first in row 1" in refused(tmp_path / "table.csv", tmp_path)


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("labels", [["rose", "daisy", "rose"], [2, 0, 2]])
def test_a_table_names_images_and_their_classes(format: str, labels: list[Any], tmp_path: Path) -> None:
    root = folder(tmp_path / "flowers", 3)
    paths = ["flowers/rose/0.jpg", f"{root}/daisy/1.jpg", "flowers/rose/2.jpg"]
    table = [{"file": path, "kind": label} for path, label in zip(paths, labels, strict=True)]
    path = tmp_path / f"table.{format}"
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        path.write_text("file,kind\n" + "".join(f"{row['file']},{row['kind']}\n" for row in table))
    images = opened(path, tmp_path, image="file", label="kind")
    number = {"rose": 1, "daisy": 0}
    assert images.classes == (["daisy", "rose"] if "rose" in labels else 3)
    assert [(data, label) for _, data, label in everything(images)] == [
        ((tmp_path / path).read_bytes(), number.get(label, label)) for path, label in zip(paths, labels, strict=True)
    ]
    (root / "rose/2.jpg").unlink()
    assert "1 image(s) are not there, first in row 3: " in refused(path, tmp_path, image="file", label="kind")
    assert "has no column fil. Did you mean file?" in refused(path, tmp_path, image="fil", label="kind")


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("a.jpg,\na.jpg,rose\n", "line 2: column label is missing|column label has an empty label|empty"),
        ("a.jpg,rose\na.jpg,rose\n", "column label: rose is the only class"),
        ("a.jpg,1.5\na.jpg,0\n", "1.5: a class is a whole number from 0 on, or a name"),
        ("a.jpg,-1\na.jpg,0\n", "-1: a class is a whole number from 0 on, or a name"),
        ("a.jpg,7\na.jpg,rose\n", "column label has the number '7' among names, such as 'rose': classes are all"),
        ("a.jpg,0\na.jpg,1000000\n", "has the class 1000000, and a model has an output for each.* Number the 2"),
        (f"a.jpg,0\na.jpg,{'9' * 5000}\n", "column label has the class 9{40}, and"),
        ("", "there is no row"),
    ],
)
def test_labels_that_are_no_classes_are_refused(rows: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(1))
    (tmp_path / "table.csv").write_text("image,label\n" + rows)
    assert re.search(sentence, refused(tmp_path / "table.csv", tmp_path))


def test_images_elsewhere_are_listed_and_read_by_their_urls(tmp_path: Path) -> None:
    root, there = folder(tmp_path / "flowers", 3), fsspec.filesystem("memory")
    for file in root.rglob("*.jpg"):
        there.pipe_file(f"/flowers-{tmp_path.name}/{file.relative_to(root)}", file.read_bytes())
    url = f"memory://flowers-{tmp_path.name}"
    here, images = opened(root, tmp_path), opened(url, tmp_path)
    assert [each[1:] for each in everything(images)] == [each[1:] for each in everything(here)]
    assert images.digest == here.digest
    there.rm(f"/flowers-{tmp_path.name}/rose/0.jpg")
    with pytest.raises(DtrainError, match=r"rose/0.jpg cannot be read any more"):
        images.read(np.arange(9))
    assert len(opened(url, tmp_path)) == 8


@pytest.mark.parametrize(
    "name",
    [
        "reference::http://evil.example.org/refs.json", "simplecache::file:///etc/passwd", "/etc/passwd", "~/.ssh/id_rsa", "../../private.png",
        "file:///etc/passwd", "local:///etc/passwd", "sftp://host/a.png", "github://org:repo@/a.png", "http://169.254.169.254/latest/a.png",
        "http://127.0.0.2/a.png", "http://localhost:8080/a.png", "http://[::1]/a.png",
    ],
)  # fmt: skip
def test_rows_of_a_table_elsewhere_open_no_file_of_this_machine_nor_of_its_network(name: str) -> None:
    with pytest.raises(PreflightError, match="a row at http"):
        url_of("http://93.184.216.34", name)


def test_rows_of_a_table_name_images_beside_it_or_at_plain_urls() -> None:
    assert url_of("s3://bucket/set", "a/1.png") == "s3://bucket/set/a/1.png"
    assert url_of("http://127.0.0.1:80/set", "http://127.0.0.1:80/a.png") == "http://127.0.0.1:80/a.png"
    assert url_of("http://127.0.0.1/set", "https://93.184.216.34/a.png") == "https://93.184.216.34/a.png"
    assert url_of("set", "/data/a.png") == "/data/a.png"
    with pytest.raises(PreflightError, match="one address through another"):
        url_of("set", "reference::http://evil.example.org/refs.json")
