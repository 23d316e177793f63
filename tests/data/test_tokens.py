"""Token files as they are."""

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from dtrain.data.tokens import Tokens
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.tokenizer import shards
from dtrain.tokenizer.pool import Encoded


@pytest.fixture
def tokens(tmp_path: Path) -> Any:
    def make(path: Path | str, **changed: Any) -> Tokens:
        arguments = {
            "path": str(path),
            "holdout_path": None,
            "holdout": 0.0,
            "vocab": 1000,
            "sequence": 4,
            "dtype": "uint16",
            "cache": str(tmp_path / "cache"),
        }
        return Tokens(**arguments | changed)

    return make


def first(source: Any) -> list[int]:
    return source.take(np.array([0]), np.array([0]))["inputs"][0].tolist()


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32"])
def test_both_file_kinds_hold_the_same_tokens(tmp_path: Path, tokens: Any, kind: str) -> None:
    array = np.arange(50, dtype=kind)
    np.save(tmp_path / "a.npy", array)
    array.tofile(tmp_path / "a.bin")
    for name in ("a.npy", "a.bin"):
        source = tokens(tmp_path / name, dtype=kind)
        assert first(source) == [0, 1, 2, 3]
        assert len(source) == (50 - 4) // 4


def test_several_files_are_one_corpus_without_windows_across(tmp_path: Path, tokens: Any) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.full(20, number, dtype=np.uint16))
    source = tokens(tmp_path / "*.npy")
    batch = source.take(np.arange(len(source)), np.zeros(len(source), dtype=np.int64))
    assert all(len(set(row)) == 1 for row in np.concatenate([batch["inputs"], batch["targets"]], 1).tolist())


def test_held_out_tokens_come_from_their_own_file_or_the_end(tmp_path: Path, tokens: Any) -> None:
    np.save(tmp_path / "train.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "val.npy", np.arange(500, 550, dtype=np.uint16))
    assert first(tokens(tmp_path / "train.npy", holdout_path=str(tmp_path / "val.npy")).holdout()) == [
        500,
        501,
        502,
        503,
    ]
    assert first(tokens(tmp_path / "train.npy", holdout=0.2).holdout()) == [80, 81, 82, 83]
    assert tokens(tmp_path / "train.npy").holdout() is None


def test_a_token_outside_the_vocabulary_is_refused_with_what_to_type(tmp_path: Path, tokens: Any) -> None:
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    with pytest.raises(PreflightError, match=r"Type data\.vocab=4[0-9] or more"):
        tokens(tmp_path / "a.npy", vocab=20).take(np.arange(10), np.zeros(10, dtype=np.int64))


def test_the_largest_target_is_looked_at_too(tmp_path: Path, tokens: Any) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 1, 1, 1, 99, 1, 1, 1, 1, 1], dtype=np.uint16))
    with pytest.raises(PreflightError, match=r"data\.vocab=100"):
        tokens(tmp_path / "a.npy", vocab=20).take(np.array([0]), np.array([0]))


def test_other_data_has_another_fingerprint(tmp_path: Path, tokens: Any) -> None:
    a = np.arange(100, dtype=np.uint16)
    np.save(tmp_path / "a.npy", a)
    before = tokens(tmp_path / "a.npy").fingerprint
    assert tokens(tmp_path / "a.npy").fingerprint == before
    assert tokens(tmp_path / "a.npy", sequence=5).fingerprint != before
    a[50] = 7
    np.save(tmp_path / "a.npy", a)
    assert tokens(tmp_path / "a.npy").fingerprint != before


def test_what_is_no_token_file_is_named(tmp_path: Path, tokens: Any) -> None:
    np.save(tmp_path / "float.npy", np.ones(50))
    np.save(tmp_path / "square.npy", np.ones((5, 5), dtype=np.uint16))
    (tmp_path / "broken.npy").write_bytes(b"not numpy")
    for name in ("float", "square", "broken"):
        with pytest.raises(StoreError, match=f"{name}.npy"):
            len(tokens(tmp_path / f"{name}.npy"))
    with pytest.raises(StoreError, match=r"none\.bin: no file is there"):
        len(tokens(tmp_path / "none.bin"))
    with pytest.raises(WordsError, match=r"data\.dtype=float32"):
        tokens(tmp_path / "a.bin", dtype="float32")


def test_a_file_of_pickles_is_refused(tmp_path: Path, tokens: Any) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(StoreError, match=r"evil\.npy"):
        len(tokens(tmp_path / "evil.npy"))


def test_a_remote_file_is_copied_once(tmp_path: Path, tokens: Any) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/far/a.bin", np.arange(60, dtype=np.uint16).tobytes())
    assert first(tokens("memory://far/a.bin")) == [0, 1, 2, 3]
    (copy,) = (tmp_path / "cache").iterdir()
    before = copy.stat().st_mtime_ns
    assert first(tokens("memory://far/a.bin")) == [0, 1, 2, 3]
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").iterdir()] == [(copy, before)]


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shards of 400 tokens in documents of 100; token i is i."""
    monkeypatch.setattr(shards, "BLOCK", 160)
    about = {"tokenizer": "t", "vocab": 1000, "dtype": "uint16", "path": "texts"}

    def make(to: str) -> str:
        groups = (Encoded(np.array([60, 40]), np.arange(at, at + 100, dtype=np.uint16)) for at in range(0, 1000, 100))
        shards.Writer(to, identity="x", size=800, about=about).write(groups, tell=lambda shard: None)
        return to

    return make


@pytest.mark.parametrize("storage", ["local", "memory"])
def test_shards_are_read_from_any_storage_in_the_same_order(
    tmp_path: Path, tokens: Any, sharded: Any, storage: str
) -> None:
    source = tokens(sharded(str(tmp_path / "to") if storage == "local" else f"memory://{tmp_path.name}"))
    assert len(source) == 99 + 99 + 49
    index, epoch = source.order(np.arange(2 * len(source)), seed=3)
    for each in (0, 1):
        mine = index[epoch == each]
        assert sorted(mine.tolist()) == list(range(len(source))) != mine.tolist()
    batch = source.take(index[:247], epoch[:247])
    rows = np.concatenate([batch["inputs"].numpy(), batch["targets"].numpy()[:, -1:]], 1)
    assert (np.diff(rows) == 1).all()
    assert {*batch["inputs"].flatten().tolist()} == {*range(396), *range(400, 796), *range(800, 996)}
    plain = tokens(sharded(str(tmp_path / "other")))
    assert (
        plain.fingerprint == source.fingerprint and plain.order(np.arange(9), seed=3)[0].tolist() == index[:9].tolist()
    )


def test_few_blocks_of_shards_are_read_at_a_time(tmp_path: Path, tokens: Any, sharded: Any) -> None:
    source = tokens(sharded(str(tmp_path / "to")))
    index, _ = source.order(np.arange(80), seed=0)
    stretches = index // 80  # four blocks of 80 tokens are 80 windows
    assert len({*stretches[:79].tolist()}) <= 4


def test_documents_of_shards_have_their_ends(tmp_path: Path, tokens: Any, sharded: Any) -> None:
    documents = tokens(sharded(str(tmp_path / "to"))).rows.of
    assert [ends.tolist() for _, ends in documents] == [
        [60, 100, 160, 200, 260, 300, 360, 400], [60, 100, 160, 200, 260, 300, 360, 400], [60, 100, 160, 200],
    ]  # fmt: skip
    assert documents[2][0][np.array([0, 199])].tolist() == [800, 999]


def test_the_end_of_shards_is_held_out(tmp_path: Path, tokens: Any, sharded: Any) -> None:
    source = tokens(sharded(str(tmp_path / "to")), holdout=0.3)
    assert first(source.holdout()) == [700, 701, 702, 703]
    assert source.take(np.arange(len(source)), np.zeros(len(source), np.int64))["targets"].max() < 700


def test_a_shard_that_is_not_whole_is_refused_by_name(tmp_path: Path, tokens: Any, sharded: Any) -> None:
    to = sharded(str(tmp_path / "to"))
    (tmp_path / "to/tokens-00001.bin").write_bytes(b"short")
    with pytest.raises(PreflightError, match=r"tokens-00001\.bin has 5 bytes, and tokens\.json says 800"):
        len(tokens(to))
