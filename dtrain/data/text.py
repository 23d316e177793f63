"""Text from any fsspec URL or glob, encoded once into a memory-mapped file of tokens.

    data=text data.path=texts/*.txt                       # each file is a document
    data=text data.path=rows/*.parquet data.column=body   # each row is, of jsonl, csv or Parquet files

The documents are ordered by a digest of their names, so the held-out end of the corpus is a representative sample.
"""

import fcntl
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtrain import secrets
from dtrain.data import rows
from dtrain.data.windows import Corpus, Windows, split
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.storage import rowindex, store
from dtrain.storage.rowfile import kinds, reader_of

SEPARATOR = b"\0"
"""The token between documents of the byte tokenizer."""
LARGEST_TOKENIZER = 1 << 28
"""Largest size of a tokenizer.json, in bytes; one with a vocabulary of 256,000 has 33 MB."""
SLOWEST = 1 << 16
"""Slowest download that is not given up, in bytes per second: 33 MB may take nine minutes."""


class Tokenizer(Protocol):
    vocab: int
    name: str

    def encode(self, text: bytes) -> list[int] | bytes: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Tokens are bytes; 0 separates documents."""

    vocab, name = 256, "bytes"

    def encode(self, text: bytes) -> bytes:
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).replace(SEPARATOR, b"\n").decode(errors="replace")


class Vocabulary:
    """A tokenizer.json of the `tokenizers` package, from any URL. Raises PreflightError if it cannot be read or is
    malformed.
    """

    def __init__(self, url: str) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise PreflightError(
                f"data.tokenizer={url} needs the tokenizers package. Type: pip install 'dtrain[text]'"
            ) from None
        try:
            written = store.small(url, LARGEST_TOKENIZER, pace=SLOWEST)
        except StoreError as error:
            raise PreflightError(
                f"data.tokenizer={url}: {error}. Give bytes, or the path or URL of a tokenizer.json."
            ) from error
        try:
            self._inner = Loaded.from_buffer(written)
        except Exception as error:  # the package raises bare Exception
            raise PreflightError(f"data.tokenizer={url}: not a tokenizer.json: {error}") from None
        self.vocab = int(self._inner.get_vocab_size())
        self.name = hashlib.sha256(written).hexdigest()

    def encode(self, text: bytes) -> list[int]:
        return list(self._inner.encode(text.decode(errors="replace")).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode(list(tokens)))


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
        self._path, self._column, self._sequence, self._part = path, column, sequence, holdout
        self._tokenizer: Tokenizer = Bytes() if tokenizer == "bytes" else Vocabulary(tokenizer)
        self._vocab = self._tokenizer.vocab
        self._cache = Path(cache).expanduser() if cache else cache_folder()

    @cached_property
    def _windows(self) -> Windows:
        tokens, digest = encoded(self._path, self._tokenizer, self._cache, self._column)
        train, kept = split([tokens], self._part)
        return Windows(train, self._sequence, self._vocab, f"{digest}-{self._sequence}-{self._part}", kept)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text.encode()))

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)


def encoded(
    path: str | Sequence[str], tokenizer: Tokenizer, cache: Path, column: str | None = None
) -> tuple[np.memmap[Any, Any], str]:
    """(tokens, their SHA-256) of all documents at `path`, or in a `column` of its rows; encoded by the first process,
    read by the others.
    """
    if column is None:
        named = _documents(path)
        documents: Iterable[bytes] = (store.read(url) for _, url, _ in named)
        states: list[Any] = [(name, state) for name, _, state in named]
    else:
        reader = reader_of({"cache": str(cache)}, path, None)
        files = reader.opened(reader.found(path), [column])
        kinds(files, [column], text=True)
        documents = (text.encode() for text in rows.documents(files, column))
        states = [column, [file.facts["sha256"] for file in files]]
    identity = json.dumps([tokenizer.name, states])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    kind = next(kind for kind in (np.uint8, np.uint16, np.uint32) if tokenizer.vocab <= np.iinfo(kind).max + 1)
    tokens, facts = cache / f"{key}.bin", cache / f"{key}.json"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not facts.exists():
                digest, count = _encode(documents, tokenizer, tokens, kind)
                about = {"path": secrets.masked(str(path)), "documents": count, "sha256": digest}
                store.write(str(facts), json.dumps(about).encode())
            known = json.loads(facts.read_text())
            if tokens.stat().st_size == 0:
                raise PreflightError(
                    f"data.path={path}: there is no text in {known['documents']} {'row' if column else 'file'}(s)."
                )
        return np.memmap(tokens, dtype=kind, mode="r"), str(known["sha256"])
    except OSError as error:
        raise StoreError.during("keep the encoded text in", str(cache), error.strerror or error) from error


def cache_folder() -> Path:
    return rowindex.folder(None)


def _encode(documents: Iterable[bytes], tokenizer: Tokenizer, target: Path, kind: Any) -> tuple[str, int]:
    """The SHA-256 of the tokens that are written to `target`, and the number of documents."""
    digest, part, count = hashlib.sha256(), target.with_suffix(f".{os.getpid()}"), 0
    with part.open("wb") as file:
        for number, text in enumerate(documents):
            count += 1
            if tokenizer.name == "bytes":
                data = (SEPARATOR if number else b"") + text
            else:
                data = np.asarray(tokenizer.encode(text), dtype=kind).tobytes()
            digest.update(data)
            file.write(data)
    part.replace(target)
    return digest.hexdigest(), count


def _documents(path: str | Sequence[str]) -> list[tuple[str, str, str]]:
    """(name below the common folder, URL, fingerprint of size and time), ordered by a digest of the name. Raises
    StoreError if a path matches nothing.
    """
    if path == "stdlib":
        root = sysconfig.get_paths()["stdlib"]
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        skip |= {"encodings", "pydoc_data"}  # tables
        urls = [str(file) for file in Path(root).rglob("*.py") if not skip & set(file.relative_to(root).parts)]
    else:
        urls = rowindex.found(path)
        root = os.path.commonpath(urls) if len(urls) > 1 else ""
    names = {url: url[len(root) :].lstrip("/") for url in urls}
    ordered = sorted(urls, key=lambda url: hashlib.sha256(names[url].encode()).digest())
    return [(names[url], url, store.fingerprint(url)) for url in ordered]
