"""Rows of comma-separated values, found by the offsets at which they begin; line breaks in quotes end no row.

data=csv data.path=table.csv data.targets=price
"""

from collections.abc import Sequence

from dtrain.data.rows import Pattern, Rows
from dtrain.data.samples import Transform
from dtrain.storage.caching import folder
from dtrain.storage.rowfile import Reader


def build(
    *, path: str | Sequence[str], inputs: Pattern | None, targets: str | None, separator: str, holdout: float,
    outputs: int | None, transform: Transform | None = None,
    cache: str | None,
) -> Rows:  # fmt: skip
    """A Source of all rows. Raises PreflightError, with file and line, for one that cannot be read."""
    reader = Reader("csv", folder(cache), separator)
    return Rows(reader, path, inputs=inputs, targets=targets, holdout=holdout, outputs=outputs, transform=transform)
