"""Images in columns: those of the library that wrote them, in any order and process."""

import pickle
import re
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.drawn import build, encoded

from dtrain.errors import DtrainError
from dtrain.files import rowfile
from dtrain.files.imagerows import opened

datasets = pytest.importorskip("datasets", reason="pip install -e '.[dev]'")

NAMES = ("rose", "daisy", "unseen")


def table(count: int = 24) -> Any:
    """Images as the library keeps them, with classes that have names."""
    rows = {
        "image": [{"bytes": encoded(number), "path": None} for number in range(count)],
        "label": [n % 2 for n in range(count)],
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*NAMES])})
    return datasets.Dataset.from_dict(rows, features=features)


def written(format: str, root: Path) -> str:
    """Files of the library; in several of them."""
    made = table()
    if format == "saved":
        made.save_to_disk(root / "saved", num_shards=2)
        return str(root / "saved")
    (root / "rows").mkdir()
    for number in (0, 1):
        made.shard(2, number, contiguous=True).to_parquet(root / f"rows/{number}.parquet", batch_size=5)
    return f"{root}/rows/*.parquet"


def rows_of(path: str, cache: Path, **given: str) -> Any:
    return opened(path, cache, **{"image": "image", "label": "label"} | given)


@pytest.mark.parametrize("format", ["saved", "parquet"])
def test_images_are_those_that_the_library_reads(format: str, tmp_path: Path) -> None:
    images = rows_of(written(format, tmp_path), tmp_path / "cache")
    index = np.random.default_rng(0).permutation(24)
    theirs = table()
    assert images.labels(index).tolist() == [theirs[int(n)]["label"] for n in index]
    assert images.read(index) == [encoded(int(n)) for n in index]
    assert images.classes == [*NAMES] and len(images) == 24
    assert images.name(13).endswith("row 2") and (images.blocks is None) == (format == "saved")
    again = pickle.loads(pickle.dumps(images))
    assert again.read(index[:3]) == images.read(index[:3])


@pytest.mark.parametrize("format", ["saved", "parquet"])
def test_pixels_are_those_of_the_same_images_in_a_folder(format: str, tmp_path: Path) -> None:
    for number in range(24):
        place = tmp_path / "folder" / NAMES[number % 2] / f"{number:02}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(number))
    made = build(written(format, tmp_path), tmp_path / "cache", holdout=0.25)
    plain = build(tmp_path / "folder", tmp_path / "cache", holdout=0.0)
    seen = [each.original(np.arange(len(each))).tolist() for each in (made, made.holdout())]
    assert sorted(seen[0] + seen[1]) == [*range(24)] and len(seen[1]) == 6
    pixels = made.take(np.arange(len(made)), np.zeros(len(made), int))
    order = [number for kind in ("daisy", "rose") for number in range(24) if NAMES[number % 2] == kind]
    there = {number: plain.original(np.arange(24)).tolist().index(place) for place, number in enumerate(order)}
    other = plain.take(np.array([there[number] for number in seen[0]]), np.zeros(len(made), int))
    assert (pixels["inputs"] == other["inputs"]).all() and pixels["targets"].tolist() == [n % 2 for n in seen[0]]
    index, epoch = made.order(np.arange(36), seed=1)
    assert sorted(index[epoch == 0].tolist()) == [*range(18)]


def test_binary_values_and_names_of_classes_and_paths_will_do(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(encoded(1))
    values = [{"bytes": None, "path": "a.jpg"}, {"bytes": encoded(2), "path": "b.jpg"}]
    kinds = {
        "plain": pa.array([encoded(1), encoded(2)], pa.binary()),
        "image": pa.array(values, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    }
    for name, column in kinds.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"image": column, "label": ["x", "y"]}), path)
        images = rows_of(str(path), tmp_path / "cache")
        assert images.read(np.arange(2)) == [encoded(1), encoded(2)] and images.classes == ["x", "y"]
    fsspec.filesystem("memory").pipe_file("/far/a.parquet", (tmp_path / "plain.parquet").read_bytes())
    assert rows_of("memory://far/a.parquet", tmp_path / "cache").read(np.arange(1)) == [encoded(1)]
    pq.write_table(pa.table({"image": ["a.jpg"], "label": ["x"]}), tmp_path / "paths.parquet")
    assert rows_of(str(tmp_path / "paths.parquet"), tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("values", "labels", "given", "sentence"),
    [
        ([b"no"] * 2, [0, 1], {}, "a.parquet, row 1 is no image. Drop the row"),
        ([encoded(1), None], [0, 1], {}, "a.parquet, row 2 has no image. Drop the row"),
        ([encoded(1)] * 2, [0, None], {}, "column label is empty in row 2"),
        ([encoded(1)] * 2, [-1, 0], {}, "-1: a class is a whole number from 0 on"),
        ([encoded(1)] * 2, [0, 1], {"image": "label"}, "data.image=label: the column holds whole values"),
        ([encoded(1)] * 2, [0, 1], {"image": "imag"}, "has no column imag. Did you mean image?"),
    ],
)
def test_rows_that_are_no_images_are_named(values: Any, labels: Any, given: Any, sentence: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.array(values, pa.binary()), "label": labels}), tmp_path / "a.parquet")
    with pytest.raises(DtrainError, match=re.escape(sentence)):
        rows_of(str(tmp_path / "a.parquet"), tmp_path / "cache", **given)


def test_a_dataset_with_splits_and_rows_of_images_say_what_to_type(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": table(), "test": table()}).save_to_disk(tmp_path / "two")
    with pytest.raises(DtrainError, match=r"has the splits train, test\. Type data\.path=.*/two/<one of them>"):
        rows_of(f"{tmp_path}/two", tmp_path / "cache")
    assert len(rows_of(f"{tmp_path}/two/train", tmp_path / "cache")) == 24
    data: Any = {
        "path": f"{tmp_path}/two/train",
        "inputs": "image",
        "targets": "label",
        "cache": str(tmp_path / "cache"),
    }
    reader = rowfile.reader_of(data, data["path"], "hf")
    said = rowfile.problem(reader, reader.found(data["path"]), data, trained=None)
    assert "To train on images type data=images data.path=<the same> data.image=image" in said
