"""Rows of comma-separated values, found by the offsets at which they begin; line breaks in quotes end no row.

data=csv data.path=table.csv data.targets=price
"""

from collections.abc import Sequence

from dtrain.data.rows import Pattern, Rows, reader
from dtrain.data.samples import Transform


def build(
    *, path: str | Sequence[str], inputs: Pattern | None, targets: str | None, separator: str, holdout: float,
    outputs: int | None, tokenizer: str | None = None, sequence: int | None = None, pad: float | None = None,
    length: int | None = None, bucket: int | None = None, transform: Transform | None = None, cache: str | None,
) -> Rows:  # fmt: skip
    """A Source of all rows. Raises PreflightError, with file and line, for one that cannot be read."""
    made = reader("csv", cache, inputs, tokenizer, sequence or length, separator=separator)
    return Rows(
        made, path, inputs=inputs, targets=targets, holdout=holdout, outputs=outputs, pad=pad, length=length,
        transform=transform, bucket=bucket,
    )  # fmt: skip
