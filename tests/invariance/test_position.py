"""Stopped anywhere and gone on with on another world, microbatch and number of loading processes: no sample is lost, none comes twice,
and whatever is drawn at random is drawn as if nothing had happened.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data.drawn import build, build_shards, folder, samples, shard
from invariance.seen import Jitter, Numbered
from pool import ranks
from safetensors.torch import load_file
from torch import Tensor

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.data import Source, jsonl, parquet
from dtrain.data.dataset import Dataset
from dtrain.data.digits import Digits
from dtrain.data.mixture import Mixture
from dtrain.data.stream import BLOCK_STEPS, Stream
from dtrain.data.synthetic import Synthetic
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens
from dtrain.model.seeds import derive
from dtrain.planned import BatchShape
from dtrain.resolve import resolve
from dtrain.result import OF_THE_MACHINE
from dtrain.train import train

BATCH = 12
ROWS: Any = {
    "inputs": "x",
    "targets": "y",
    "holdout": 0.1,
    "shift": False,
    "outputs": None,
    "pad": None,
    "length": None,
    "packing": "none",
    "sequence": None,
}
Segment = tuple[int, int, int]
"""(steps, ranks, microbatch) between two stops."""


class Place:
    """What a Stream asks of a mesh, for one rank of a world that is not there."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.data_ranks, self.batch_ranks, self.data_rank, self.device = ranks, ranks, rank, torch.device("cpu")

    def sum(self, values: Tensor) -> Tensor:
        return values


def streams(source: Callable[[], Source], ranks: int, microbatch: int, seed: int) -> list[Stream]:
    shape = BatchShape(BATCH, microbatch, ranks, BATCH // ranks // microbatch)
    return [Stream(source(), batch=shape, mesh=Place(ranks, rank), seed=seed, count=len) for rank in range(ranks)]  # type: ignore[arg-type]


def walk(source: Callable[[], Source], segments: list[Segment], *, seed: int = 5) -> Iterator[dict[str, Tensor]]:
    """The whole batch of every step; between two segments nothing is kept but what a checkpoint has."""
    kept = None
    for steps, world, microbatch in segments:
        made = streams(source, world, microbatch, seed)
        for stream in made if kept else ():
            stream.load_state_dict(json.loads(kept or ""))
        for _ in range(steps):
            parts = [part for stream in made for part in next(stream).microbatches]
            assert all(len(part["targets"]) == microbatch for part in parts)
            yield {name: torch.cat([part[name] for part in parts]) for name in ("inputs", "targets")}
        told = {json.dumps(stream.state_dict()) for stream in made}
        assert len(told) == 1, "all ranks say the same"
        kept = told.pop()
        for stream in made:
            stream.close()


def drawn(chance: random.Random) -> list[Segment]:
    segments = []
    for _ in range(5):
        ranks = chance.choice([1, 2, 3, 4, 6])
        local = BATCH // ranks
        steps = chance.choice(
            [chance.randint(1, 9), BLOCK_STEPS + chance.randint(-2, 2)]
        )  # inside a block, and across its edge
        segments.append((steps, ranks, chance.choice([size for size in range(1, local + 1) if local % size == 0])))
    return segments


@pytest.fixture
def sources(tmp_path: Path, corpus: Path) -> dict[str, Callable[[], Source]]:
    file = tmp_path / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint16))
    rows = [{"x": i, "y": 2 * i} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=9)
    flowers = folder(tmp_path / "flowers")
    shards = [shard(tmp_path / f"{first}.tar", samples(first, 15)) for first in (0, 15)]
    return {
        "text": lambda: Text(path=str(corpus), sequence=64, tokenizer="bytes", holdout=0.1, cache=None),
        "tokens": lambda: Tokens(
            path=str(file), holdout_path=None, holdout=0.1, vocab=50, sequence=16, dtype="uint16", cache=None
        ),
        "synthetic": lambda: Synthetic("classification", [3], 4, 0, 0, 100),
        "synthetic regression": lambda: Synthetic("regression", [64], 10, 0, 0, 100),
        "digits": lambda: Dataset(Digits()),
        "dataset": lambda: Dataset(Numbered(100), holdout=0.0),
        "dataset with augmentation": lambda: Dataset(Jitter(40), holdout=0.0),
        "dataset with a held-out part": lambda: Dataset(Numbered(37), holdout=0.3),
        "dataset smaller than a batch": lambda: Dataset(Numbered(5), holdout=0.0),
        "one sample": lambda: Dataset(Numbered(1), holdout=0.0),
        "jsonl": lambda: jsonl.build(**ROWS, path=str(tmp_path / "rows.jsonl"), cache=str(tmp_path)),
        "mixture": lambda: Mixture(
            of={
                "a": parquet.build(**ROWS, path=str(tmp_path / "rows.parquet"), cache=str(tmp_path)),
                "b": jsonl.build(**ROWS, path=str(tmp_path / "rows.jsonl"), cache=str(tmp_path)),
            },
            weights={"a": 0.7, "b": 0.3},
        ),
        "images": lambda: build(flowers, tmp_path, augment="crop_flip"),
        "webdataset": lambda: build_shards(shards, tmp_path, augment="crop_flip"),
        "parquet": lambda: parquet.build(**ROWS, path=str(tmp_path / "rows.parquet"), cache=str(tmp_path)),
    }


NAMES = (
    "text", "tokens", "synthetic", "synthetic regression", "digits", "dataset", "dataset with augmentation", "dataset with a held-out part", "dataset smaller than a batch", "one sample", "jsonl", "parquet", "mixture", "images", "webdataset",
)  # fmt: skip


@pytest.mark.often("1-*")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("walks", [1, 3])
def test_a_walk_with_stops_is_the_walk_without(walks: int, name: str, sources: dict[str, Callable[[], Source]]) -> None:
    chance = random.Random(name)
    for _ in range(walks):
        segments = drawn(chance)
        whole = walk(sources[name], [(sum(steps for steps, *_ in segments), 1, BATCH)])
        for step, (one, other) in enumerate(zip(whole, walk(sources[name], segments), strict=True)):
            assert torch.equal(one["inputs"], other["inputs"]) and torch.equal(one["targets"], other["targets"]), (
                segments,
                step,
            )


def test_every_pass_sees_every_sample_once(sources: dict[str, Callable[[], Source]]) -> None:
    """Batches straddle the ends of passes, and the held-out part never comes."""
    held = sources["dataset with a held-out part"]().holdout()
    assert held is not None
    kept = {int(value) for value in held.take(np.arange(len(held)), np.zeros(len(held), dtype=int))["inputs"]}
    seen = [
        int(value)
        for step in walk(sources["dataset with a held-out part"], drawn(random.Random(1)) * 3)
        for value in step["inputs"]
    ]
    for begin in range(0, len(seen) - 26, 26):
        assert set(seen[begin : begin + 26]) == set(range(37)) - kept


def test_going_on_reads_no_more_than_beginning() -> None:
    """However far the run has come: nothing is replayed."""
    asked = []

    class Counting(Dataset):
        def take(self, index: Any, epoch: Any) -> Any:
            asked.append(len(index))
            return super().take(index, epoch)

    (stream,) = streams(lambda: Counting(Numbered(10**9), holdout=0.0), 1, BATCH, 5)
    stream.load_state_dict({**stream.state_dict(), "seen": BATCH * 10**15})
    next(stream)
    assert asked == [1, BATCH]


JITTER = ("data=dataset", "data.dataset._target_=invariance.seen.Jitter", "data.dataset.length=37", "data.holdout=0.2")
SYNTHETIC = ("data=synthetic", "data.task=regression", "data.inputs=[4]", "data.outputs=1", "data.samples=30")
"""Reading a sample of a user's dataset seeds the generators of the process that reads it; these are read by a thread that draws nothing."""
WORDS = [
    "model._target_=invariance.seen.Sees", "data=dataset", "data.dataset._target_=invariance.seen.Numbered", "data.dataset.length=37", "data.holdout=0.2",
    "objective=regression", f"batch={BATCH}", "steps=11", "trust=[invariance]", "logger=[]", "hook=[]", "evaluate.every=3", "checkpoint.every=4",
]  # fmt: skip


@pytest.mark.campaign("kills")
def test_a_real_run_stopped_in_the_middle_of_a_pass_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    """One rank and two loading processes, then two ranks that accumulate and load by themselves."""
    seen = {}
    for name, words in {"first": ["data.workers=2", "stop_after=5"], "second": ["devices=2", "microbatch=3"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        env = {**os.environ, "SEEN": str(folder), "PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
        done = commands.run(*WORDS, f"out={tmp_path}/out", *words, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        seen[name] = {
            file.name: [number for line in file.read_text().splitlines() for number in json.loads(line)]
            for file in folder.iterdir()
        }
    assert list(seen["first"]) == ["0"] and set(seen["second"]) == {"0", "1"}
    steps = [seen["first"]["0"][i : i + BATCH] for i in range(0, 5 * BATCH, BATCH)]
    steps += [seen["second"]["0"][i : i + 6] + seen["second"]["1"][i : i + 6] for i in range(0, 36, 6)]
    assert [sum(map(len, ranks.values())) for ranks in seen.values()] == [5 * BATCH, 6 * BATCH], "nothing beside these"
    whole = walk(lambda: Dataset(Numbered(37), holdout=0.2), [(11, 1, BATCH)], seed=derive(0, "data"))
    assert steps == [step["inputs"].flatten().int().tolist() for step in whole]


def losses(out: Path, *words: str) -> list[float]:
    """Of every step under `out`, after the words were run on forked ranks."""
    said = ["model._target_=invariance.seen.Draws", *WORDS[WORDS.index("objective=regression") :], f"out={out}", *words]
    plan = resolve(compose(said), Cluster(gpus=0, cpus=2))
    ranks(plan.world, train, plan)
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("words", [(*JITTER, "devices=2"), (*SYNTHETIC, "microbatch=4")])
def test_what_a_users_model_and_data_draw_goes_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    """From Python's, numpy's and torch's generators, with held-out losses and hooks between, on the mesh it began on."""
    whole = losses(tmp_path / "whole", *words)
    losses(tmp_path / "parts", "stop_after=3", *words)
    losses(tmp_path / "parts", "stop_after=7", "evaluate.every=2", *words)
    assert losses(tmp_path / "parts", *words) == whole
    assert len(set(whole)) == 11


REMEMBERED = {
    "the loss scale, the average of the weights, momenta": (
        "model=mlp",
        *SYNTHETIC,
        "precision=fp16",
        "ema=0.9",
        "optim=sgd",
        "optim.momentum=0.9",
    ),
    "the balance of experts": (
        "model=moe",
        "model.layers=1",
        "model.width=16",
        "model.hidden=16",
        "data.task=next_token",
        "data=synthetic",
        "data.sequence=8",
    ),
    "orthogonal momenta": ("model=mlp", *SYNTHETIC, "optim=muon"),
    "factored moments": ("model=mlp", *SYNTHETIC, "optim=adafactor"),
    "statistics of batches": ("model._target_=invariance.seen.Normed", *SYNTHETIC),
}


@pytest.mark.parametrize("name", REMEMBERED)
def test_everything_that_accumulates_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Rows, and every number of the last checkpoint."""
    common = [
        "steps=9",
        "batch=8",
        "trust=[invariance]",
        "logger=[]",
        "hook=[]",
        "checkpoint.every=4",
        "evaluate.every=3",
        *REMEMBERED[name],
    ]

    def run(out: Path, *words: str) -> tuple[list[Any], list[dict[str, bytes]]]:
        plan = resolve(compose([*common, f"out={out}", *words]), Cluster(gpus=0, cpus=1))
        ranks(plan.world, train, plan)
        listed = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        rows = [{key: value for key, value in row.items() if key not in OF_THE_MACHINE} for row in listed]
        newest = max((out / "checkpoints").glob("step-*"))
        files = [load_file(file) for file in sorted(newest.glob("*/*.safetensors"))]
        return rows, [{name: tensor.numpy().tobytes() for name, tensor in file.items()} for file in files]

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", "stop_after=5")
    rows, files = run(tmp_path / "parts")
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows == whole[0]
    assert files == whole[1] and all(files) and files


def hurried(plan: Any) -> Any:
    """A start by a clock that runs a thousand times as fast, so that its seconds are seen in any sum."""
    real = time.perf_counter
    with mock.patch("time.perf_counter", lambda: 1000 * real()):
        return train(plan)


def test_a_run_that_died_after_its_last_commit_says_the_same_result(tmp_path: Path) -> None:
    """No step runs any more; the seconds of all starts, up to what was committed of each, are added up."""
    common = ["model=mlp", *SYNTHETIC, "steps=6", "logger=[]", "checkpoint.every=2", f"out={tmp_path}"]

    def run(start: Callable[..., Any], *words: str) -> Any:
        return ranks(1, start, resolve(compose([*common, *words]), Cluster(gpus=0, cpus=1)))[0]

    def committed(step: int) -> float:
        (commit,) = (tmp_path / "checkpoints").glob(f"step-{step:08}/*/COMMIT.json")
        return float(json.loads(commit.read_text())["facts"]["seconds"])

    stopped = run(hurried, "stop_after=4")
    before = committed(4)
    finished = run(train)
    assert 0 < before < stopped.wall_seconds
    assert before < finished.wall_seconds < before + stopped.wall_seconds
    again = run(train)
    assert before < committed(6) < again.wall_seconds
    assert (again.status, again.step, again.loss, again.metrics) == (
        finished.status,
        finished.step,
        finished.loss,
        finished.metrics,
    )
