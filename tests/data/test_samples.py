"""An exception of a sample names it, with its epoch, whatever the source is and wherever samples are read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.files import rows, write
from data.test_dataset import Squares
from data.test_rows import BUILD
from data.test_stream import Numbers, stream
from torch.utils.data import TensorDataset

from dtrain.data.dataset import Dataset
from dtrain.data.mixture import Mixture
from dtrain.lifecycle import failure
from dtrain.planned import BatchShape

SHAPE = BatchShape(size=4, data=1, microbatch=2, accumulate=2)


class Torn(Squares):
    """Sample 7 cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("label")
        return super().__getitem__(index)


class Columns(TensorDataset):
    """Read by a tensor of indices; sample 7 cannot be."""

    def __getitem__(self, index: Any) -> Any:
        if 7 in np.atleast_1d(index):
            raise OSError("torn")
        return super().__getitem__(index)


class Source(Numbers):
    """A source of the user's own."""

    def take(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        if 7 in index:
            raise OSError("torn")
        return super().take(index, epoch)


def collated(samples: list[Any]) -> Any:
    if any(float(x) == 7 for x, _ in samples):
        raise ZeroDivisionError("no mean")
    return torch.tensor([float(x) for x, _ in samples]), torch.tensor([float(y) for _, y in samples])


def odd(sample: Any, generator: Any) -> Any:
    if float(sample[0][1]) == 7:
        raise ValueError("odd")
    return sample


def of_rows(format: str) -> Any:
    def make(folder: Path) -> Any:
        path = write(folder / f"rows.{format}", rows())
        words = {"inputs": ["a", "b"], "targets": "label", "holdout": 0, "outputs": None, "transform": odd}
        return BUILD[format](path=path, cache=str(folder / "cache"), **words)

    return make


FIRST = torch.arange(20.0)
SOURCES: dict[str, tuple[Any, str]] = {
    "own": (lambda _: Dataset(Torn(), holdout=0), "KeyError: 'label', reading sample 7, epoch 1"),
    "processes": (lambda _: Dataset(Torn(), holdout=0, workers=2), "KeyError: 'label', reading sample 7, epoch 1"),
    "columns": (lambda _: Dataset(Columns(FIRST, FIRST), holdout=0), "OSError: torn, reading sample 7, epoch 1"),
    "collate": (
        lambda _: Dataset(TensorDataset(FIRST, FIRST), holdout=0, collate=collated),
        "ZeroDivisionError: no mean, reading sample 7, epoch 1",
    ),
    "a source": (lambda _: Source(20), "OSError: torn, reading sample 7, epoch 1"),
    "mixture": (
        lambda _: Mixture(of={"a": Dataset(Squares(), holdout=0), "b": Dataset(Torn(), holdout=0)}, weights={"a": 1, "b": 1}),
        "KeyError: 'label', reading sample 7, epoch 1 of data.of.b",
    ),
    "jsonl": (of_rows("jsonl"), "line 8, epoch 1 (ValueError: odd"),
    "csv": (of_rows("csv"), "line 16, epoch 1 (ValueError: odd"),
    "parquet": (of_rows("parquet"), "row 8, epoch 1 (ValueError: odd"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SOURCES)
def test_a_sample_that_cannot_be_read_is_named(kind: str, tmp_path: Path) -> None:
    make, sentence = SOURCES[kind]
    source = make(tmp_path)
    made = stream(source, SHAPE)
    made.skip([], seen=len(source))  # the second epoch begins
    try:
        with pytest.raises(Exception) as raised:
            for _ in range(40):
                next(made)
        facts = failure.facts_of(raised.value, 0)
        assert sentence in facts["error"]
        assert sentence in facts["message"].replace("\nreading", ", reading")
    finally:
        made.close()
        if kind == "processes":
            source._processes.close()
