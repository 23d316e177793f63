"""Whether bytes are text in UTF-8, and if not, what they seem to be and what to do."""

import codecs

from dtrain.files.packed import PACKED

PART = 1 << 22
"""Bytes that are decoded at once."""
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
"""How a file begins that names its encoding; the longer marks first."""
BINARY = {
    b"\x89PNG": "an image", b"\xff\xd8\xff": "an image", b"GIF8": "an image", b"%PDF": "a PDF",
    b"PAR1": "a Parquet file", b"\x7fELF": "a program", b"SQLite format": "a database", b"ARROW1": "an Arrow file",
    b"\x00\x00\x00\x01Bud1": "what the Finder of macOS notes about a folder",
}  # fmt: skip


def problem(data: bytes) -> str:
    """The rest of a sentence about `data` that is no text in UTF-8, and about what to do; empty if it is."""
    for magic, kind in PACKED.items():
        if data.startswith(magic):
            return f"is packed with {kind}: that is no text. Unpack it."
    for magic, what in BINARY.items():
        if data.startswith(magic):
            return f"is {what}, no text. Leave it out: name the files of text, such as data.path=texts/*.txt."
    if encoding := encoding_of(data):
        return encoding
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    view = memoryview(data)
    try:
        for at in range(0, len(data), PART):
            decoder.decode(view[at : at + PART], at + PART >= len(data))
    except UnicodeDecodeError:
        return not_utf8(data)
    if (nul := data.find(0)) >= 0:
        return f"has a zero as byte {nul}, so it is no text in UTF-8. Leave it out, or write it again as UTF-8."
    return ""


def encoding_of(data: bytes) -> str:
    """The rest of a sentence about bytes of a Unicode encoding other than UTF-8, by their mark or by the zeros between
    letters of the alphabet; empty if they are of none.
    """
    for mark, name in MARKS.items():
        if data.startswith(mark):
            return f"is in {name}, not in UTF-8. Write it again: iconv -f {name} -t UTF-8."
    start = data[:64]
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        if len(start) >= 4 and not any(start[first::2]) and all(start[1 - first :: 2]):
            return f"is in {name}, not in UTF-8. Write it again: iconv -f {name} -t UTF-8."
    return ""


def not_utf8(data: bytes) -> str:
    """The rest of a sentence about bytes that are no UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return (
            f": byte {error.start} is {data[error.start]:#04x}, which is not UTF-8. Write it again as UTF-8, from "
            "Latin-1 (ISO 8859-1) or Windows-1252 with iconv -f WINDOWS-1252 -t UTF-8."
        )
    return ""
