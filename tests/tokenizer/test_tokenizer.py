"""Text to tokens: the same as the tokenizers package, of whole documents."""

from pathlib import Path

import pytest
import tokenizers
from tokenizer.vocabulary import written

from dtrain.errors import PreflightError
from dtrain.tokenizer import Bytes, NotText, Vocabulary, kind_of, load


def test_tokens_are_those_of_the_library(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json")
    texts = ["a b c", "", "é tokenizers package " * 50]
    mine = load(path, "tokenizer")
    theirs = tokenizers.Tokenizer.from_file(path)
    encoded = mine.encode_all([text.encode() for text in texts])
    assert [each.tolist() for each in encoded] == [theirs.encode(text).ids for text in texts]
    assert {each.dtype.name for each in encoded} == {"uint16"}
    assert mine.decode(encoded[2].tolist()) == texts[2]


def test_a_document_is_neither_cut_nor_padded(tmp_path: Path) -> None:
    """Files of models often say how their inputs are cut."""
    plain = load(written(tmp_path / "a.json"), "tokenizer")
    cutting = load(written(tmp_path / "b.json", max_length=4), "tokenizer")
    text = b"the first call of a file is its first act"
    assert cutting.encode_all([text, b"a"])[1].tolist() == plain.encode_all([b"a"])[0].tolist()
    assert cutting.encode(text) == plain.encode(text) and len(plain.encode(text)) > 4


def test_bytes_that_are_no_text_are_told_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(NotText) as told:
        load(written(tmp_path / "t.json"), "tokenizer").encode_all([b"fine", b"caf\xe9 au lait"])
    assert (told.value.number, told.value.offset, told.value.byte) == (1, 3, 0xE9)
    assert [each.tolist() for each in Bytes().encode_all([b"\xff"])] == [[255]]


@pytest.mark.parametrize(("vocab", "kind"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_a_token_has_the_smallest_type(vocab: int, kind: str) -> None:
    assert kind_of(vocab).__name__ == kind


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(PreflightError, match=r"tokenizer=.*t\.json: not a tokenizer\.json"):
        load(str(tmp_path / "t.json"), "tokenizer")
    with pytest.raises(PreflightError, match=r"none\.json.*Give bytes, or the path"):
        load(str(tmp_path / "none.json"), "tokenizer")
    with pytest.raises(PreflightError, match="not a tokenizer"):
        Vocabulary(b"", "tokenizer")
