"""Shards depend on their documents alone; the manifest is written last."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.storage import store
from dtrain.tokenizer import shards
from dtrain.tokenizer.pool import Encoded

ABOUT = {"tokenizer": "bytes", "vocab": 256, "dtype": "uint8", "path": "texts"}


def groups(first: int = 0, last: int = 12) -> Iterator[Encoded]:
    for number in range(first, last):
        yield Encoded(np.array([3, 7]), np.full(10, number, np.uint8))


def writer(to: Path, identity: str = "one", **changed: Any) -> shards.Writer:
    return shards.Writer(str(to), **{"identity": identity, "size": 40, "about": ABOUT} | changed)


def whole(to: Path) -> shards.Manifest:
    return writer(to).write(groups(), tell=lambda shard: None)


def test_shards_hold_whole_groups_and_the_ends_of_documents(tmp_path: Path) -> None:
    manifest = shards.read(whole(tmp_path).folder)
    assert [shard["tokens"] for shard in manifest.shards] == [40, 40, 40]
    assert manifest.facts["documents"] == 24 and manifest.facts["tokens"] == 120
    assert np.fromfile(tmp_path / "tokens-00001.bin", np.uint8).tolist() == [4] * 10 + [5] * 10 + [6] * 10 + [7] * 10
    assert shards.ends_of(manifest, manifest.shards[0]).tolist() == [3, 10, 13, 20, 23, 30, 33, 40]
    assert manifest.problem() == ""


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    digest = whole(tmp_path / "a").digest
    half = writer(tmp_path / "b")
    told = list[Any]()

    def killed(shard: Any) -> None:
        told.append(shard)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half.write(groups(), tell=killed)
    assert not (tmp_path / "b" / shards.MANIFEST).exists()
    again = writer(tmp_path / "b")
    assert 2 <= again.documents < 24
    assert again.write(groups(again.documents // 2), tell=lambda shard: None).digest == digest


@pytest.mark.parametrize("torn", ["tokens-00001.bin", "tokens-00001.ends", "tokens-00001.json"])
def test_a_torn_shard_is_made_again(tmp_path: Path, torn: str) -> None:
    digest = whole(tmp_path).digest
    data = (tmp_path / torn).read_bytes()
    (tmp_path / torn).write_bytes(data[:-3])
    again = writer(tmp_path)
    assert len(again.shards) == 1
    assert again.write(groups(again.documents // 2), tell=lambda shard: None).digest == digest
    assert (tmp_path / torn).read_bytes() == data


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    whole(tmp_path)
    with pytest.raises(WordsError, match=r"holds tokens of other text.*Type to=<another place>"):
        writer(tmp_path, "two")


def test_a_shard_of_another_size_is_named(tmp_path: Path) -> None:
    manifest = whole(tmp_path)
    (tmp_path / "tokens-00002.bin").write_bytes(b"short")
    assert manifest.problem().startswith("tokens-00002.bin has 5 bytes, and tokens.json says 40.")
    (tmp_path / "tokens-00000.bin").unlink()
    assert manifest.problem().startswith("tokens-00000.bin is not there")


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    whole(tmp_path)
    file = tmp_path / shards.MANIFEST
    facts = json.loads(file.read_text())
    for damaged in ("no json", json.dumps([1]), json.dumps({**facts, "dtype": "object"})):
        file.write_text(damaged)
        with pytest.raises(PreflightError, match=r"tokens\.json: this is no manifest"):
            shards.read(str(tmp_path))
    facts["shards"][0]["tokens"] = 41
    file.write_text(json.dumps(facts))
    with pytest.raises(PreflightError, match="is damaged, or of another version"):
        shards.read(str(file))
    (tmp_path / "tokens-00000.ends").write_bytes(bytes(64))
    with pytest.raises(PreflightError, match=r"tokens-00000\.ends is not the file"):
        shards.ends_of(shards.Manifest(str(tmp_path), facts), facts["shards"][0])


def test_a_full_disk_is_told_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = whole(tmp_path / "a").digest
    real = store.disk.create

    def full(path: Path) -> int:
        if "tokens-00001.bin" in path.name:
            raise OSError(28, "No space left on device")
        return real(path)

    monkeypatch.setattr(store.disk, "create", full)
    with pytest.raises(StoreError, match=r"tokens-00001\.bin: No space left"):
        whole(tmp_path / "b")
    monkeypatch.undo()
    again = writer(tmp_path / "b")
    assert again.documents == 8
    assert again.write(groups(4), tell=lambda shard: None).digest == digest
