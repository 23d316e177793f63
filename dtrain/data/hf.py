"""Datasets of Hugging Face on disk or at a URL, as `save_to_disk` writes them.

data=hf data.path=saved data.split=train data.inputs=input_ids data.targets=labels data.shift=true
"""

from collections.abc import Sequence

from dtrain.data.packing import Packed
from dtrain.data.rows import Pattern, Rows, reader
from dtrain.data.samples import Transform


def build(
    *, path: str | Sequence[str], split: str | None, inputs: Pattern | None, targets: str | None, holdout: float,
    shift: bool, outputs: int | None, pad: float | None, length: int | None, packing: str, sequence: int | None,
    tokenizer: str | None = None, bucket: int | None = None, transform: Transform | None = None, cache: str | None,
) -> Rows | Packed:  # fmt: skip
    """A Source of all rows. Raises PreflightError for a folder that is no dataset."""
    made = reader("hf", cache, inputs, tokenizer, sequence or length, split=split)
    rows = Rows(
        made, path, inputs=inputs, targets=targets, holdout=holdout, shift=shift, outputs=outputs, pad=pad,
        length=length, transform=transform, packed=packing == "pack", bucket=bucket,
    )  # fmt: skip
    return Packed(rows, window=sequence, pad=pad, cache=made.cache) if packing == "pack" and sequence else rows
