"""Rows of JSON lines: `{"x": [0.5, 1], "label": 3}`, found by the offsets at which they begin.

data=jsonl data.path=rows/*.jsonl data.inputs=x data.targets=label
"""

from collections.abc import Sequence

from dtrain.data.packing import Packed
from dtrain.data.rows import Pattern, Rows, reader
from dtrain.data.samples import Transform


def build(
    *, path: str | Sequence[str], inputs: Pattern | None, targets: str | None, holdout: float, shift: bool,
    outputs: int | None, pad: float | None, length: int | None, packing: str, sequence: int | None,
    tokenizer: str | None = None, bucket: int | None = None, transform: Transform | None = None, cache: str | None,
) -> Rows | Packed:  # fmt: skip
    """A Source of all rows. Raises PreflightError, with file and line, for one that cannot be read."""
    made = reader("jsonl", cache, inputs, tokenizer, sequence or length)
    rows = Rows(
        made, path, inputs=inputs, targets=targets, holdout=holdout, shift=shift, outputs=outputs, pad=pad,
        length=length, transform=transform, packed=packing == "pack", bucket=bucket,
    )  # fmt: skip
    return Packed(rows, window=sequence, pad=pad, cache=made.cache) if packing == "pack" and sequence else rows
