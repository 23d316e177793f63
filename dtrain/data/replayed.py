"""A real stream as a Source: samples come one after another, and each data-parallel rank reads a part of its own.

    data=stream data.stream._target_=mypkg.make trust=[mypkg]      # make(shard, shards) returns an iterable
    data=stream data.stream._target_=mypkg.dataset trust=[mypkg]   # or an IterableDataset of Hugging Face's datasets
    data=stream data.path=rows/*.parquet                           # files, by datasets

A rank reads ahead in a thread, a batch at a time. Its position is the number of samples that it has given, and the
`state_dict()` of the stream there, if that has one; otherwise it reads again up to the position.
"""

import inspect
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from dtrain.data import Batch, Indices, Loading
from dtrain.data.collate import Sizes, batch_of, fixed_of, stack
from dtrain.data.dataset import Dataset
from dtrain.data.samples import Inputs, converted, names, pick
from dtrain.errors import PreflightError, WordsError, an, first_line
from dtrain.files import rowindex
from dtrain.files.rowfile import MASKS

AHEAD = 4
"""Batches of a rank that are read ahead."""
KNOWN = 8
"""Positions whose state is kept: training goes back by a few steps at most, or to a checkpoint."""
END_SECONDS = 1.0
"""How long the end of a run waits for a stream that gives nothing."""
SAMPLES = 1 << 62
"""As good as endless."""
READERS = {
    "parquet": (".parquet", ".pq"), "json": (".jsonl", ".ndjson", ".json"), "csv": (".csv", ".tsv"),
    "arrow": (".arrow",), "text": (".txt",),
}  # fmt: skip
"""Builder of datasets -> the ends of the names of its files."""
Make = Callable[[int, int], Any]
"""(shard, shards) -> an iterable"""


class Ended(Exception):
    """No whole batch is left for this rank."""


@dataclass(frozen=True)
class Chunk:
    """The samples of a step, and the state of the stream after them."""

    samples: list[Any]
    after: Any


class Streamed:
    """A Source without an index. Samples are those of data=dataset; `path` names files instead of a `stream`. Raises
    WordsError if a stream has fewer shards than there are ranks.
    """

    about: ClassVar = {"gives": "samples", "loading": "step", "replayed": True}
    dense = False
    loading: Loading = "step"

    def __init__(
        self, *, stream: Any, path: str | Sequence[str] | None, holdout_dataset: Any, inputs: Inputs | None,
        targets: int | str | None, shift: bool, outputs: int | None, pad: float | None, length: int | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:  # fmt: skip
        if (stream is None) == (path is None):
            raise WordsError(
                "data=stream reads one stream. Type data.stream._target_=<a function that returns it>, or "
                "data.path=<files>."
            )
        self._path = path
        self._make: Make = partial(_opened, stream) if path is None else partial(_files, path)
        self._keys = 0 if inputs is None else inputs, 1 if targets is None else targets
        self._shift, self._outputs, self._pad, self._length, self._collate = shift, outputs, pad, length, collate
        self._masks = [] if pad is None else [name for name in names(self._keys[0]) if name in MASKS]
        self._beside: str | None = None
        self._fixed: set[str] | None = None
        """The parts that are never padded to `length`, by the samples of the first step that is read."""
        self._kept = holdout_dataset
        self._like: dict[str, Any] = {
            "inputs": inputs,
            "targets": targets,
            "shift": shift,
            "outputs": outputs,
            "pad": pad,
        }
        self._like |= {"length": length, "collate": collate}
        self._rank, self._ranks, self._local = 0, 1, 1
        self._states: dict[int, Any] = {0: None}
        """Step -> the state of the stream before its samples; None: at its begin."""
        self._reader: Reader | None = None
        self._step, self._chunk = -1, Chunk([], None)
        """The newest step, and its samples."""

    def begin(self, rank: int, ranks: int, local: int) -> None:
        """Be the part of `rank` of `ranks`, of which `local` samples are in each step."""
        self._rank, self._ranks, self._local = rank, ranks, local

    @property
    def notes(self) -> list[str]:
        self.first()  # opens it
        how = "from its own state" if self._reader and self._reader.has_state else "by reading again up to its position"
        return [
            "data: a stream has no index: dtrain does not shuffle it, and after a stop it continues, "
            f"{how}, with {self._ranks} data-parallel rank(s) alone",
            *_unread(self._path),
        ]

    @property
    def facts(self) -> Mapping[str, Any]:
        batch = self.first()
        inputs, targets, facts = batch["inputs"], batch["targets"], dict[str, Any]()
        if isinstance(inputs, Tensor):
            facts = {"inputs": list(inputs.shape[1:]), "kind": str(inputs.dtype).removeprefix("torch.")}
        outputs = self._outputs
        if outputs is None and isinstance(targets, Tensor) and targets.is_floating_point():
            outputs = targets[0].numel()
        return facts | ({"outputs": outputs, "vocab": outputs} if outputs else {})

    @property
    def fingerprint(self) -> str:
        return "stream"

    def __len__(self) -> int:
        return SAMPLES

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        return positions, np.zeros_like(positions)

    def first(self) -> Batch:
        """The first sample of the newest step, or of the stream. Raises WordsError if there is none."""
        if self._step < 0:
            try:
                self._go_to(0)
            except Ended:
                raise WordsError(
                    f"data: the stream of data-parallel rank {self._rank} has fewer than {self._local} samples, which "
                    "is one batch. Type a smaller batch."
                ) from None
        return self._batch(self._chunk.samples[:1])

    def take(self, index: Indices, epoch: Indices) -> Batch:
        """Samples of one step, by their positions. Raises Ended."""
        self._go_to(int(index[0]) // (self._local * self._ranks))
        return self._batch([self._chunk.samples[each] for each in (index % self._local).tolist()])

    def holdout(self) -> Dataset | None:
        if self._kept is None:
            return None
        kept = Dataset(self._kept, holdout=0, **self._like)
        if self._beside is not None:
            kept.with_mask(self._beside)
        return kept

    def state(self, step: int) -> list[Any]:
        """(a step up to `step`, the state of the stream before it), for `load`."""
        known = max(each for each in self._states if each <= step)
        return [known, self._states[known]]

    def load(self, mark: Sequence[Any]) -> None:
        self._states = {0: None, int(mark[0]): mark[1]}
        self._step = -1
        self.close()

    def close(self, seconds: float | None = END_SECONDS) -> None:
        if self._reader:
            self._reader.close(seconds)
        self._reader = None

    def _go_to(self, step: int) -> None:
        """Have the samples of a step at hand."""
        if step == self._step:
            return
        if self._reader is None or step < self._step:
            self.close(None)
            begin, state = self.state(step)
            self._reader = Reader(partial(self._make, self._rank, self._ranks), self._local, state)
            self._step = begin - 1
        while self._step < step:
            self._chunk = self._reader.next()
            self._step += 1
            if self._chunk.after is not None:
                self._states[self._step + 1] = self._chunk.after
        for old in sorted(self._states)[1:-KNOWN]:
            del self._states[old]

    def with_mask(self, name: str) -> None:
        """Give an attention_mask of padded rows from now on, and `name` to an input that has none."""
        self._beside = name if self._pad is not None else None

    def _batch(self, samples: list[Any]) -> Batch:
        sizes: Sizes = {}
        if self._collate:
            made = pick(self._collate(samples), self._keys, "data.collate: a batch")
            inputs, targets = converted(made, "data:")
        else:
            tensors = self._tensors(samples)
            if self._length is not None and self._fixed is None:
                self._fixed = fixed_of(*zip(*self._tensors(self._chunk.samples), strict=True))
            inputs, targets, sizes = stack(
                tensors, pad=self._pad, length=self._length, masks=self._masks, fixed=self._fixed
            )
        return batch_of(inputs, targets, sizes, shift=self._shift, beside=self._beside)

    def _tensors(self, samples: list[Any]) -> list[tuple[Any, Any]]:
        picked = [pick(each, self._keys, "data.stream: a sample", optional=self._masks) for each in samples]
        return [converted(each, "data.stream: a sample:") for each in picked]


class Reader:
    """Reads a stream in a thread, `size` samples at a time, from where `state` says."""

    def __init__(self, make: Callable[[], Any], size: int, state: Any) -> None:
        self._stream, self._size = make(), size
        self._states = self._stateful()
        self.has_state = self._states is not None
        if state is not None:
            assert self._states is not None
            self._states.load_state_dict(state)
        self._iterator = iter(self._stream)
        self._ready: queue.Queue[Chunk | Exception] = queue.Queue(AHEAD)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="dtrain-stream", daemon=True)
        self._thread.start()

    def next(self) -> Chunk:
        """Raises Ended, again and again, or the error of the stream."""
        chunk = self._ready.get()
        if isinstance(chunk, Exception):
            self._ready.put(chunk)
            raise chunk
        return chunk

    def close(self, seconds: float | None) -> None:
        """End the thread, and wait so long for it: another reader may be given the same stream."""
        self._over.set()
        self._thread.join(seconds)

    def _read(self) -> None:
        while True:
            try:
                samples = [each for _, each in zip(range(self._size), self._iterator, strict=False)]
                whole = len(samples) == self._size
                after = self._states.state_dict() if self._states else None
                chunk: Chunk | Exception = Chunk(samples, after) if whole else Ended()
            except Exception as error:
                chunk = error
            while not self._over.is_set():
                try:
                    self._ready.put(chunk, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if self._over.is_set() or isinstance(chunk, Exception):
                return

    def _stateful(self) -> Any:
        """The stream, if it has a state from which it goes on exactly."""
        has = callable(getattr(self._stream, "state_dict", None)) and hasattr(self._stream, "load_state_dict")
        if not has or _shuffles(self._stream):
            return None
        state = self._stream.state_dict()
        try:
            return self._stream if state is not None and json.loads(json.dumps(state)) == state else None
        except (TypeError, ValueError):  # a checkpoint holds JSON
            return None


def _shuffles(stream: Any) -> bool:
    """Whether a stream of datasets has a buffer of samples, which its state leaves out."""
    inner, seen = getattr(stream, "_ex_iterable", None), 0
    while inner is not None and seen < 100:
        if "BufferShuffled" in type(inner).__name__:
            return True
        inner, seen = getattr(inner, "ex_iterable", None), seen + 1
    return False


def _opened(stream: Any, shard: int, shards: int) -> Any:
    """The part of a stream, or of what a function returns. Raises WordsError if it cannot be divided so often."""
    made = stream
    if callable(stream) and not hasattr(stream, "__iter__"):
        takes = inspect.signature(stream).parameters
        if {"shard", "shards"} <= takes.keys():
            return _iterable(stream(shard=shard, shards=shards))
        made = stream()
    count = getattr(made, "num_shards", None)
    if isinstance(count, int) and callable(getattr(made, "shard", None)):
        _enough(count, shards, "data.stream")
        return made.shard(num_shards=shards, index=shard, contiguous=False) if shards > 1 else made
    if shards > 1:
        raise WordsError(
            f"data.stream: {an(made)} is 1 shard, and {shards} data-parallel ranks need one each. Name a "
            "function make(shard, shards) that returns the part of a rank, or type devices=1."
        )
    return _iterable(made)


def _files(path: str | Sequence[str], shard: int, shards: int) -> Any:
    """The rows of every `shards`-th file."""
    urls = rowindex.found(path)
    names = [name for name in READERS if urls[0].lower().endswith(_ends(name))]
    if not names:
        known = ", ".join(end for ends in READERS.values() for end in ends)
        raise PreflightError(f"data.path={urls[0]}: data=stream reads files whose names end in {known}.")
    urls = [url for url in urls if url.lower().endswith(_ends(names[0]))]
    _enough(len(urls), shards, "data.path")
    try:
        import datasets
    except ImportError:
        raise PreflightError(
            "data=stream data.path needs the datasets package. Type: pip install 'dtrain[hf]'"
        ) from None
    try:
        return datasets.load_dataset(names[0], data_files=urls[shard::shards], split="train", streaming=True)
    except Exception as error:
        raise PreflightError(f"data.path={urls[0]}: datasets cannot stream it: {first_line(error)}") from None


def _ends(builder: str) -> tuple[str, ...]:
    """The ends of the names of files that a builder reads, packed ones too."""
    return tuple(end + packed for end in READERS[builder] for packed in ("", ".gz", ".zst", ".bz2", ".xz"))


def _unread(path: str | Sequence[str] | None) -> list[str]:
    """A sentence about files that match a path and are not of the kind of the first one."""
    urls = [] if path is None else rowindex.found(path)
    builder = next((name for name in READERS if urls and urls[0].lower().endswith(_ends(name))), None)
    others = [url for url in urls if builder and not url.lower().endswith(_ends(builder))]
    return rowindex.unread(others)


def _enough(count: int, shards: int, key: str) -> None:
    if count < shards:
        raise WordsError(
            f"{key}: the stream has {count} shard(s), and {shards} data-parallel ranks need one each. Type devices= "
            f"and nodes= of at most {count} such ranks, or write it in more files."
        )


def _iterable(made: Any) -> Any:
    if not hasattr(made, "__iter__"):
        raise WordsError(f"data.stream returned {an(made)}, which cannot be iterated over.")
    return made
