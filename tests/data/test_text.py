"""Text from a path, encoded once, the end held out."""

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tokenizers
from data.files import rows, write

from dtrain.data.text import Text
from dtrain.errors import PreflightError, StoreError, WordsError


@pytest.fixture
def text(tmp_path: Path) -> Any:
    def make(path: Path | str | list[str], **changed: Any) -> Text:
        return Text(
            **{
                "path": path if isinstance(path, list) else str(path),
                "sequence": 16,
                "tokenizer": "bytes",
                "holdout": 0.0,
                "cache": str(tmp_path / "cache"),
            }
            | changed
        )

    return make


def everything(source: Text) -> bytes:
    """All bytes that a pass over the samples shows, in order."""
    batch = source.take(np.arange(len(source)), np.zeros(len(source), dtype=np.int64))
    return bytes(batch["inputs"].flatten().tolist())


def test_a_token_is_a_byte_and_a_zero_parts_documents(tmp_path: Path, text: Any) -> None:
    (tmp_path / "a.txt").write_bytes(b"A" * 40)
    (tmp_path / "b.txt").write_bytes(b"B" * 40)
    shown = everything(text(tmp_path / "*.txt"))
    assert set(shown) == {ord("A"), ord("B"), 0}
    assert shown.count(0) == 1


def test_text_goes_in_and_out(text: Any, corpus: Path) -> None:
    source = text(corpus)
    assert source.decode(source.encode("def f(x): é")) == "def f(x): é"
    assert source.facts == {"vocab": 256}


def test_the_end_of_the_corpus_is_held_out(text: Any, corpus: Path) -> None:
    whole, part = text(corpus), text(corpus, holdout=0.25)
    heldout = part.holdout()
    assert heldout is not None
    total = len(whole)
    assert len(heldout) == pytest.approx(total / 4, abs=2)
    assert len(part) == pytest.approx(total * 3 / 4, abs=2)
    assert everything(whole).startswith(everything(part))
    assert whole.holdout() is None


def test_the_order_of_documents_does_not_follow_their_folder(tmp_path: Path, text: Any) -> None:
    """The same files below another root are the same corpus."""
    for root in ("one", "two/deeper"):
        for name in "abcdef":
            (tmp_path / root / name).mkdir(parents=True)
            (tmp_path / root / name / "x.txt").write_text(name * 50)
    assert text(tmp_path / "one").fingerprint == text(tmp_path / "two/deeper").fingerprint
    assert everything(text(tmp_path / "one")) != b"".join(name.encode() * 50 + b"\0" for name in "abcdef")[: 16 * 18], (
        "not in the order of names"
    )


def test_the_corpus_is_encoded_once_and_again_when_a_file_changes(tmp_path: Path, text: Any) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 100)
    first = text(file).fingerprint
    cached = list((tmp_path / "cache").glob("*.bin"))
    assert text(file).fingerprint == first
    assert list((tmp_path / "cache").glob("*.bin")) == cached
    file.write_text("y" * 101)
    assert text(file).fingerprint != first


def test_what_cannot_be_read_is_named(tmp_path: Path, text: Any) -> None:
    with pytest.raises(StoreError, match=r"none\.txt: no file is there"):
        len(text(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(PreflightError, match="there is no text in 1 file"):
        len(text(tmp_path / "empty.txt"))
    with pytest.raises(WordsError, match=r"data\.holdout=1\.5"):
        text(tmp_path, holdout=1.5)


def test_text_comes_from_any_url(text: Any) -> None:
    fsspec.filesystem("memory").pipe_file("/corpus/a.txt", b"m" * 100)
    assert set(everything(text("memory://corpus/a.txt"))) == {ord("m")}


def test_a_tokenizer_json_is_used(tmp_path: Path, text: Any) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("a b a c " * 10)
    source = text(tmp_path / "t.txt", tokenizer=str(tmp_path / "tokenizer.json"), sequence=4)
    assert source.facts == {"vocab": 3}
    assert source.take(np.array([0]), np.array([0]))["inputs"].tolist() == [[0, 1, 0, 2]]
    with pytest.raises(PreflightError, match=r"data\.tokenizer=.*missing\.json: .* does not exist"):
        text(tmp_path / "t.txt", tokenizer=str(tmp_path / "missing.json"))
    (tmp_path / "broken.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(PreflightError, match=r"broken\.json: not a tokenizer\.json"):
        text(tmp_path / "t.txt", tokenizer=str(tmp_path / "broken.json"))


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_a_column_of_rows_is_text(format: str, tmp_path: Path, text: Any) -> None:
    """Each row is a document; they are shuffled, so that the end is a representative sample."""
    table = rows(40)
    source = text(write(tmp_path / f"rows.{format}", table), column="text", sequence=1)
    documents = everything(source).split(b"\0")
    last = documents.pop()
    expected = {row["text"].encode() for row in table}
    assert {*documents} < expected and last and any(each.startswith(last) for each in expected)
    assert documents != [row["text"].encode() for row in table][:-1]
    with pytest.raises(WordsError, match=r"data\.column=label: the column holds whole numbers\. Name one of text\."):
        len(text(write(tmp_path / "rows.parquet", table), column="label"))


def test_text_may_be_a_list_of_paths(tmp_path: Path, text: Any) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 20)  # at one token a sample nothing is cut off
    assert {*everything(text([str(tmp_path / "a.txt"), str(tmp_path / "[bc].txt")], sequence=1))} == {0, *b"abc"}
    with pytest.raises(PreflightError, match=r"column is a column of files whose names end in \.jsonl"):
        len(text(tmp_path / "a.txt", column="x"))


def test_the_standard_library_is_there_without_a_download(text: Any) -> None:
    source = text("stdlib", sequence=64)
    assert len(source) > 10_000
    assert b"import" in bytes(source.take(np.arange(500), np.zeros(500, dtype=np.int64))["inputs"].flatten().tolist())


def test_packed_files_are_no_text_and_a_vocabulary_may_have_gaps(tmp_path: Path, text: Any) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"abc" * 999))
    with pytest.raises(PreflightError, match="packed with gzip"):
        len(text(tmp_path / "a.txt"))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 300}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "b.txt").write_text("b" * 9)
    assert text(tmp_path / "b.txt", tokenizer=str(tmp_path / "tokenizer.json")).facts == {"vocab": 301}


def test_what_is_no_text_is_refused_and_hidden_files_are_named(tmp_path: Path, text: Any) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.txt").write_text("hello world, " * 8)
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    source = text(folder)
    assert b"Bud1" not in everything(source)
    assert source.notes == ["data.path: 1 file(s) that it matches are not read: .DS_Store."]
    for data, sentence in (
        (b"\x89PNG\r\n", "b.txt is an image, no text. Leave it out"),
        ("hé".encode("utf-16"), "b.txt is in UTF-16, not in UTF-8. Write it again: iconv -f UTF-16 -t UTF-8."),
        ("hello".encode("utf-16-le"), "b.txt is in UTF-16LE"),
        ("hé".encode("latin-1"), "b.txt: byte 1 is 0xe9, which is not UTF-8. Write it again as UTF-8, from Latin-1"),
        (b"abc\0def", "b.txt has a zero as byte 3, so it is no text"),
    ):
        (folder / "b.txt").write_bytes(data)
        with pytest.raises(PreflightError) as error:
            len(text(folder))
        assert sentence in str(error.value)
