"""A file that changes under whoever has mapped it is named."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain.errors import ChangedError
from dtrain.storage import mapped


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    mapped.forget()
    yield
    mapped.forget()


def write(path: Path) -> None:
    path.write_bytes(b"b" * 100)


def cut(path: Path) -> None:
    os.truncate(path, 10)


def extend(path: Path) -> None:
    path.write_bytes(b"a" * 200)


def replace(path: Path) -> None:
    path.with_name("new").write_bytes(b"a" * 100)
    path.with_name("new").replace(path)


@pytest.mark.parametrize(
    ("change", "sentence", "grows"),
    [
        (write, "was written to", False),
        (cut, "was cut from 100 to 10 bytes", False),
        (extend, "was extended from 100 to 200 bytes", False),
        (replace, "was replaced by another file", False),
        (write, "was written to", True),
        (cut, "was cut from 100 to 10 bytes", True),
        (extend, "", True),
        (Path.unlink, "", False),  # who has mapped it still reads what it was
    ],
)
def test_a_change_is_told_with_the_file(
    change: Callable[[Path], None], sentence: str, grows: bool, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"a" * 100)
    os.utime(path, (0, 0))
    mapped.note(path, grows=grows)
    mapped.check()
    change(path)
    mapped.note(path)  # by a second reader: what it was first counts
    if not sentence:
        mapped.check()
        return
    with pytest.raises(ChangedError) as error:
        mapped.check()
    assert f"{path} {sentence}" in str(error.value)
    assert mapped.cut() == (f"{path} {sentence}" if change is cut else "")
    mapped.forget()
    mapped.check()
