"""Reads a Source: step s of the run takes samples [s*batch, (s+1)*batch) of the global order, on every mesh.

Samples are read in blocks of several steps, by a background thread if the source allows it, so a step costs only a few
views. The state is the number of samples seen, the batches to skip later, and the number of batches already skipped,
which relates samples to steps.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data import Asking, Batch, Growing, Indices, Noted, Ordered, Source
from dtrain.data.bucket import Bucketed, Buckets
from dtrain.data.collate import tree
from dtrain.data.dataset import Dataset
from dtrain.data.order import VERSION, samples
from dtrain.data.replayed import Ended
from dtrain.data.replayed import Streamed as Streamed
from dtrain.data.workers import LoaderError
from dtrain.errors import DtrainError, WordsError, note_sample, sample_of
from dtrain.files import sampled
from dtrain.mesh import Mesh
from dtrain.planned import BatchShape

AHEAD = 2
"""Blocks that loading processes have to read at a time."""
UNLABELLED = 10
"""Steps at the beginning of a run, none of which has a target that counts, after which it ends."""
BLOCK_BYTES, BLOCK_STEPS = 4 << 20, 64
"""Largest number of bytes and of steps in a block of one rank."""


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of a step: its microbatches, the objective's count of the whole batch, and the position of the
    batch's first sample.
    """

    microbatches: list[Batch]
    count: float
    first: int = 0


Loaded = tuple[list[Batch], Exception | None]
"""Samples of a block's steps, on the CPU, and the error of the step after them, or None."""


def as_source(built: Any) -> Source:
    """The Source itself, or a Source that wraps a map-style dataset."""
    return built if hasattr(built, "take") else Dataset(built)


class Stream:
    """An endless iterator with a StepBatch per step. `count(batch)` is the objective's count of a batch on the CPU;
    `end`: the position in the global order beyond which nothing is read ahead; `check(batch)`
    raises for samples, on the CPU, that the model cannot take. `apart`: microbatches are read one by one, where no
    other process reads, so that rows are padded to the longest of a microbatch.
    """

    def __init__(
        self, source: Source, *, batch: BatchShape, mesh: Mesh, seed: int, count: Callable[[Batch], float],
        end: float = math.inf, check: Callable[[Batch], None] = lambda batch: None, apart: bool = False,
    ) -> None:  # fmt: skip
        self.seen = self.first = 0
        """Samples seen or skipped, and the position of the newest step in the global order."""
        self.waited = 0.0
        """Seconds that steps waited for samples."""
        self._passed: set[int] = set()
        self._before = 0
        """Number of batches that the restored run skipped and that are not in `_passed`."""
        self.notes: list[str] = [*source.notes] if isinstance(source, Noted) else []
        """Sentences about the data, and about what has grown since the checkpoint that was restored."""
        self.over = ""
        """Why there is no further step, once a stream has ended."""
        self._replayed = source if isinstance(source, Streamed) else None
        self._source, self._batch, self._mesh, self._seed, self._count = source, batch, mesh, seed, count
        self._end, self._check, self._apart = end, check, apart
        if len(source) < 1:
            raise WordsError("data: there is no sample to train on. Type a smaller data.holdout.")
        self._buckets = self._sorting()
        one = self._replayed.first() if self._replayed else source.take(np.array([0]), np.array([0]))
        share = batch.local * max(1, sum(part.nbytes for part in leaves(one)))
        self._most = 1 if source.loading == "step" else max(1, min(BLOCK_STEPS, BLOCK_BYTES // share))
        self._steps = 1
        """Of the next block: blocks grow from one step, which the first step of a run waits for."""
        self._thread: ThreadPoolExecutor | None = None
        if source.loading == "thread":
            self._thread = ThreadPoolExecutor(1, "dtrain-data", _use, (mesh.device,))
        self._loading = deque[tuple[list[int], Future[Loaded]]]()
        """Blocks that are read ahead: the positions of their steps, and their samples."""
        self._after = 0
        """The position after the last of them."""
        self._ahead = 1
        self._dense: float | None = None
        self._empty: int | None = 0
        """Steps of this start, as long as none has had a target that counts."""
        self._ready: Iterator[StepBatch] = iter(())
        self._error: Exception | None = None
        """Of the step after those that are ready: it is raised when that step is due."""

    def __next__(self) -> StepBatch:
        """The next step's batch, on the device."""
        share = next(self._ready, None)
        if share is None:
            if self._error:
                raise self._error
            self._ready = iter(self._block())
            share = next(self._ready)
        self.first, self.seen = share.first, share.first + self._batch.size
        if self._empty is not None:
            self._empty = None if share.count else self._empty + 1
            if self._empty == UNLABELLED or self.seen >= self._end:
                self._refuse_unlabelled()
        return share

    def ends(self) -> bool:
        """Whether no rank has a further step; all ranks call it before each. Only a stream ever ends."""
        if self._replayed and not self.over:
            share = next(self._ready, None)
            block = self._block() if share is None else [share]
            self._ready = iter(block)
            if not block:
                self._refuse_unlabelled()
                self.over = f"the stream has ended after {self.seen} samples"
        return bool(self.over)

    def __iter__(self) -> "Stream":
        return self

    def state_dict(self) -> dict[str, Any]:
        position = {"seen": self.seen, "batch": self._batch.size, "passed": self._before + self._skipped()}
        later = sorted(first for first in self._passed if first >= self.seen)
        order = {"samples": len(self._source), "seed": self._seed, "order": VERSION, "files": sampled.facts()}
        if self._buckets:
            order["bucket"] = self._buckets.batches
        state = {**position, "passed_over": later, **order, "fingerprint": self._source.fingerprint}
        if self._replayed:
            mark = self._replayed.state(self.seen // self._batch.size)
            marks = dict(sorted(self._mesh.gather([self._mesh.data_rank, mark])))
            state |= {"ranks": self._mesh.data_ranks, "marks": list(marks.values())}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position. Raises WordsError if the data, its seed, the order or the batch differs."""
        if state["seed"] != self._seed:
            raise WordsError(
                "the checkpoint is of a run with another seed. Type seed=<that of its run>, or out=<another place>. If "
                "the folder has checkpoints of two runs (dtrain checkpoint ls), remove those of one."
            )
        written = sampled.compare(state.get("files", ()))
        if isinstance(self._source, Growing):
            grown = self._source.as_of(state["fingerprint"]) or []
            self.notes = [*grown, *(self._source.notes if isinstance(self._source, Noted) else [])]
            self._buckets = self._sorting()
        self.notes, mine = [*self.notes, *written], self.state_dict()
        for key in ("samples", "fingerprint", "order", "batch", "bucket"):
            if state.get(key) != mine.get(key):
                raise WordsError(
                    f"the checkpoint was trained on other data ({key} {state.get(key)!r}, here {mine.get(key)!r}). "
                    "Type out=<another place>, or init=<its run> to start from its weights."
                )
        if self._replayed:
            if state["ranks"] != self._mesh.data_ranks:
                raise WordsError(
                    f"the checkpoint is of {state['ranks']} data-parallel rank(s), each with a part of the stream, and "
                    f"here are {self._mesh.data_ranks}. Type nodes= and devices= that give {state['ranks']}, or "
                    "out=<another place> init=<its run> to start from its weights."
                )
            self._replayed.load(state["marks"][self._mesh.data_rank])
        self.skip(state.get("passed_over", ()), seen=state["seen"])
        self._before = state["passed"] - self._skipped()

    def skip(self, batches: Iterable[int], *, seen: int) -> None:
        """Continue after `seen` samples, and skip the batches that begin at these positions."""
        self.seen = self.first = seen
        self._passed.update(batches)
        self._loading.clear()
        self._after, self._ready, self._error, self.over = seen, iter(()), None, ""

    def _skipped(self) -> int:
        return sum(first < self.seen for first in self._passed)

    def samples(self, first: int) -> list[int]:
        """The samples of the step that begins at this position, as indices of the user's dataset if there is one, else
        of the source.
        """
        return self._named(self._order(np.arange(first, first + self._batch.size))[0])

    def alone(self, first: int) -> Iterator[tuple[int, int, Batch]]:
        """This rank's samples of that step, read one by one: (position, index as in `samples`, sample)."""
        places = self._mine([first])
        index, epoch = self._order(places)
        for number, sample in enumerate(self._named(index)):
            yield int(places[number]), sample, self._source.take(index[number : number + 1], epoch[number : number + 1])

    def odd(self, first: int) -> list[int]:
        """The samples of the step that begins at this position which have NaN or an infinite number; what is padded has
        none. No step follows. All ranks call it.
        """
        odd = list[int]()
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        with suppress(Exception):  # of one rank, for which the others would wait
            odd = [sample for _, sample, batch in self.alone(first) if not _is_finite(batch)]
        return sorted({sample for mine in self._mesh.gather(odd) for sample in mine})

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self._replayed:
            self._replayed.close()

    def _refuse_unlabelled(self) -> None:
        """Raises WordsError if no target has counted since the beginning of the run, which has nothing to learn."""
        if self._empty and self._empty * self._batch.size == self.seen:
            where = f"the first {UNLABELLED} steps" if self._empty == UNLABELLED else f"any of the {self._empty} steps"
            raise WordsError(
                f"data: no target counts in {where}, so there is nothing to learn: all targets are -100, or rows are "
                "single tokens, which have no next one. Look at the labels, and at what masks them."
            )

    def _block(self) -> list[StepBatch]:
        """The next block's steps, on the device, with their global counts; none after the end of a stream."""
        began = time.perf_counter()
        if self._thread:
            if not self._loading:
                self._begin(self._thread)
            self._read_ahead(self._thread)
            firsts, loading = self._loading[0]
            batches, self._error = loading.result()
            self._loading.popleft()
            if not self._error:
                self._read_ahead(self._thread)
        else:
            firsts = self._firsts(self.seen)
            try:
                batches, self._error = self._load(firsts)
            except Ended:
                batches = []
        self.waited += time.perf_counter() - began
        if self._replayed and int(self._mesh.sum(torch.tensor([int(not batches)]))):
            return []  # all ranks end before the step that one of them cannot do
        parts = [part for batch in batches for part in _split(batch, self._batch.microbatch)]
        steps = [parts[i : i + self._batch.accumulate] for i in range(0, len(parts), self._batch.accumulate)]
        on_device = ([to_device(part, self._mesh.device) for part in parts] for parts in steps)
        return [StepBatch(*row) for row in zip(on_device, self._counts(steps, len(firsts)), firsts, strict=False)]

    def _read_ahead(self, thread: ThreadPoolExecutor) -> None:
        while len(self._loading) < self._ahead and self._after < self._end:
            self._begin(thread)

    def _begin(self, thread: ThreadPoolExecutor) -> None:
        """Have a thread load the next block; processes have two at a time, so that they never wait for the rank."""
        firsts = self._firsts(self._after)
        asked = None
        if isinstance(self._source, Asking):
            asked = self._source.ask(*self._order(self._mine(firsts)))
            self._ahead = 1 if asked is None else AHEAD
        self._loading.append((firsts, thread.submit(self._load, firsts, asked)))
        self._after = firsts[-1] + self._batch.size

    def _firsts(self, seen: int) -> list[int]:
        """Positions of the next block's steps, after `seen` samples."""
        firsts = list[int]()
        while not firsts or (len(firsts) < self._steps and seen < self._end):
            if seen not in self._passed:
                firsts.append(seen)
            seen += self._batch.size
        self._steps = min(2 * self._steps, self._most)
        return firsts

    def _counts(self, steps: list[list[Batch]], number: int) -> list[float]:
        """The count of each step's whole batch: constant for dense data, else summed over ranks, for the `number` of
        steps of a block: some may have failed to load here alone.
        """
        if not self._source.dense:
            mine = [sum(map(self._count, parts)) for parts in steps]
            counts = self._mesh.sum(torch.tensor(mine + [0] * (number - len(mine)), dtype=torch.float64))
            # the ranks of cp count the same samples
            means = (counts / (self._mesh.batch_ranks // self._mesh.data_ranks)).tolist()
            return [int(mean) if mean.is_integer() else mean for mean in means]
        if self._dense is None:
            self._dense = sum(map(self._count, steps[0])) * self._batch.data
        return [self._dense] * len(steps)

    def _load(self, firsts: list[int], asked: Callable[[], Batch] | None = None) -> Loaded:
        """This rank's samples of the steps that begin at these positions, `asked` for or not; after an error, those of
        the steps before the one that fails, loaded step by step. Raises the error if that is the first.
        """
        try:
            return self._take(firsts, asked), None
        except Exception as error:
            batches, done = list[Batch](), 0
            with suppress(Exception):  # the same again
                for first in firsts[:-1]:
                    batches += self._take([first])
                    done += 1
            self._note_sample(firsts[done:], error)
            if not batches:
                raise
            return batches, error

    def _note_sample(self, firsts: list[int], error: Exception) -> None:
        """Note which sample of these steps an error is about: the first that fails alike when it is read alone."""
        if self._replayed or sample_of(error) or isinstance(error, DtrainError | LoaderError):
            return
        for place in self._mine(firsts):
            index, epoch = self._order(np.array([place]))
            try:
                self._source.take(index, epoch)
            except Exception as again:
                if type(again) is type(error):
                    note_sample(error, f"sample {self._named(index)[0]}, epoch {epoch[0]}")
                return

    def _take(self, firsts: list[int], asked: Callable[[], Batch] | None = None) -> list[Batch]:
        """This rank's samples of the steps that begin at these positions, on the CPU: all together, or those of each
        microbatch where they are sorted by length or read apart.
        """
        places = self._mine(firsts)
        if asked:
            batches = [asked()]
        else:
            is_apart = self._buckets or self._apart
            parts = places.reshape(-1, self._batch.microbatch) if is_apart else [places]
            batches = [self._source.take(*self._order(part)) for part in parts]
        for each in batches:
            self._check(each)
        return batches if self._mesh.device.type == "cpu" else [{**tree(Tensor.pin_memory, each)} for each in batches]

    def _mine(self, firsts: list[int]) -> Indices:
        local = self._batch.local
        return (np.array(firsts, dtype=np.int64)[:, None] + self._mesh.data_rank * local + np.arange(local)).ravel()

    def _order(self, positions: Indices) -> tuple[Indices, Indices]:
        return self._buckets(positions) if self._buckets else self._unsorted(positions)

    def _unsorted(self, positions: Indices) -> tuple[Indices, Indices]:
        if isinstance(self._source, Ordered):
            return self._source.order(positions, seed=self._seed)
        return samples(positions, n=len(self._source), seed=self._seed)

    def _sorting(self) -> Buckets | None:
        """The order by length, and a sentence about it in `notes`, if samples are sorted."""
        source = self._source
        if not isinstance(source, Bucketed) or source.bucket is None:
            return None
        buckets = Buckets(source, self._unsorted, batch=self._batch.size, seed=self._seed)
        padding, before = buckets.padding(self._batch.microbatch)
        self.notes.append(
            f"data.bucket={source.bucket}: {padding:.1%} of the first batches is padding, {before:.1%} without it"
        )
        return buckets

    def _named(self, index: Indices) -> list[int]:
        if isinstance(self._source, Dataset):
            index = self._source.original(index)
        return list(map(int, index))


def _use(device: torch.device) -> None:
    """Set the device of a new thread, because pinning memory would open a context on its default, the first GPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def leaves(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in batch.values():
            yield from leaves(part)


def to_device(batch: Any, device: torch.device) -> Any:
    """A tensor, or a mapping of tensors, on `device`; asynchronous from pinned memory."""
    if device.type == "cpu":
        return batch
    return tree(lambda tensor: tensor.pin_memory().to(device, non_blocking=True), batch)


def _is_finite(batch: Batch) -> bool:
    """Whether all numbers of inputs and targets are finite; targets that were padded are not looked at."""
    parts = [batch["inputs"]] if "target_mask" in batch else [batch["inputs"], batch["targets"]]
    return all(bool(leaf.isfinite().all()) for part in parts for leaf in leaves(part))


def _split(batch: Any, size: int) -> list[Batch]:
    """Views of `size` samples each."""
    columns = [part.split(size) if isinstance(part, Tensor) else _split(part, size) for part in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
