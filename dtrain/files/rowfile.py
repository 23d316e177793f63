"""Files of rows of any format, by its name: how they are opened, and what is known of them before a run."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.errors import PreflightError, WordsError
from dtrain.files import arrowfile, linefile, lineforms, parquetfile, rowindex, rowlengths
from dtrain.files.linekinds import mend_of
from dtrain.files.rowindex import File
from dtrain.files.wordfile import Encoder, WordFile
from dtrain.storage import caching, store

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet", ".pq"),
    "hf": (".arrow",),
}
CACHED = 1 << 26
"""Bytes of the row groups that are kept: two of the windows in which they are shuffled."""
EARLY = 1 << 26
"""Bytes of local files whose rows are all read before the launch."""
STREAMS = 16
"""Files that are opened at once."""
MASKS = ("attention_mask", "decoder_attention_mask")
"""Inputs that the padder makes where files lack them."""
LISTED = 8
"""Columns that a sentence lists."""
PRINT = re.compile(r"rows-(\d+)-\w{32}")
PLURAL = {"whole": "whole numbers", "fraction": "numbers", "object": "objects"}


@dataclass(frozen=True)
class Reader:
    """Opens files of one format. `cache`: the folder of their indices; `separator`, a name: of csv; `text`: the column
    that is read is one of text; `split`: of a dataset of Hugging Face; `raw`: columns are read as they are, of any
    kind; `texts`: columns of text whatever is in them, which `encoder` makes tokens of, if it is given.
    """

    format: str
    cache: Path
    separator: str = "comma"
    text: bool = False
    split: str | None = None
    raw: bool = False
    texts: Sequence[str] = ()
    encoder: Encoder | None = None

    def found(self, path: str | Sequence[str]) -> list[str]:
        """The files of `data.path`. Raises StoreError."""
        return self.matched(path)[0]

    def matched(self, path: str | Sequence[str]) -> tuple[list[str], list[str]]:
        """The files of `data.path`, and a sentence about those that it matches and that are not read. Raises
        StoreError.
        """
        if self.format == "hf" and not self.text:
            folders = [path] if isinstance(path, str) else path
            return [file for each in folders for file in arrowfile.shards(each, self.split)], []
        return rowindex.matched(path, SUFFIXES[self.format])

    def names(self, url: str) -> list[str]:
        """The columns of a file. Raises PreflightError."""
        if self.format == "hf":
            return arrowfile.names(url, self.cache)
        if self.format == "parquet":
            return parquetfile.names(url)
        return linefile.names(url, self._form)

    def check(self, url: str, columns: Sequence[str], alone: str = "") -> None:
        """Look at the ends of a file. Raises PreflightError, and WordsError for a column that it lacks, or that only it
        has: see `alone`.
        """
        if self.format in ("hf", "parquet"):
            for name in columns:
                rowindex.column(name, self.names(url), f"data.path={url}")
        else:
            linefile.check(url, self._form, columns)
        if alone:
            _check_alone(url, self.names(url), columns, alone)

    def opened(self, urls: Sequence[str], columns: Sequence[str], alone: str = "") -> list[File]:
        """The files, whose indices are made where they are missing. `alone`: what to type if a row has further columns;
        empty: these are not read. Raises PreflightError, and WordsError for a column that only some files have.
        """
        groups = parquetfile.Groups(CACHED)

        def one(url: str) -> File:
            if self.format == "hf":
                return arrowfile.ArrowFile(url, columns, self.cache, self.raw)
            if self.format == "parquet":
                return parquetfile.ParquetFile(url, columns, self.cache, groups, self.raw)
            return linefile.LineFile(
                url=url, form=self._form, columns=columns, cache=self.cache, raw=self.raw, alone=alone
            )

        with ThreadPoolExecutor(STREAMS) as pool:
            files = list(pool.map(one, urls))
        for file in files if alone else ():
            _check_alone(file.url, file.facts["names"], columns, alone)
        if self.encoder is None:
            return files
        (column,) = self.texts
        return [WordFile(file, column, self.encoder) for file in files]

    @property
    def _form(self) -> lineforms.Format:
        if self.format == "jsonl":
            return lineforms.JsonLines()
        separator = lineforms.SEPARATORS[self.separator]
        return lineforms.Separated(separator, numbers=not self.text, texts=self.texts)


def reader_of(
    data: Mapping[str, Any], path: str | Sequence[str], format: str | None, encoder: Encoder | None = None
) -> Reader:
    """The reader that a part of data uses; `format` None: by the names of its files; `encoder`: of its column of text.
    Raises PreflightError.
    """
    cache = caching.folder(data.get("cache"))
    if format:
        texts = [data["inputs"]] if data.get("tokenizer") else []
        separator, split = data.get("separator", "comma"), data.get("split")
        return Reader(format, cache, separator, split=split, texts=texts, encoder=encoder)
    (url, *_) = rowindex.found(path, [suffix for each in SUFFIXES.values() for suffix in each])
    for name, suffixes in SUFFIXES.items():
        if url.lower().endswith(suffixes):
            return Reader(name, cache, "tab" if url.lower().endswith(".tsv") else "comma", text=True)
    known = ", ".join(suffix for each in SUFFIXES.values() for suffix in each)
    raise PreflightError(f"data.path={url}: data.column is a column of files whose names end in {known}.")


def columns_of(reader: Reader, url: str, data: Mapping[str, Any]) -> list[str]:
    """The columns that a part of data reads, by those of its first file: inputs, then the target."""
    if data.get("column"):
        return [data["column"]]
    inputs, target = data["inputs"], data["targets"]
    if inputs is None:
        inputs = [name for name in reader.names(url) if name != target]
    if not inputs:
        raise WordsError(f"data.path={url}: there is no input column beside {target}. Type data.inputs=<a column>.")
    named = [inputs] if isinstance(inputs, str) else inputs
    if data.get("pad") is not None and {*MASKS} & {*named}:
        there = reader.names(url)
        named = [name for name in named if name not in MASKS or name in there]
    return [*dict.fromkeys([*named, *([] if target is None else [target])])]


def alone(columns: Sequence[str], data: Mapping[str, Any]) -> str:
    """The words to type about a column that only some rows have; empty if inputs are named, and others not read."""
    if data.get("column") or data["inputs"] is not None:
        return ""
    inputs = [name for name in columns if name != data["targets"]]
    listed = ",".join(inputs) if len(inputs) <= LISTED else "<the columns>"
    return f"Type 'data.inputs=[{listed}]' to leave it out, or give it to all rows"


def _check_alone(url: str, names: Sequence[str], columns: Sequence[str], alone: str) -> None:
    """Raises WordsError for a column of a file that the first one lacks."""
    if more := [name for name in names if name not in columns]:
        raise WordsError(f"data.path={url} has a column {more[0]}, which the first file lacks. {alone}.")


def fingerprint(files: Sequence[File], rows: int) -> str:
    """That of the first rows of files: the same as when there were no others."""
    return f"rows-{rows}-{digest_of(files, rows, '')}"


def digest_of(files: Sequence[File], rows: int, how: str) -> str:
    """A digest of the first rows of files, and of how they are used."""
    digest, left = hashlib.sha256(how.encode()), rows
    for file in files:
        size = sum(file.facts["sizes"])
        if left > 0 and size:
            digest.update(file.digest(min(left, size)).encode())
        left -= size
    return digest.hexdigest()[:32]


def changed(path: Any, what: str, rows: int) -> str:
    """A sentence about the first rows of files, which are others than those that a run was trained on."""
    return (
        f"data.path={path}: {what} changed since this run began, other than by rows that were added: it was trained on "
        f"other {rows} first rows, and its checkpoints count them. Put them back, or type out=<another place>, or "
        "init=<this run> to take its weights alone."
    )


def problem(reader: Reader, urls: Sequence[str], data: Mapping[str, Any], *, trained: str | None) -> str:
    """The problem with files of rows, as far as their ends tell, or all rows where they are few; empty if there is
    none. `trained`: the fingerprint of those that a run has a position in.
    """
    try:
        columns = columns_of(reader, urls[0], data)
        only = alone(columns, data)
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda url: reader.check(url, columns, only), urls))
        if reader.format == "parquet" or (all(map(store.is_local, urls)) and sum(map(store.size, urls)) < EARLY):
            files = reader.opened(urls, columns, only)
            kinds([file.facts for file in files], columns, text=reader.text, target=data.get("targets"))
            if not any(sum(file.facts["sizes"]) for file in files):
                return f"data.path={urls[0]}: there is no row in {len(files)} file(s)."
            if (then := PRINT.match(trained or "")) and fingerprint(files, int(then[1])) != then[0]:
                return changed(data["path"], "the files", int(then[1]))
            if data.get("packing") == "pack" and not reader.text:
                check_packing(files, columns, reader.cache, data["sequence"], shift=bool(data.get("shift")))
            if data.get("pad") is not None and data.get("packing") != "pack" and _are_few(files):
                check_some(files, [name for name in columns if name != data["targets"]] or columns, reader.cache)
            if data.get("bucket") is not None:
                check_bucket(files, [name for name in columns if name != data["targets"]] or columns, reader.cache)
    except (PreflightError, WordsError) as error:
        return str(error)
    return ""


def kinds(
    facts: Sequence[Mapping[str, Any]], columns: Sequence[str], *, text: bool, target: str | None = None
) -> dict[str, str]:
    """The kind of each column by the facts of all files. Raises WordsError unless they are text, or else numbers; the
    `target` may be words, which are classes.
    """
    every = {name: {each["kinds"].get(name) for each in facts} - {None} for name in columns}
    words = {name for name, several in every.items() if name == target and several == {"text"}}
    for name in every.keys() - words if not text else ():
        _check_numeral(name, (each.get("texts", {}).get(name, "") for each in facts))
    return {name: "text" if name in words else _kind(name, several, text) for name, several in every.items()}


def check_tokens(files: Sequence[File], columns: Sequence[str]) -> None:
    """Raises WordsError unless the columns, of the input and of the target, are lists of whole numbers."""
    if len(columns) > 2:
        raise WordsError(
            f"data.packing=pack: a packed row has one input and one target, not {', '.join(columns)}. Type "
            "data.inputs=<the column of tokens>; no attention_mask is needed."
        )
    for name, kind in kinds([file.facts for file in files], columns, text=False).items():
        if kind != "list of whole":
            raise WordsError(
                f"data.packing=pack: column {name} holds {_plural(kind)}. Name one of tokens, lists of whole numbers."
            )


def lists_of(files: Sequence[File], columns: Sequence[str]) -> str:
    """The first of the columns, inputs and then the target, that has lists. Raises WordsError if none has."""
    known = kinds([file.facts for file in files], columns, text=False)
    name = next((name for name in columns if known[name].startswith("list of ")), None)
    if name is None:
        raise WordsError(
            f"data.bucket: {', '.join(columns)} hold no lists, so all rows have one length. Leave data.bucket out."
        )
    return name


def check_bucket(files: Sequence[File], columns: Sequence[str], cache: Path) -> None:
    """Raises WordsError if rows of these files have one length, as far as that is known before the launch."""
    name = lists_of(files, columns)
    if _are_few(files):
        lengths = np.concatenate([rowlengths.of(file, name, cache) for file in files])
        if (lengths == lengths[0]).all():
            raise WordsError(f"data.bucket: all rows of {name} have the length {lengths[0]}. Leave data.bucket out.")


def check_some(files: Sequence[File], columns: Sequence[str], cache: Path) -> None:
    """Raises PreflightError for rows whose first lists, which are to be padded, are empty. `columns`: the inputs."""
    known = kinds([file.facts for file in files], columns, text=False)
    name = next((name for name in columns if known[name].startswith("list of ")), None)
    if name is None:
        return
    lengths = [rowlengths.of(file, name, cache) for file in files]
    empty = sum(int((each == 0).sum()) for each in lengths)
    for file, each in zip(files, lengths, strict=True):
        if (each == 0).any():
            where, rows = file.where(int((each == 0).argmax())), sum(map(len, lengths))
            raise PreflightError(
                f"data.path={file.url} has {empty} of {rows} rows without an entry in {name} (the first: {where}), "
                "which would be padding alone. Leave them out."
            )


def check_packing(files: Sequence[File], columns: Sequence[str], cache: Path, window: int, *, shift: bool) -> None:
    """Raises WordsError and PreflightError if rows of these files cannot be packed into windows."""
    check_tokens(files, columns)
    if _are_few(files):
        lengths = np.concatenate([rowlengths.of(file, columns[0], cache) for file in files])
        rowlengths.check(lengths, window)
        if shift:
            rowlengths.check_shift(lengths)


def _are_few(files: Sequence[File]) -> bool:
    """Whether all rows are read before the launch."""
    return all(store.is_local(file.url) for file in files) and sum(store.size(file.url) for file in files) < EARLY


def _check_numeral(name: str, texts: Iterable[str]) -> None:
    """Raises WordsError for a column of text that stands for numbers."""
    for text in texts:
        if mend := mend_of(text):
            raise WordsError(f"data: column {name} holds text, such as {text!r}.{mend}")


def _kind(name: str, several: set[str], text: bool) -> str:
    for kind in several:
        if text and kind != "text":
            raise WordsError(f"data.column={name}: the column holds {_plural(kind)}. Name one of text.")
        if not text and kind == "text":
            raise WordsError(
                f"data: column {name} holds text. For a class or number of each row type data.inputs={name} "
                "data.tokenizer=<the folder of a tokenizer>; to train on all of its tokens type data=text "
                f"data.path=<the files> data.column={name}."
            )
        if not text and "binary" in kind:
            raise WordsError(
                f"data: column {name} holds images, or other bytes. To train on images type data=images "
                f"data.path=<the same> data.image={name} data.label=<the column of classes>."
            )
        if not text and kind.split(" ")[-1] not in ("whole", "fraction"):
            raise WordsError(f"data: column {name} holds {_plural(kind)}. Numbers and lists of numbers can be read.")
    if len({kind.replace("fraction", "whole") for kind in several}) > 1:
        raise WordsError(f"data: column {name} holds {' and '.join(map(_plural, sorted(several)))} in different files.")
    return max(several, key=lambda kind: "fraction" in kind, default="text" if text else "whole")


def _plural(kind: str) -> str:
    *lists, last = kind.split("list of ")
    return "lists of " * len(lists) + PLURAL.get(last, f"values of the type {last}")
