"""Datasets in the cache of the hub's library: the rows that the library itself finds there, without a network."""

import json
import os
import shutil
from pathlib import Path

import commands
import numpy as np
import pyarrow as pa
import pytest
from data.files import rows, write

from dtrain.errors import DtrainError
from dtrain.files import arrowfile, hubrows, rowfile

MAKE = """
import shutil, sys, json
from pathlib import Path
import datasets
from datasets import load_dataset
made = load_dataset("parquet", data_files={"train": ["a.parquet"], "test": ["b.parquet"]}, cache_dir="made")
info = next(Path("made").rglob("dataset_info.json")).parent
place = Path("cache/some___my_rows/default/0.0.0/0123456789abcdef")
shutil.copytree(info, place)
for file in place.glob("parquet-*.arrow"):
    file.rename(file.with_name(file.name.replace("parquet-", "my_rows-")))
about = json.loads((place / "dataset_info.json").read_text())
about["dataset_name"] = "my_rows"
for each in about["splits"].values():
    each["dataset_name"] = "my_rows"
(place / "dataset_info.json").write_text(json.dumps(about))
found = load_dataset("some/MyRows", cache_dir="cache", split="train")
print(json.dumps(found["label"][:]))
"""


@pytest.mark.campaign("documents")
def test_rows_are_those_that_the_library_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [{"x": row["x"], "label": row["label"]} for row in rows()]
    write(tmp_path / "a.parquet", table[:40])
    write(tmp_path / "b.parquet", table[40:])
    done = commands.python("-c", MAKE, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (url,) = arrowfile.shards("some/MyRows", "train")
    file = arrowfile.ArrowFile(url, ["label"], tmp_path)
    assert file.read(0, np.arange(40))["label"].tolist() == json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset in a cache, as the library lays it out."""
    place = tmp_path / "cache/some___my_rows/default/0.0.0/0123456789abcdef"
    place.mkdir(parents=True)
    for name, count in (("train-00000-of-00002", 3), ("train-00001-of-00002", 2), ("test", 1)):
        table = pa.table({"x": [0.5] * count, "label": [*range(count)]})
        with pa.ipc.new_stream(str(place / f"my_rows-{name}.arrow"), table.schema) as file:
            file.write_table(table)
    (place / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return place


def test_a_name_and_its_folder_are_the_same_rows(cache: Path, tmp_path: Path) -> None:
    data = {"split": "train", "inputs": "x", "targets": "label", "cache": str(tmp_path / "index")}
    for path in ("some/MyRows", str(cache)):
        reader = rowfile.reader_of(data, path, "hf")
        files = reader.opened(reader.found(path), ["label"])
        assert [file.facts["sizes"] for file in files] == [[3], [2]]
        assert rowfile.problem(reader, reader.found(path), data, trained=None) == ""


@pytest.mark.parametrize(
    ("name", "split", "sentence"),
    [
        ("some/MyRows", None, r"has the splits train, test\. Type data\.split=<one of them>"),
        ("some/MyRows", "trian", "has no such split. Did you mean train"),
        ("some/Others", None, r"no folder is there, and .* has no such dataset of the hub\. Type python -c"),
    ],
)
def test_what_is_not_there_is_named(name: str, split: str | None, sentence: str, cache: Path) -> None:
    with pytest.raises(DtrainError, match=sentence):
        arrowfile.shards(name, split)


def test_several_configurations_and_lost_files_are_refused(cache: Path, tmp_path: Path) -> None:
    (cache / "my_rows-train-00000-of-00002.arrow").unlink()
    with pytest.raises(DtrainError, match=r"lacks files of the split train\. Load it again"):
        hubrows.files(cache, "train")
    shutil.copytree(tmp_path / "cache/some___my_rows/default", tmp_path / "cache/some___my_rows/other")
    with pytest.raises(DtrainError, match="the cache has several configurations, default, other"):
        hubrows.prepared("some/MyRows")
