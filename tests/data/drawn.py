"""Small images, as files and in tar shards."""

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dtrain.data import images, webdataset

WORDS: dict[str, Any] = {
    "holdout_path": None, "holdout": 0.2, "size": 8, "colors": "rgb", "fit": "crop", "centre": 0.875,
    "augment": "none", "scale": [0.08, 1.0], "normalize": "none", "seed": 5, "workers": 0,
}  # fmt: skip


def build(path: Any, cache: Path, **given: Any) -> Any:
    return images.build(
        **{**WORDS, "path": str(path), "image": "image", "label": "label", "cache": str(cache), **given}
    )


def build_shards(path: Any, cache: Path, **given: Any) -> Any:
    words = {**WORDS, "path": path if isinstance(path, list) else str(path), "image": "auto", "label": "cls"}
    return webdataset.build(**{**words, "cache": str(cache), **given})


def drawn(number: int, width: int = 12, height: int = 10) -> Image.Image:
    """An image with soft edges, as photographs have, another for each number."""
    small = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(number: int, format: str = "JPEG", **given: Any) -> bytes:
    file = io.BytesIO()
    drawn(number, **given).save(file, format)
    return file.getvalue()


def folder(root: Path, count: int = 12, classes: Iterable[str] = ("rose", "daisy", "tulip")) -> Path:
    """Class folders of `count` images each."""
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / name / f"{number}.jpg").write_bytes(encoded(100 * place + number))
    return root


def columns(path: Path, count: int) -> str:
    """A Parquet file with a column of images and one of classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"image": [encoded(number) for number in range(count)], "label": [number % 2 for number in range(count)]}
    pq.write_table(pa.table(table), path, row_group_size=5)
    return str(path)


def shard(path: Path, members: Mapping[str, bytes], format: int = tarfile.PAX_FORMAT) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def samples(first: int, count: int) -> dict[str, bytes]:
    """Members of `count` samples: an image, its class, and what is said of it."""
    members = dict[str, bytes]()
    for number in range(first, first + count):
        members[f"{number:04d}.jpg"] = encoded(number)
        members[f"{number:04d}.cls"] = b"%d" % (number % 3)
        members[f"{number:04d}.json"] = b'{"about": {"kind": "kind %d"}}' % (number % 3)
    return members
