"""Token shards at a URL, and the manifest that is written last:

    <to>/tokens-00000.bin      little-endian unsigned integers, whole documents
    <to>/tokens-00000.ends     int64: where in the shard each of its documents ends
    <to>/tokens-00000.json     both digests; written when both are there
    <to>/tokens.json           the manifest: all of these, the tokenizer, and the digest of all tokens

A shard depends on the documents, their order and the size of shards alone, so one that is there is not made again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.config.structure import COUNT, TEXT, Each, Kind, fault
from dtrain.errors import PreflightError, WordsError
from dtrain.storage import store
from dtrain.tokenizer.pool import Encoded

VERSION = 1
MANIFEST, BEGUN = "tokens.json", "begun.json"
LARGEST = 1 << 30
"""Largest size of a manifest in bytes."""
BLOCK = 4 << 20
"""Bytes of a shard that have a digest of their own, and are read at once from other storage."""
NO_ENDS = (
    "data.packing=pack needs to know where documents end, and these files do not say it. Type data.path=<what dtrain "
    "tokenize wrote>, or data.packing=none."
)
DTYPES = ("uint8", "uint16", "uint32")
SHARD = {
    "name": TEXT, "tokens": COUNT, "documents": COUNT, "sha256": TEXT, "ends": TEXT, "blocks": Each(TEXT),
}  # fmt: skip
SHAPE = {
    "version": COUNT, "identity": TEXT, "tokenizer": TEXT, "vocab": COUNT, "dtype": Kind("a type", DTYPES.__contains__),
    "tokens": COUNT, "documents": COUNT, "block": COUNT, "digest": TEXT, "path": TEXT, "shards": Each(SHARD),
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The facts of all shards in `folder`."""

    folder: str
    facts: Mapping[str, Any]

    @property
    def shards(self) -> Sequence[Mapping[str, Any]]:
        return list(self.facts["shards"])

    @property
    def digest(self) -> str:
        return str(self.facts["digest"])

    def url(self, shard: Mapping[str, Any]) -> str:
        return store.join(self.folder, shard["name"])

    def problem(self) -> str:
        """The first shard that is not as the manifest says, as far as sizes tell; empty if there is none."""
        there = store.sizes(self.folder)
        for shard in self.shards:
            wanted = shard["tokens"] * np.dtype(self.facts["dtype"]).itemsize
            if there.get(shard["name"]) != wanted:
                has = f"has {there[shard['name']]} bytes" if shard["name"] in there else "is not there"
                return f"{shard['name']} {has}, and {MANIFEST} says {wanted}. Copy it again, or tokenize again."
        return ""


def is_manifest(url: str) -> bool:
    """Whether it is the URL of a manifest, or of a folder with one. Raises StoreError."""
    return url.rstrip("/").rsplit("/", 1)[-1] == MANIFEST or store.exists(store.join(url, MANIFEST))


def read(url: str) -> Manifest:
    """The manifest at a URL, or in the folder there. Raises StoreError, and PreflightError if it is damaged."""
    place = url.rstrip("/")
    folder = place.removesuffix(MANIFEST).rstrip("/") if place.rsplit("/", 1)[-1] == MANIFEST else place
    facts = _parsed(store.small(store.join(folder, MANIFEST), LARGEST, pace=1 << 20))
    if problem := fault(facts, SHAPE):
        raise PreflightError(f"{store.join(folder, MANIFEST)}: this is no manifest of token shards: {problem}")
    assert isinstance(facts, dict)
    if facts["version"] != VERSION or _digest(facts) != facts["digest"]:
        raise PreflightError(f"{store.join(folder, MANIFEST)} is damaged, or of another version. Tokenize again.")
    return Manifest(folder, facts)


class Writer:
    """Writes shards of at least `size` bytes below `to`. `identity`: a digest of all that the tokens depend on;
    `about`: `tokenizer`, `vocab`, `dtype` and `path` of the manifest. Raises WordsError if other tokens are there.
    """

    def __init__(self, to: str, *, identity: str, size: int, about: Mapping[str, Any]) -> None:
        self._to, self._size, self._about = to, size, {**about, "identity": identity, "block": BLOCK}
        self._claim(identity)
        self.shards = self._written(identity)
        """Those that are there, in order."""

    @property
    def documents(self) -> int:
        """Those of the shards that are there."""
        return sum(int(shard["documents"]) for shard in self.shards)

    def write(self, groups: Iterator[Encoded], *, tell: Callable[[Mapping[str, Any]], None]) -> Manifest:
        """Write the documents after those that are there, and the manifest; `tell` is called with each new shard.
        Raises StoreError.
        """
        with ThreadPoolExecutor(1, "dtrain-shards") as thread:
            writing: Future[Mapping[str, Any]] | None = None
            for shard in self._cut(groups):
                if writing:
                    self._add(writing.result(), tell)
                writing = thread.submit(self._put, len(self.shards), shard)
            if writing:
                self._add(writing.result(), tell)
        return self._finished()

    def _cut(self, groups: Iterator[Encoded]) -> Iterator[list[Encoded]]:
        shard, size = list[Encoded](), 0
        for group in groups:
            shard.append(group)
            size += group.tokens.nbytes
            if size >= self._size:
                yield shard
                shard, size = [], 0
        if shard:
            yield shard

    def _put(self, number: int, groups: Sequence[Encoded]) -> Mapping[str, Any]:
        """Write a shard; its facts."""
        name = f"tokens-{number:05d}"
        tokens = np.concatenate([group.tokens for group in groups])
        lengths = np.concatenate([group.lengths for group in groups])
        data, ends = tokens.tobytes(), np.cumsum(lengths).tobytes()
        facts = {
            "name": f"{name}.bin", "tokens": len(tokens), "documents": len(lengths),
            "sha256": hashlib.sha256(data).hexdigest(), "ends": hashlib.sha256(ends).hexdigest(),
            "blocks": [block_digest(memoryview(data)[at : at + BLOCK]) for at in range(0, len(data), BLOCK)],
        }  # fmt: skip
        store.write(store.join(self._to, f"{name}.bin"), data)
        store.write(store.join(self._to, f"{name}.ends"), ends)
        written = {"identity": self._about["identity"], **facts}
        store.write(store.join(self._to, f"{name}.json"), json.dumps(written).encode())
        return facts

    def _add(self, shard: Mapping[str, Any], tell: Callable[[Mapping[str, Any]], None]) -> None:
        self.shards.append(shard)
        tell(shard)

    def _finished(self) -> Manifest:
        totals = {name: sum(int(shard[name]) for shard in self.shards) for name in ("tokens", "documents")}
        facts: dict[str, Any] = {"version": VERSION, **self._about, **totals, "shards": self.shards}
        facts["digest"] = _digest(facts)
        store.write(store.join(self._to, MANIFEST), json.dumps(facts, indent=1).encode())
        return Manifest(self._to, facts)

    def _claim(self, identity: str) -> None:
        url = store.join(self._to, BEGUN)
        there = store.small(url, LARGEST) if store.exists(url) else b""
        known = _parsed(there)
        if there and not (isinstance(known, dict) and known.get("identity") == identity):
            other = str(known.get("identity"))[:12] if isinstance(known, dict) else "unknown"
            raise WordsError(
                f"to={self._to} holds tokens of other text, another tokenizer or another size of shards (digest "
                f"{other}, here {identity[:12]}). Type to=<another place>."
            )
        if not there:
            store.write(url, json.dumps({"identity": identity}).encode())

    def _written(self, identity: str) -> list[Mapping[str, Any]]:
        """The facts of the first shards, up to the first one that is not whole."""
        sizes, shards = store.sizes(self._to), list[Mapping[str, Any]]()
        while (name := f"tokens-{len(shards):05d}.json") in sizes:
            facts = _parsed(store.read(store.join(self._to, name)))
            if fault(facts, {"identity": TEXT, **SHARD}) or not isinstance(facts, dict):
                break
            if facts["identity"] != identity:
                break
            shard = {key: facts[key] for key in SHARD}
            bytes_ = shard["tokens"] * np.dtype(self._about["dtype"]).itemsize
            ends = f"{name.removesuffix('.json')}.ends"
            if sizes.get(str(shard["name"])) != bytes_ or sizes.get(ends) != 8 * shard["documents"]:
                break
            shards.append(shard)
        return shards


def block_digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def ends_of(manifest: Manifest, shard: Mapping[str, Any]) -> NDArray[np.int64]:
    """Where the documents of a shard end. Raises PreflightError if they are not those of the manifest."""
    name = f"{str(shard['name']).removesuffix('.bin')}.ends"
    data = store.read(store.join(manifest.folder, name))
    if hashlib.sha256(data).hexdigest() != shard["ends"]:
        raise PreflightError(f"{store.join(manifest.folder, name)} is not the file that {MANIFEST} says.")
    return np.frombuffer(data, np.int64)


def _digest(facts: Mapping[str, Any]) -> str:
    """A digest of all tokens and of where documents end."""
    names = ("tokens", "documents", "sha256", "ends", "blocks")
    shards = [[shard[name] for name in names] for shard in facts["shards"]]
    whole = [VERSION, facts["tokenizer"], facts["vocab"], facts["dtype"], facts["block"], shards]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
