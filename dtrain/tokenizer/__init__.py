"""Text to tokens: bytes, or the vocabulary of a tokenizer.json. Holds no torch: the processes that encode are small."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError, StoreError, first_line
from dtrain.storage import store

SEPARATOR = b"\0"
"""The token between documents of the byte tokenizer."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
"""The text of a token that is no byte."""
LARGEST = 1 << 28
"""Largest size of a tokenizer.json, in bytes; one with a vocabulary of 256,000 has 33 MB."""
SLOWEST = 1 << 16
"""Slowest download that is not given up, in bytes per second: 33 MB may take nine minutes."""
SERIAL = "TOKENIZERS_PARALLELISM"
"""The variable by which the tokenizers package starts threads, or none."""


class NotText(ValueError):
    """Document `number` of those that were to be encoded is not UTF-8 from byte `offset` on."""

    def __init__(self, number: int, offset: int, byte: int) -> None:
        super().__init__(f"byte {offset} is {byte:#04x}, which is not UTF-8")
        self.number, self.offset, self.byte = number, offset, byte


class Tokenizer(Protocol):
    vocab: int
    name: str

    @property
    def specials(self) -> Mapping[str, int]:
        """Its special tokens, by name."""
        ...

    def encode(self, text: bytes) -> list[int] | bytes: ...

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """The tokens of each text. Raises NotText."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Tokens are bytes; 0 separates documents. Other tokens, which a model of more may give, are no text."""

    vocab, name = 256, "bytes"
    specials: Mapping[str, int] = {}

    def encode(self, text: bytes) -> bytes:
        return text

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        known = b"".join(bytes([token]) if token < self.vocab else UNKNOWN for token in tokens)
        return known.replace(SEPARATOR, b"\n").decode(errors="replace")


class Vocabulary:
    """The bytes `written` of a tokenizer.json, for the `tokenizers` package. Raises PreflightError if they are
    malformed; `place` names them.
    """

    def __init__(self, written: bytes, place: str) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise PreflightError(f"{place} needs the tokenizers package. Type: pip install 'dtrain[text]'") from None
        try:
            self._inner = Loaded.from_buffer(written)
        except Exception as error:  # the package raises bare Exception
            raise PreflightError(f"{place}: not a tokenizer.json: {error}") from None
        self._inner.no_truncation()  # a document is as long as it is
        self._inner.no_padding()
        self.written = written
        self.vocab = 1 + max(self._inner.get_vocab().values(), default=-1)  # ids may have gaps
        self.name = hashlib.sha256(written).hexdigest()

    @property
    def specials(self) -> dict[str, int]:
        tokens = self._inner.get_added_tokens_decoder()
        return {token.content: number for number, token in tokens.items() if token.special}

    def encode(self, text: bytes) -> list[int]:
        return list(self._inner.encode(text.decode(errors="replace")).ids)

    def encode_all(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        kind = kind_of(self.vocab)
        with _serially():
            try:
                encoded = self._inner.encode_batch_fast([_text(number, text) for number, text in enumerate(texts)])
            except NotText:
                raise
            except Exception as error:  # as above
                raise PreflightError(f"the tokenizer cannot encode a text: {first_line(error)}") from None
        return [np.array(each.ids, dtype=kind) for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode(list(tokens)))


def load(url: str, key: str) -> Bytes | Vocabulary:
    """The tokenizer that `key` names: bytes, or the URL of a tokenizer.json. Raises PreflightError."""
    if url == "bytes":
        return Bytes()
    try:
        written = store.small(url, LARGEST, pace=SLOWEST)
    except StoreError as error:
        raise PreflightError(
            f"{key}={url}: {error}. Give bytes, or the path or URL of a tokenizer.json, such as "
            "hf://<organisation>/<name>/tokenizer.json."
        ) from error
    return Vocabulary(written, f"{key}={url}")


def kind_of(vocab: int) -> Any:
    """The smallest type that holds every token."""
    return next(kind for kind in (np.uint8, np.uint16, np.uint32) if vocab <= np.iinfo(kind).max + 1)


def _text(number: int, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise NotText(number, error.start, text[error.start]) from None


@contextmanager
def _serially() -> Iterator[None]:
    """Without threads of the package, which a fork of this process would lack; unless the user asked for them."""
    before = os.environ.get(SERIAL)
    os.environ.setdefault(SERIAL, "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SERIAL, None)
