"""Rows of a user, as a map-style dataset and as a Dataset of Ray: a module of its own, which actors of Ray import."""

import os
from typing import Any

import numpy as np

ROWS, FEATURES = 515, 8


def pixels() -> Any:
    return np.random.default_rng(0).normal(size=(ROWS, FEATURES))


def labels() -> Any:
    return pixels()[:, :3].argmax(axis=1)


class Local:
    def __init__(self) -> None:
        self._pixels, self._labels = pixels(), labels()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return {"pixels": self._pixels[index], "label": self._labels[index]}


def dataset(blocks: int) -> Any:
    import ray

    numbers = ray.data.from_numpy(np.arange(ROWS)).repartition(blocks)
    return numbers.map_batches(lambda batch: {"pixels": pixels()[batch["data"]], "label": labels()[batch["data"]]})


def ragged() -> Any:
    import ray

    return ray.data.from_items([{"tokens": row} for row in ([1, 2, 3], [4], [5, 6])])


def empty() -> Any:
    import ray

    return ray.data.from_items([{"tokens": row} for row in range(4)]).filter(lambda row: row["tokens"] > 4)


def holes(column: str) -> Any:
    """Nulls in two blocks, and in the arrays of one."""
    import pyarrow
    import ray

    blocks = [{"label": [1, None], "pixels": [[1.0], [2.0]]}, {"label": [None, 3], "pixels": [[None], [4.0]]}]
    return ray.data.from_arrow([pyarrow.table(block).select([column]) for block in blocks])


def odd() -> Any:
    import ray

    return ray.data.from_items([{"x": each} for each in (1.0, float("nan"), 2.0)])


def failing() -> Any:
    raise KeyError("rows")


def no_dataset() -> Any:
    return [1, 2, 3]


class Loud(Local):
    """It prints where it is read."""

    def __init__(self) -> None:
        super().__init__()
        print("read by rank", os.environ["RANK"], flush=True)
