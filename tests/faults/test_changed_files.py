"""A file that a source reads while a run trains becomes another one: no source goes on with other samples in silence."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data import drawn
from data.files import rows, write
from data.test_rows import BUILD
from data.test_tokens import sharded as sharded
from data.test_tokens import tokens as tokens

from dtrain.data.stream import as_source
from dtrain.errors import ChangedError, PreflightError
from dtrain.storage import mapped

Made = tuple[Any, Path]
"""(a source, a file of it)"""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    mapped.forget()
    yield
    mapped.forget()


class Own:
    """A user's dataset over a mapped array."""

    def __init__(self, path: Path) -> None:
        self.rows = np.memmap(path, np.float32, "r", shape=(200, 4))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.array(self.rows[index]), index % 3


def own(folder: Path) -> Made:
    np.ones(800, np.float32).tofile(folder / "own.bin")
    return as_source(Own(folder / "own.bin")), folder / "own.bin"


def lines(format: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        words = {"inputs": ["a", "b"], "targets": "label", "holdout": 0.2, "outputs": None}
        path = write(folder / f"rows.{format}", rows())
        return BUILD[format](path=path, cache=str(folder / "cache"), **words), Path(path)

    return make


def hf(folder: Path) -> Made:
    import datasets

    datasets.Dataset.from_list(rows()).save_to_disk(folder / "hf")
    from dtrain.data import hf as words

    source = words.build(
        path=str(folder / "hf"), inputs=["a"], targets="label", holdout=0.2, outputs=None, split=None, shift=False,
        pad=None, length=None, packing="none", sequence=None, cache=str(folder / "cache"),
    )  # fmt: skip
    return source, next((folder / "hf").glob("*.arrow"))


def tar(folder: Path) -> Made:
    path = drawn.shard(folder / "0.tar", drawn.samples(0, 20))
    return drawn.build_shards(path, folder, holdout=0), Path(path)


def images(folder: Path) -> Made:
    return drawn.build(drawn.folder(folder / "flowers"), folder, holdout=0), folder / "flowers/rose/1.jpg"


KINDS: dict[str, Callable[[Path], Made]] = {
    "own": own, "jsonl": lines("jsonl"), "csv": lines("csv"), "parquet": lines("parquet"), "hf": hf, "tar": tar,
    "images": images,
}  # fmt: skip


def read(source: Any, count: int | None = None) -> None:
    index = np.arange(count or len(source))
    source.take(index, index * 0)


def change(path: Path) -> None:
    """Other bytes of the same number, in the middle."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4] = bytes(4)
    path.write_bytes(data)


def goes_on_in_silence(source: Any, path: Path) -> bool:
    read(source, 1)
    mapped.check()
    change(path)
    try:
        read(source)
        mapped.check()
    except ChangedError as error:
        return path.name not in str(error)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_no_source_reads_a_changed_file_in_silence(kind: str, tmp_path: Path) -> None:
    assert not goes_on_in_silence(*KINDS[kind](tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_file_is_read_on_where_it_is_mapped_and_named_elsewhere(kind: str, tmp_path: Path) -> None:
    source, path = KINDS[kind](tmp_path)
    read(source, 1)
    path.unlink()
    if kind in ("own", "jsonl", "csv", "hf"):
        read(source)
        mapped.check()
        return
    told = r"was removed while the run reads it\. Put it back" if kind != "images" else "cannot be read any more"
    with pytest.raises(PreflightError, match=f"{path.name} {told}"):
        read(source)


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_a_file_removed_before_its_first_row_is_read_is_named(format: str, tmp_path: Path) -> None:
    source, path = lines(format)(tmp_path)
    path.unlink()
    with pytest.raises(ChangedError, match=f"rows.{format} was removed while the run reads it"):
        read(source)


@pytest.mark.parametrize("suffix", ["bin", "npy"])
def test_tokens_that_change_are_told_and_are_other_data(suffix: str, tmp_path: Path, tokens: Any) -> None:
    path, array = tmp_path / f"a.{suffix}", np.arange(1_000_000).astype(np.uint16) % 900
    array.tofile(path) if suffix == "bin" else np.save(path, array)
    source = tokens(path)
    before = source.fingerprint
    assert not goes_on_in_silence(source, path)
    array[300_000:600_000] = 1  # neither end has changed
    array.tofile(path) if suffix == "bin" else np.save(path, array)
    assert tokens(path).fingerprint != before


def test_a_shard_of_tokenize_that_changes_after_it_was_read_is_told(tmp_path: Path, tokens: Any, sharded: Any) -> None:
    source = tokens(sharded(str(tmp_path / "to")))
    read(source)
    change(tmp_path / "to/tokens-00001.bin")
    with pytest.raises(ChangedError, match=r"tokens-00001\.bin was written to"):
        mapped.check()


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_rows_may_be_added_to_lines_while_they_are_read(format: str, tmp_path: Path) -> None:
    source, path = lines(format)(tmp_path)
    before = source.take(np.arange(48), np.zeros(48, int))
    with path.open("a") as file:
        file.write(Path(write(tmp_path / f"more.{format}", rows(5, first=60))).read_text())
    after = source.take(np.arange(48), np.zeros(48, int))
    assert after["inputs"].tolist() == before["inputs"].tolist()
    mapped.check()
    path.write_text("#" * path.stat().st_size + "\n")
    with pytest.raises(ChangedError, match=f"rows.{format} changed"):
        read(source)
