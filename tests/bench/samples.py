"""Samples a second of dtrain's loading, and of a DataLoader written by hand with the same decoding and the same number of
processes, in turn.

OMP_NUM_THREADS=1 python tests/bench/samples.py [processes] [rounds]
"""

import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dtrain.data import images, webdataset
from dtrain.data.pixels import Form
from dtrain.data.stream import Stream
from dtrain.data.text import Text
from dtrain.planned import BatchShape

BATCH, STEPS, FIRST = 64, 60, 4
"""Steps that are timed, after the first."""
SIDE, SEQUENCE = 224, 1024
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


class OneRank:
    data_ranks = batch_ranks = 1
    data_rank = 0
    device = torch.device("cpu")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


class Folder:
    """Images, as a Dataset of torch."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(root.rglob("*.jpg"))
        self.form = Form((SIDE, SIDE), 3, "crop", 0.875, **IMAGENET, scale=(0.08, 1.0))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        out = np.empty((3, SIDE, SIDE), np.float32)
        self.form.read(self.files[index].read_bytes(), out, None)
        return torch.from_numpy(out), int(self.files[index].parent.name)


class Documents:
    """Texts of a Parquet file as bytes, cut or filled to one length, as a Dataset of torch."""

    def __init__(self, file: Path) -> None:
        self.texts = pq.read_table(file).column("text")

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = self.texts[index].as_py().encode()[: SEQUENCE + 1]
        row = torch.zeros(SEQUENCE + 1, dtype=torch.int64)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return row[:-1], row[1:]


def photographs(root: Path, count: int = 2000) -> None:
    """jpegs of 320x240 pixels of some noise, in ten classes."""
    random = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        pixels = np.asarray(small.resize((320, 240), Image.Resampling.BICUBIC)) + random.integers(
            -12, 12, (240, 320, 3)
        )
        folder = root / str(number % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=85)


def shards(folder: Path, photos: Path, count: int = 4) -> None:
    """The same photographs and their classes in tar files."""
    folder.mkdir()
    files = sorted(photos.rglob("*.jpg"))
    for number in range(count):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for index, file in enumerate(files[number::count]):
                for end, data in (("jpg", file.read_bytes()), ("cls", file.parent.name.encode())):
                    member = tarfile.TarInfo(f"{index:05d}.{end}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def texts(file: Path, count: int = 20_000) -> None:
    sources = "".join(path.read_text(errors="replace") for path in sorted(Path(tempfile.__file__).parent.glob("*.py")))
    begins = np.random.default_rng(0).integers(0, len(sources) - 2 * SEQUENCE, count).tolist()
    pq.write_table(pa.table({"text": [sources[at : at + SEQUENCE + 1] for at in begins]}), file, row_group_size=1000)


def rate(batches: Iterator[Any], steps: int) -> float:
    for _ in range(FIRST):
        next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return steps * BATCH / (time.perf_counter() - began)


def by_hand(dataset: Any, processes: int, steps: int) -> float:
    loader = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=processes, drop_last=True, persistent_workers=processes > 0
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    return rate(endless(), steps)


def ours(source: Any, steps: int) -> float:
    stream = Stream(source, batch=BatchShape(BATCH, BATCH, 1, 1), mesh=OneRank(), seed=0, count=len)  # type: ignore[arg-type]
    try:
        return rate(stream, steps)
    finally:
        stream.close()
        if "_processes" in vars(source):
            source._processes.close()


def main(processes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        photographs(root / "images")
        shards(root / "shards", root / "images")
        texts(root / "a.parquet")
        words: Any = {
            "holdout_path": None,
            "holdout": 0,
            "size": SIDE,
            "colors": "rgb",
            "seed": 0,
            "workers": processes,
        }
        words |= {
            "cache": str(root),
            "fit": "crop",
            "centre": 0.875,
            "augment": "none",
            "scale": [0.08, 1.0],
            "normalize": "imagenet",
        }
        kinds: dict[str, Any] = {
            "images": (
                lambda: Folder(root / "images"),
                lambda: images.build(**words, path=str(root / "images"), image="image", label="label"),
                STEPS,
            ),
            "webdataset, beside the files": (
                lambda: Folder(root / "images"),
                lambda: webdataset.build(**words, path=str(root / "shards" / "*.tar"), image="jpg", label="cls"),
                STEPS,
            ),
            "text": (
                lambda: Documents(root / "a.parquet"),
                lambda: Text(
                    path=str(root / "a.parquet"), column="text", sequence=SEQUENCE, tokenizer="bytes", holdout=0, cache=str(root)
                ),
                10 * STEPS,
            ),
        }  # fmt: skip
        for kind, (theirs, mine, steps) in kinds.items():
            pairs = [(by_hand(theirs(), processes, steps), ours(mine(), steps)) for _ in range(rounds)]
            ratios = sorted(b / a for a, b in pairs)
            hand, here = (median(column) for column in zip(*pairs, strict=True))
            print(
                f"{kind}: by hand {hand:.0f}/s, dtrain {here:.0f}/s, {median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], "2", "5"][:2]))
