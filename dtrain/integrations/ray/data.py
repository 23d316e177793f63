"""Rows of a Ray Dataset by their place in it, so that every mesh sees the same batches.

    data=ray data.path=/shared/rows data.inputs=pixels data.targets=label
    data=ray data.dataset._target_=mypkg.rows data.inputs=pixels data.targets=label trust=[mypkg]

One actor of the run executes the Dataset, once and in its order, and has its blocks; the ranks count the rows of each,
and read by block and place in it. A Dataset that is small beside the nodes' object stores is read whole; of a larger
one, a task beside each block selects the rows.
"""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data import Indices
from dtrain.data.dataset import Dataset
from dtrain.errors import DtrainError, PreflightError, WordsError, an, first_line
from dtrain.files.parquetfile import check_finite
from dtrain.integrations.ray import connection
from dtrain.lifecycle import signals
from dtrain.storage import store

NAMESPACE = "dtrain"
SHARE = 0.25
"""Of the smallest object store: a Dataset with fewer bytes is read whole."""
FULL_SECONDS, BUSY_SECONDS = 10.0, 60.0
"""Time for a CPU of the cluster to become free: where placement groups have them all, and where tasks do."""
KINDS = {"f": np.float32, "i": np.int64}
"""Kind of numbers -> their type in a batch."""
Columns = dict[str, NDArray[Any]]
Nulls = dict[tuple[str, bool], int]
"""Column, and whether inside its arrays -> the number of nulls there."""


def build(
    *, path: str | None, dataset: Callable[[], Any] | None, cluster: str | None, holdout: float,
    inputs: str | Sequence[str], targets: str, shift: bool, outputs: int | None, pad: float | None, length: int | None,
) -> Dataset:  # fmt: skip
    """A Source of the rows of `path`, or of the Dataset that `dataset` returns."""
    connection.refuse(cluster, "data.cluster")
    if (path is None) == (dataset is None):
        raise WordsError(
            "data=ray reads one Dataset. Type data.path=<Parquet files>, or data.dataset._target_=<a function that "
            "returns a ray.data.Dataset>."
        )
    if path is not None and store.is_local(path):  # it is read by a process with another working folder
        path = str(Path(store.local_path(path)).absolute())
    columns = [inputs] if isinstance(inputs, str) else [*inputs]
    rows = Rows(
        dataset or partial(_parquet, str(path)), [*dict.fromkeys([*columns, targets])], cluster, named=repr(path)
    )
    return Dataset(
        rows, holdout=holdout, inputs=inputs, targets=targets, shift=shift, outputs=outputs, pad=pad, length=length,
        columns=pad is None,
    )  # fmt: skip


class Rows:
    """The rows of the Dataset that `make` returns. `names`: the columns that are read."""

    def __init__(self, make: Callable[[], Any], names: Sequence[str], cluster: str | None, *, named: str = "") -> None:
        with undisturbed():
            connection.connect(cluster, "data.cluster")
            import ray

        self._names = names
        # the port is that of this round's rendezvous: ranks that start again do not meet the actor of the round before
        meeting = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))
        place = " ".join(map(str, meeting)) if os.environ.get("MASTER_PORT") else uuid.uuid4().hex
        actor = ray.remote(Blocks).options(name=f"{place} {named}", namespace=NAMESPACE, get_if_exists=True, num_cpus=0)
        self._actor = actor.remote(make)
        """It ends with the process that made it."""
        try:
            self._blocks, counts, has, size, nulls = ray.get(self._actor.blocks.remote(names))
        except ray.exceptions.RayError as error:
            raise PreflightError(f"data: Ray cannot read the rows: {_reason(error)}") from error
        if not sum(counts):
            raise PreflightError("data: there is no row in the Dataset.")
        if lacking := [name for name in names if name not in has]:
            raise WordsError(f"data: the rows have no column {', '.join(lacking)}. They have {', '.join(has)}.")
        _refuse_nulls(nulls, sum(counts))
        self._ends = np.cumsum(counts)
        self._is_small = size < SHARE * _smallest_store(ray.nodes())

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int | Tensor) -> dict[str, Any]:
        """One row, or the columns of several."""
        if isinstance(index, Tensor):
            return self._read(index.numpy())
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {name: column[0] for name, column in self._read(np.array([index])).items()}

    def _read(self, index: Indices) -> dict[str, Any]:
        import ray

        block = np.searchsorted(self._ends, index, side="right")
        place = index - np.concatenate([[0], self._ends])[block]
        order, parts = list[NDArray[Any]](), list[Any]()
        for number in np.unique(block):
            here = np.flatnonzero(block == number)
            order.append(here)
            if self._is_small:
                parts.append(select(self._whole[number], place[here], self._names))
            else:
                parts.append(self._select.remote(self._blocks[number], place[here], self._names))
        if not self._is_small:
            parts = ray.get(parts)
        back = np.argsort(np.concatenate(order))
        columns = {name: _joined(name, [part[name] for part in parts])[back] for name in self._names}
        for name, column in columns.items():
            check_finite(column, f"data: column {name}", index)
        return columns

    @cached_property
    def _whole(self) -> list[Any]:
        """All blocks, in the memory that the processes of this node share."""
        import ray

        return list(ray.get(self._blocks))

    @cached_property
    def _select(self) -> Any:
        import ray

        return ray.remote(num_cpus=0)(select)


class Blocks:
    """An actor with the blocks of a Dataset."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._dataset: Any = None

    def blocks(self, names: Sequence[str]) -> tuple[list[Any], list[int], list[str], int, Nulls]:
        """References to the blocks, the number of rows of each, the names of the columns, the size in bytes, and the
        nulls of the columns `names`.
        """
        import ray

        self._dataset = self._dataset or self._executed()
        blocks = self._dataset.to_arrow_refs()
        look = ray.remote(num_cpus=0)(survey)
        surveys = ray.get([look.remote(block, names) for block in blocks])
        nulls = sum((Counter(found) for _, found in surveys), Counter[tuple[str, bool]]())
        counts = [rows for rows, _ in surveys]
        return blocks, counts, self._dataset.columns() or [], self._dataset.size_bytes(), nulls

    def _executed(self) -> Any:
        import ray

        _await_cpu()
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        made = self._make()
        if not isinstance(made, ray.data.Dataset):
            raise WordsError(f"data.dataset returned {an(made)}, and no ray.data.Dataset")
        return made.materialize()


def _await_cpu() -> None:
    """Return when a task of the cluster has had a CPU; the tasks of a Dataset need one. Raises PreflightError."""
    import ray
    from ray.util import placement_group_table

    probe, since = ray.remote(num_cpus=1)(lambda: None).remote(), time.monotonic()
    while not ray.wait([probe], timeout=1.0)[0]:
        cpus, waited = ray.cluster_resources().get("CPU", 0), time.monotonic() - since
        groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        reserved = sum(bundle.get("CPU", 0) for group in groups for bundle in group["bundles"].values())
        is_full = reserved > cpus - 1
        if waited > (FULL_SECONDS if is_full else BUSY_SECONDS):
            ray.cancel(probe)
            has = f"runs have reserved {reserved:g} of {cpus:g}" if is_full else f"other tasks use them ({cpus:g})"
            raise PreflightError(
                f"no CPU of the cluster is free to execute the Dataset: {has}. Type devices= or threads= that leave "
                "one."
            )


def survey(block: Any, names: Sequence[str]) -> tuple[int, Nulls]:
    """The rows of a block, and the nulls of its columns."""
    from pyarrow import compute, types

    nulls: Nulls = {}
    for name in set(names) & {*block.column_names}:
        column = block.column(name)
        nulls[name, False] = column.null_count
        while types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
            column = compute.list_flatten(column)
            nulls[name, True] = nulls.get((name, True), 0) + column.null_count
    return block.num_rows, nulls


def _refuse_nulls(nulls: Nulls, rows: int) -> None:
    for (name, is_inside), count in sorted(nulls.items()):
        if count and is_inside:
            raise PreflightError(f"data: column {name} has arrays with nulls. Fill them.")
        if count:
            raise PreflightError(f"data: column {name} has {count} null(s) in {rows} rows. Drop them.")


def select(block: Any, places: Indices, names: Sequence[str]) -> Columns:
    """Columns of some rows of a block."""
    from ray.data.block import BlockAccessor

    rows = BlockAccessor.for_block(block).take(places)
    columns: Columns = BlockAccessor.for_block(rows).to_numpy([*names])
    return columns


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context after which handlers of signals and errors are those from before."""
    handlers = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    hook, lost = sys.excepthook, sys.unraisablehook
    try:
        yield
    finally:
        signals.install(handlers)
        sys.excepthook, sys.unraisablehook = hook, lost


def _parquet(path: str) -> Any:
    import ray

    return ray.data.read_parquet(path)


def _joined(name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One array of the rows of several blocks; lists of numbers become rows of one length."""
    column = np.concatenate(parts)
    if column.dtype == object and all(isinstance(row, np.ndarray | list) for row in column):
        lengths = {len(row) for row in column}
        if len(lengths) > 1:
            raise WordsError(
                f"data: the rows of {name} have different lengths, {min(lengths)} to {max(lengths)}. Type "
                "data.pad=<the padding token>."
            )
        column = np.stack([np.asarray(row) for row in column])
    kind = KINDS.get(column.dtype.kind)
    with np.errstate(over="ignore"):  # what becomes infinite is told with its row
        return column if kind is None else column.astype(kind, copy=False)


def _smallest_store(nodes: Sequence[Any]) -> float:
    stores = (node["Resources"].get("object_store_memory", 0.0) for node in nodes if node["Alive"])
    return min((store for store in stores if store), default=0.0)


def _reason(error: BaseException) -> str:
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, DtrainError) or line == kind else f"{kind}: {line}"
