"""Files whose content is another at the next start are named, however few bytes changed; copies are not."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtrain.errors import WordsError
from dtrain.files import sampled

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    sampled.forget()
    yield
    sampled.forget()


def flip(at: int, count: int = 1) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"b" * count)

    return change


def touch(path: Path) -> None:
    os.utime(path, (9, 9))


def copy(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").replace(path)


CHANGES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "one byte in the middle of a file that is read whole": (flip(SIZE // 2 + 1), 64, "as many bytes, and other content"),
    "the last byte of a sampled one": (flip(SIZE - 1), 4, "as many bytes, and other content"),
    "a third of a sampled one": (flip(SIZE // 3, SIZE // 3), 4, "as many bytes, and other content"),
    "its size": (lambda path: os.truncate(path, SIZE - 2), 64, f"had {SIZE} bytes, and has {SIZE - 2}"),
    "its time alone": (touch, 64, ""),
    "a copy": (copy, 64, ""),
}  # fmt: skip


@pytest.mark.parametrize("kept_time", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_other_content_is_refused_with_the_file(
    change: str, kept_time: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, blocks, sentence = CHANGES[change]
    monkeypatch.setattr(sampled, "BLOCKS", blocks)
    monkeypatch.setattr(sampled, "FEWEST", 1)
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"a" * SIZE)
    os.utime(path, (5, 5))
    sampled.note({str(path): path})
    then = sampled.facts()
    sampled.forget()
    act(path)
    if kept_time:
        os.utime(path, (5, 5))
    monkeypatch.setattr(sampled, "BLOCKS", 32)  # of a later version
    sampled.note({str(path): path})
    if not sentence:
        assert sampled.compare(then) == []
        return
    with pytest.raises(WordsError, match="trained on other data") as error:
        sampled.compare(then)
    assert f"{path} {sentence if sentence.startswith('had') else f'has {sentence}'}. Put the file back" in str(
        error.value
    )


def test_what_a_sample_cannot_see_is_said_if_the_file_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "BLOCKS", 4)
    monkeypatch.setattr(sampled, "FEWEST", 1)
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"a" * SIZE)
    os.utime(path, (5, 5))
    sampled.note({str(path): path})
    then = sampled.facts()
    sampled.forget()
    flip(SIZE // 6)(path)  # between two of four blocks
    sampled.note({str(path): path})
    (note,) = sampled.compare(then)
    assert note.startswith(
        f"{path} was written or copied since the checkpoint. It is the same in the 4 blocks of 64 KiB"
    )
