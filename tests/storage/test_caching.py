"""The cache: its folder, and locks that one process has at a time."""

from pathlib import Path

import pytest

from dtrain.errors import StoreError
from dtrain.storage.caching import folder, locked


def test_the_folder_is_that_of_the_word_else_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert folder(None) == Path("/caches/dtrain") and folder("/mine") == Path("/mine")


def test_a_lock_is_waited_for_as_long_as_it_is_worth(tmp_path: Path) -> None:
    stem = tmp_path / "made" / "once"
    with locked(stem), pytest.raises(StoreError, match="made"), locked(stem, seconds=0.0):
        pass
    with locked(stem, seconds=0.0):
        assert stem.parent.is_dir()
