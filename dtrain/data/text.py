"""Text from any fsspec URL or glob, encoded once into a memory-mapped file of tokens.

    data=text data.path=texts/*.txt                       # each file is a document
    data=text data.path=rows/*.parquet data.column=body   # each row is, of jsonl, csv or Parquet files

The documents are ordered by a digest of their names, so the held-out end of the corpus is a representative sample.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dtrain import secrets
from dtrain.data.documents import documents_of
from dtrain.data.packing import Packed
from dtrain.data.wholedocs import Documents
from dtrain.data.windows import Corpus, Windows, split
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.storage import caching, store
from dtrain.tokenizer import SEPARATOR, Tokenizer, kind_of, load
from dtrain.tokenizer.pool import Document, encode


class Text(Corpus):
    """A Source of windows of text. `sequence` in tokens; `holdout`: a fraction of the corpus in [0, 1). Raises
    StoreError and PreflightError.
    """

    def __init__(
        self, *, path: str | Sequence[str], sequence: int, tokenizer: str, holdout: float, cache: str | None,
        column: str | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= holdout < 1:
            raise WordsError(f"data.holdout={holdout} must be a fraction of the text, >= 0 and < 1.")
        self._path, self._column, self.sequence, self._part = path, column, sequence, holdout
        self._tokenizer: Tokenizer = load(tokenizer, "data.tokenizer")
        self._vocab = self._tokenizer.vocab
        self.cache = caching.folder(cache)

    @cached_property
    def _encoded(self) -> "Encoded":
        return encoded(self._path, self._tokenizer, self.cache, self._column)

    @property
    def notes(self) -> list[str]:
        """A sentence about files that are not read."""
        return [*self._encoded.unread]

    @cached_property
    def _windows(self) -> Windows:
        tokens, _, digest, _ = self._encoded
        train, kept = split([tokens], self._part)
        return Windows(train, self.sequence, self._vocab, f"{digest}-{self.sequence}-{self._part}", kept)

    @cached_property
    def rows(self) -> Documents:
        """Its documents; what separates them is at the begin of the next one."""
        tokens, ends, digest, _ = self._encoded
        return Documents([(tokens, ends)], (), self._part, self._vocab, f"documents-{digest}-{self._part}")

    @property
    def specials(self) -> Mapping[str, int]:
        """The special tokens of the tokenizer, by name."""
        return self._tokenizer.specials

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text.encode()))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


@final
class PackedText(Packed):
    """A Source of windows of whole documents."""

    def __init__(self, text: Text) -> None:
        super().__init__(text.rows, window=text.sequence, pad=None, cache=text.cache)
        self._text, self.sequence = text, text.sequence

    @property
    def notes(self) -> list[str]:
        return [*self._text.notes, *super().notes]

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._text.decode(tokens)


def build(
    *, path: str | Sequence[str], sequence: int, tokenizer: str, holdout: float, cache: str | None,
    column: str | None = None, packing: str = "none",
) -> Text | PackedText:  # fmt: skip
    """A Source of text: windows of all of it, or of whole documents if they are packed."""
    text = Text(path=path, sequence=sequence, tokenizer=tokenizer, holdout=holdout, cache=cache, column=column)
    return PackedText(text) if packing == "pack" else text


class Encoded(NamedTuple):
    """`ends`: of each document. `digest`: SHA-256 of the tokens. `unread`: a sentence about files that are left out."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    digest: str
    unread: Sequence[str]


def encoded(path: str | Sequence[str], tokenizer: Tokenizer, cache: Path, column: str | None = None) -> Encoded:
    """All documents at `path`, or in a `column` of its rows; encoded by the first process, read by the others. Raises
    StoreError, and PreflightError if there is no text.
    """
    documents = documents_of(path, column, cache)
    identity = json.dumps([tokenizer.name, documents.states])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    kind = kind_of(tokenizer.vocab)
    tokens, ends, facts = cache / f"{key}.bin", cache / f"{key}.ends", cache / f"{key}.json"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{key}.lock").open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (facts.exists() and ends.exists()):
                digest, count = _encode(documents.read(0), tokenizer, tokens, ends)
                about = {"path": secrets.masked(str(path)), "documents": count, "sha256": digest}
                store.write(str(facts), json.dumps(about).encode())
            known = json.loads(facts.read_text("utf-8"))
            if tokens.stat().st_size == 0:
                raise PreflightError(f"data.path={path}: there is no text in {known['documents']} {documents.kind}(s).")
        made = np.memmap(tokens, kind, "r"), np.memmap(ends, np.int64, "r")
        return Encoded(*made, str(known["sha256"]), documents.unread)
    except OSError as error:
        raise StoreError.during("keep the encoded text in", str(cache), error.strerror or error) from error


def _encode(documents: Iterable[Document], tokenizer: Tokenizer, target: Path, ends: Path) -> tuple[str, int]:
    """The SHA-256 of the tokens that are written to `target`, and the number of documents."""
    digest, part = hashlib.sha256(), target.with_suffix(f".{os.getpid()}")
    lengths = list[NDArray[np.int64]]()
    with part.open("wb") as file:
        for group in encode(separated(documents, tokenizer, 0), tokenizer, processes=cores()):
            lengths.append(group.lengths)
            digest.update(group.tokens.data)
            file.write(group.tokens.data)
    every = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    store.write(str(ends), np.cumsum(every).tobytes())
    part.replace(target)
    return digest.hexdigest(), len(every)


def separated(documents: Iterable[Document], tokenizer: Tokenizer, first: int) -> Iterable[Document]:
    """The documents from `first` on, with what the byte tokenizer puts between them."""
    for number, document in enumerate(documents, first):
        parts = tokenizer.name == "bytes" and number > 0
        yield Document(document.name, SEPARATOR + document.text) if parts else document


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
