"""Shards are read block by block, held against their digests, through a folder of bounded size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from dtrain.errors import PreflightError, StoreError
from dtrain.storage import store
from dtrain.tokenizer import shards
from dtrain.tokenizer.blocks import Blocks, ShardTokens
from dtrain.tokenizer.pool import Encoded

TOKENS = np.random.default_rng(0).integers(0, 1000, 3000).astype(np.uint16)
ABOUT = {"tokenizer": "t", "vocab": 1000, "dtype": "uint16", "path": "texts"}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BLOCK", 200)


def written(to: str) -> shards.Manifest:
    """Shards of 1000, 1000 and 1000 tokens."""
    groups = (Encoded(np.array([500]), TOKENS[first : first + 500]) for first in range(0, 3000, 500))
    return shards.Writer(to, identity="x", size=2000, about=ABOUT).write(groups, tell=lambda shard: None)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "to") if request.param == "local" else f"memory://{tmp_path.name}"


def test_tokens_come_by_their_index(place: str, tmp_path: Path) -> None:
    blocks = Blocks(written(place), tmp_path / "cache", 1 << 20)
    shard = ShardTokens(blocks, 1, 0, 1000)
    index = np.random.default_rng(1).integers(0, 1000, (7, 30))
    assert shard[index].tolist() == TOKENS[1000:2000][index].tolist()
    part = shard[100:-300][50:]
    assert len(part) == 550
    assert part[np.arange(550)].tolist() == TOKENS[1150:1700].tolist()


def test_the_folder_stays_within_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}"
    manifest = written(url)
    monkeypatch.setattr("dtrain.tokenizer.blocks.IN_MEMORY", 1)
    blocks = Blocks(manifest, tmp_path / "cache", 1000)
    for number in range(0, 3000, 40):
        shard = ShardTokens(blocks, number // 1000, 0, 1000)
        assert shard[np.array([number % 1000])] == TOKENS[number]
        files = list((tmp_path / "cache").rglob("*.block"))
        assert files and sum(file.stat().st_size for file in files) <= 1000


def test_a_block_is_read_once_by_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = f"memory://{tmp_path.name}", list[Any]()
    manifest, real = written(url), store.parts

    def parts(url: str, begins: Sequence[int], count: int) -> list[bytes]:
        asked.extend((url.rsplit("/", 1)[-1], begin, count) for begin in begins)
        return real(url, begins, count)

    monkeypatch.setattr(store, "parts", parts)
    for _ in range(2):  # another process finds them in the folder
        blocks = Blocks(manifest, tmp_path / "cache", 1 << 20)
        blocks.ahead([(2, 0), (2, 3), (2, 10)])
        ShardTokens(blocks, 2, 0, 1000)[np.array([0, 99, 399])]
    assert asked == [("tokens-00002.bin", 0, 200), ("tokens-00002.bin", 600, 200)]


def test_a_block_that_changed_is_refused_by_name(place: str, tmp_path: Path) -> None:
    blocks = Blocks(written(place), tmp_path / "cache", 1 << 20)
    file = store.join(place, "tokens-00001.bin")
    data = bytearray(store.read(file))
    data[450] ^= 1
    store.write(file, bytes(data))
    shard = ShardTokens(blocks, 1, 0, 1000)
    assert shard[np.array([0])] == TOKENS[1000]
    with pytest.raises(PreflightError, match=r"tokens-00001\.bin changed or is torn: block 2 of it"):
        shard[np.array([210])]


def test_a_block_that_is_damaged_in_the_folder_is_read_again(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    manifest = written(url)
    ShardTokens(Blocks(manifest, tmp_path / "cache", 1 << 20), 0, 0, 1000)[np.array([0])]
    (file,) = (tmp_path / "cache").rglob("*.block")
    file.write_bytes(b"torn")
    assert ShardTokens(Blocks(manifest, tmp_path / "cache", 1 << 20), 0, 0, 1000)[np.array([5])] == TOKENS[5]


def test_what_is_gone_is_named(place: str, tmp_path: Path) -> None:
    blocks = Blocks(written(place), tmp_path / "cache", 1 << 20)
    store.remove(store.join(place, "tokens-00000.bin"))
    with pytest.raises(StoreError, match=r"tokens-00000\.bin"):
        ShardTokens(blocks, 0, 0, 1000)[np.array([5])]
    blocks.ahead([(0, 3), (1, 99)])  # told when it is read
    fsspec.filesystem("memory").store.clear()
