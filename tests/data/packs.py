"""Documents of several lengths, without the token 0, in a file, packed and one in each padded row: a module of its own, for ranks that are forked."""

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, WINDOW = 13, 24


def documents(count: int = 40, *, longest: int = WINDOW, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = [*generator.integers(1, longest + 1, count - 1).tolist(), longest]
    return [generator.integers(1, VOCAB, length).tolist() for length in lengths]


def written(path: Path, rows: list[list[int]]) -> str:
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return str(path)


def jsonl(path: str, **given: Any) -> dict[str, Any]:
    """The part of data of such a file: packed, unless `given` says otherwise."""
    return {
        "_target_": "dtrain.data.jsonl.build", "path": path, "inputs": "input_ids", "targets": "input_ids", "holdout": 0.0, "shift": True,
        "outputs": VOCAB, "pad": 0, "length": None, "packing": "pack", "sequence": WINDOW, "cache": f"{path}.cache",
    } | given  # fmt: skip


def padded(path: str, **given: Any) -> dict[str, Any]:
    return jsonl(path, packing="none", sequence=None, length=WINDOW, **given)
