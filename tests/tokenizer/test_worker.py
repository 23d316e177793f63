"""Texts cross a pipe as one message."""

from dtrain.tokenizer.worker import pack, unpack


def test_what_is_packed_is_unpacked() -> None:
    sizes, rest = unpack(pack([b"ab", b"", b"cde"]))
    assert sizes.tolist() == [2, 0, 3] and bytes(rest) == b"abcde"
    sizes, rest = unpack(pack([]))
    assert sizes.tolist() == [] and bytes(rest) == b""
