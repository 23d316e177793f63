"""`dtrain tokenize <path or URL> ... to=<URL>`: text to token shards, on all cores; for data=tokens data.path=<to>.

    dtrain tokenize 'texts/*.txt' to=tokens                                  bytes are tokens
    dtrain tokenize 'texts/*.txt' to=s3://bucket/tokens tokenizer=tokenizer.json
    dtrain tokenize 'rows/*.parquet' to=tokens column=text                   each row is a document: of .jsonl, .csv
                                                                             and .tsv files too, and .arrow of datasets
    dtrain tokenize texts to=tokens shard=500MB workers=4 cache=/tmp/rows    size of shards; processes; indices of rows

Killed at any moment, the same words go on with the next shard. Neither the tokens nor their digest depend on workers.
The manifest, tokens.json, is written last: shards, sizes, digests, the tokenizer, and where documents end.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dtrain import secrets
from dtrain.compose import connect, value_of
from dtrain.config.constraints import BYTES
from dtrain.errors import PreflightError, StoreError, WordsError, nearest
from dtrain.predict.report import size
from dtrain.secrets import screen
from dtrain.storage import lease, store

TAKES = ("to", "tokenizer", "column", "shard", "workers", "cache")
SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT]i?B|B)?")
SHARD = "100MB"


def run(words: Sequence[str]) -> int:
    paths, options = _read(words)
    to = options["to"].rstrip("/")
    connect([word for word in words if word.startswith("out_options")], to)
    from dtrain.files import rowindex
    from dtrain.storage import caching

    for path in paths:
        if path != "stdlib" and store.is_local(path):
            rowindex.found(path)  # a slip of the pen is refused before torch is loaded
    from dtrain.data.documents import documents_of
    from dtrain.data.text import cores, separated
    from dtrain.tokenizer import kind_of, load, shards
    from dtrain.tokenizer.pool import encode

    tokenizer = load(options.get("tokenizer", "bytes"), "tokenizer")
    place = paths[0] if len(paths) == 1 else paths
    documents = documents_of(place, options.get("column"), caching.folder(options.get("cache")))
    for sentence in documents.unread:
        screen.complain(sentence, begin="note: ")
    bytes_ = round(_bytes(options.get("shard", SHARD)) or 0)
    identity = hashlib.sha256(json.dumps([shards.VERSION, tokenizer.name, documents.states, bytes_]).encode())
    about = {
        "tokenizer": tokenizer.name, "vocab": tokenizer.vocab, "dtype": kind_of(tokenizer.vocab).__name__,
        "path": secrets.masked(" ".join(paths)),
    }  # fmt: skip
    with _told_of(to), lease.hold(to, "to"):
        writer = shards.Writer(to, identity=identity.hexdigest(), size=bytes_, about=about)
        first, began = writer.documents, time.monotonic()
        if first:
            _say(f"{len(writer.shards)} shard(s) with {first} of {documents.count} documents are there")
        groups = encode(
            separated(documents.read(first), tokenizer, first), tokenizer,
            processes=int(options.get("workers", cores())),
        )  # fmt: skip
        manifest = writer.write(groups, tell=lambda shard: _progress(shard, time.monotonic() - began))
        if not manifest.facts["tokens"]:
            store.remove(store.join(to, shards.MANIFEST))
            raise PreflightError(f"{' '.join(paths)}: there is no text in {documents.count} {documents.kind}(s).")
    facts = manifest.facts
    bytes_ = facts["tokens"] * kind_of(facts["vocab"])().itemsize
    _say(
        f"{facts['tokens']} tokens of {facts['documents']} documents, {size(bytes_)}, shards: {len(manifest.shards)}",
        f"digest {manifest.digest}",
        f"next  dtrain data=tokens data.path={screen.typed(to)} data.vocab={facts['vocab']}",
    )
    return 0


def _read(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The paths, and option -> value. Raises WordsError with all mistakes."""
    paths = [word for word in words if "=" not in word.partition("://")[0] and not word.startswith("-")]
    names = list(dict.fromkeys(word.split("=")[0] for word in words if word not in paths))
    problems = [
        f"{name}: tokenize does not take it.{nearest(name.lstrip('-'), TAKES)}"
        for name in names
        if name not in TAKES and name.split(".")[0] != "out_options"
    ]
    options = {name: value for name in TAKES if (value := value_of(_assigned(words, paths), name)) is not None}
    problems += [f"{name}=: it is empty. Leave it out, or give a value." for name in options if not options[name]]
    to = options.get("to", "").rstrip("/")
    if not paths or not to:
        problems.append("tokenize needs text and a place. Type dtrain tokenize <path or URL> to=<folder or URL>.")
    problems += [
        f"to={to}: it is a part of {path}, so the shards would be text. Type to=<another place>."
        for path in paths
        if to and f"{to}/".startswith(f"{path.rstrip('/')}/")
    ]
    if not _bytes(options.get("shard", SHARD)):
        problems.append(f"shard={options['shard']}: it is no size. Type shard={SHARD}.")
    if not re.fullmatch("[1-9][0-9]{0,3}", options.get("workers", "1")):
        problems.append(f"workers={options['workers']}: it is a number of processes >= 1. Type workers=4.")
    if problems:
        raise WordsError(*problems)
    return paths, options


@contextmanager
def _told_of(to: str) -> Iterator[None]:
    """A context whose errors of storage name the word of this verb."""
    try:
        yield
    except StoreError as error:
        if error.kind != "full":
            raise
        hint = "Free some and type it again"
        raise StoreError.during("write shards to", to, "no space is left there", hint) from error


def _assigned(words: Sequence[str], paths: Sequence[str]) -> list[str]:
    return [word for word in words if word not in paths]


def _bytes(text: str) -> float | None:
    """The size that a text such as 100MB says; None if it is none, or zero."""
    match = SIZE.fullmatch(text)
    return float(match[1]) * BYTES[match[2] or "B"] or None if match else None


def _progress(shard: Mapping[str, Any], seconds: float) -> None:
    _say(f"  {shard['name']}  {shard['documents']} documents  {shard['tokens']} tokens  after {seconds:.0f} s")


def _say(*lines: str) -> None:
    screen.say(*map(screen.on_one_line, lines))
