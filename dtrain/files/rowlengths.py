"""How long the lists in a column of a file of rows are: counted once, and kept beside the file's index."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError
from dtrain.files import rowindex
from dtrain.files.rowindex import File

ROWS = 4096
"""Rows that are read at once."""


def of(file: File, column: str, cache: Path) -> NDArray[np.int32]:
    """The length of each row's list. Raises StoreError, and PreflightError for a row that cannot be read."""

    def made(stem: Path) -> Mapping[str, Any]:
        part = Path(f"{stem}.part")
        with part.open("wb") as out:
            np.save(out, _counted(file, column))
        part.replace(f"{stem}.npy")
        return {"sizes": file.facts["sizes"], "sha256": file.facts["sha256"], "kinds": {}}

    how = ["lengths", column, file.facts["sha256"]]
    _, stem = rowindex.kept(cache, file.url, how, made, beside=[".npy"])
    return np.load(f"{stem}.npy", allow_pickle=False)  # type: ignore[no-any-return]


def check(lengths: NDArray[Any], window: int) -> None:
    """Raises PreflightError if no row has a token, or all that have some are longer than the window."""
    tokens = lengths[lengths > 0]
    if not len(tokens):
        raise PreflightError(f"data.packing=pack: none of the {len(lengths)} rows has a token.")
    if (tokens > window).all():
        raise PreflightError(
            f"data.sequence={window}: all {len(tokens)} rows are longer, the shortest has {tokens.min()} tokens, so "
            f"that nothing would be packed. Type data.sequence={tokens.max()} for whole rows, or data.packing=none."
        )


def check_shift(lengths: NDArray[Any]) -> None:
    """Raises PreflightError if no row has two tokens: none would have a target."""
    if np.max(lengths, initial=0) == 1:
        raise PreflightError(
            f"data.shift=true: all {len(lengths)} rows are single tokens, so no token has a next one to learn. Name "
            "rows of at least two tokens."
        )


def _counted(file: File, column: str) -> NDArray[np.int32]:
    parts = [np.zeros(0, np.int32)]
    for block, size in enumerate(file.facts["sizes"]):
        for start in range(0, size, ROWS):
            rows = file.read(block, np.arange(start, min(start + ROWS, size)))[column]
            parts.append(np.fromiter(map(len, rows), np.int32, len(rows)))
    return np.concatenate(parts)
