"""The same rows as JSON lines, CSV and Parquet."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def rows(count: int = 60, *, first: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(first)
    return [
        {
            "x": random.normal(size=3).round(3).tolist(), "a": i / 2, "b": i, "label": i % 4, "ids": [i] * (1 + i % 3),
            "text": f'row {i}, with "quotes",\nand a second line é',
        }
        for i in range(first, first + count)
    ]  # fmt: skip


def write(path: Path, table: list[dict[str, Any]], *, group: int = 7) -> str:
    """Write rows to a file, in the format of its name; of CSV the columns of one value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path, row_group_size=group)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, [name for name, value in table[0].items() if not isinstance(value, list)], extrasaction="ignore"
            )
            writer.writeheader()
            writer.writerows(table)
    return str(path)
