"""Rows of Parquet files. A row group is read whole, so the order of a pass goes from group to group and shuffles the
rows of neighbours (dtrain/data/split.py); few groups are in memory at a time.

    data=parquet data.path=s3://bucket/rows data.inputs=pixels data.targets=label
"""

from collections.abc import Sequence

import numpy as np

from dtrain.data.packing import Packed
from dtrain.data.rows import Pattern, Rows, reader
from dtrain.data.samples import Transform
from dtrain.data.split import Blocks
from dtrain.files.rowindex import File


def build(
    *, path: str | Sequence[str], inputs: Pattern | None, targets: str | None, holdout: float, shift: bool,
    outputs: int | None, pad: float | None, length: int | None, packing: str, sequence: int | None,
    tokenizer: str | None = None, bucket: int | None = None, transform: Transform | None = None, cache: str | None,
) -> Rows | Packed:  # fmt: skip
    """A Source of all rows. Raises PreflightError for a file that cannot be read."""

    def split(files: Sequence[File], rows: int) -> Blocks:
        sizes, weights = ([each for file in files for each in file.facts[name]] for name in ("sizes", "bytes"))
        blocks = int(np.searchsorted(np.cumsum(sizes), rows)) + 1
        return Blocks(tuple(sizes[:blocks]), tuple(weights[:blocks]), holdout)

    made = reader("parquet", cache, inputs, tokenizer, sequence or length)
    rows = Rows(
        made, path, inputs=inputs, targets=targets, holdout=holdout, shift=shift, outputs=outputs, pad=pad,
        length=length, transform=transform, split=split, packed=packing == "pack", bucket=bucket,
    )  # fmt: skip
    return Packed(rows, window=sequence, pad=pad, cache=made.cache) if packing == "pack" and sequence else rows
