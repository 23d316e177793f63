"""data=hf: the rows of the library's own loader."""

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from data.files import rows

from dtrain.data.hf import build
from dtrain.data.text import Text
from dtrain.errors import DtrainError

datasets = pytest.importorskip("datasets", reason="pip install -e '.[dev]'")


def saved(folder: Path, *, shards: int = 3) -> Any:
    """A dataset that the library has written, in several files, with names of classes."""
    made = datasets.Dataset.from_list(
        [{name: row[name] for name in ("x", "a", "ids", "label", "text")} for row in rows()]
    )
    made = made.cast_column("label", datasets.ClassLabel(names=["p", "q", "r", "s", "unseen"]))
    made.save_to_disk(folder, num_shards=shards)
    return datasets.load_from_disk(folder)


def source(path: str, cache: Path, **given: Any) -> Any:
    words = {
        "inputs": "x",
        "targets": "label",
        "split": None,
        "holdout": 0,
        "shift": False,
        "outputs": None,
        "pad": None,
        "length": None,
        "packing": "none",
        "sequence": None,
    }
    return build(path=path, cache=str(cache), **words | given)


def test_rows_are_those_of_the_librarys_loader(tmp_path: Path) -> None:
    theirs, ours = saved(tmp_path / "saved"), source(str(tmp_path / "saved"), tmp_path)
    assert len([*(tmp_path / "saved").glob("*.arrow")]) == 3 and len(ours) == len(theirs) == 60
    index, epoch = ours.order(np.arange(60), seed=1)
    batch, there = ours.take(index, epoch), theirs[ours.original(index)]
    assert (
        batch["inputs"].tolist() == np.array(there["x"], np.float32).tolist()
        and batch["targets"].tolist() == there["label"]
    )
    names = ["p", "q", "r", "s", "unseen"]
    assert ours.facts == {"inputs": [3], "kind": "float32", "outputs": 5, "vocab": 5, "class_names": names}


def test_numbers_of_classes_need_no_names(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"x": [row["a"]], "y": row["label"]} for row in rows()]).save_to_disk(
        tmp_path / "saved"
    )
    assert source(str(tmp_path / "saved"), tmp_path, targets="y").facts["outputs"] == 4


def test_tokens_are_padded_and_shifted(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved")
    ours = source(str(tmp_path / "saved"), tmp_path, inputs=["ids"], targets="ids", pad=0, length=4)
    batch = ours.take(np.arange(9), np.zeros(9, int))
    for row, place in zip(batch["inputs"].tolist(), ours.original(np.arange(9)), strict=True):
        assert row == [*theirs[int(place)]["ids"], 0, 0, 0][:4]


def test_a_column_of_text_is_text(tmp_path: Path) -> None:
    theirs = saved(tmp_path / "saved")
    words: dict[str, Any] = {"sequence": 1, "tokenizer": "bytes", "holdout": 0, "cache": str(tmp_path)}
    text = Text(path=f"{tmp_path}/saved/*.arrow", column="text", **words)
    seen = bytes(text.take(np.arange(len(text)), np.zeros(len(text), int))["inputs"].flatten().tolist())
    assert {*seen.split(b"\0")[:-1]} < {each.encode() for each in theirs["text"]} and seen.count(b"\0") == 59


def test_a_split_is_named(tmp_path: Path) -> None:
    made = saved(tmp_path / "one")
    datasets.DatasetDict(train=made, test=made.select(range(7))).save_to_disk(tmp_path / "several")
    assert len(source(str(tmp_path / "several"), tmp_path, split="test")) == 7
    for split, sentence in (
        (None, "has the splits train, test. Type data.split="),
        ("tain", "no such split. Did you mean train?"),
    ):
        with pytest.raises(DtrainError) as error:
            source(str(tmp_path / "several"), tmp_path, split=split)
        assert sentence in str(error.value)


def test_it_comes_from_any_url_and_is_the_same_data_there(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    fsspec.filesystem("memory").put(str(tmp_path / "saved"), "/hf/saved", recursive=True)
    far, near = source("memory://hf/saved", tmp_path / "far"), source(str(tmp_path / "saved"), tmp_path / "near")
    assert far.fingerprint == near.fingerprint
    batches = [each.take(np.arange(60), np.zeros(60, int)) for each in (far, near)]
    assert batches[0]["inputs"].tolist() == batches[1]["inputs"].tolist()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"targets": "labels"}, "has no column labels. Did you mean label?"),
        ({"inputs": "text"}, "column text holds text"),
        ({"path": "."}, "this is no folder that save_to_disk of Hugging Face's datasets wrote"),
    ],
)
def test_what_cannot_be_read_is_named(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    with pytest.raises(DtrainError) as error:
        source(**{"path": str(tmp_path / "saved"), "cache": tmp_path / "cache"} | given)
    assert sentence in str(error.value)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    file = next((tmp_path / "saved").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-700])
    with pytest.raises(DtrainError, match="this is no whole Arrow file"):
        source(str(tmp_path / "saved"), tmp_path)
