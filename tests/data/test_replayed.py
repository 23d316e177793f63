"""A stream has a position for each rank, from which it goes on exactly; all ranks end together."""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import commands
import datasets
import launching
import numpy as np
import pytest
import torch
from data import streamed
from data.files import rows, write
from killing import leavings, survive
from pool import ranks
from small import on_mesh

from dtrain.__main__ import main
from dtrain.data.replayed import Streamed
from dtrain.data.stream import Stream
from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.planned import BatchShape

NOTHING = {
    "path": None, "holdout_dataset": None, "inputs": None, "targets": None, "shift": False, "outputs": None, "pad": None,
    "length": None, "collate": None,
}  # fmt: skip
TWO = BatchShape(4, 2, 2, 1)


def source(stream: Any, **changed: Any) -> Streamed:
    return Streamed(**{"stream": stream} | NOTHING | changed)


class Rank:
    """A rank of a world that is not there."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.data_rank, self.data_ranks, self.batch_ranks, self.device = rank, ranks, ranks, torch.device("cpu")

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [[rank, value[1]] for rank in range(self.data_ranks)]


_open = list[Stream]()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def walk(stream: Any, rank: int = 0, of: int = 1, **changed: Any) -> Stream:
    made, mesh = source(stream, **changed), Rank(rank, of)
    shape = BatchShape(2 * of, 2, of, 1)
    made.begin(rank, of, shape.local)
    try:
        walked = Stream(made, batch=shape, mesh=mesh, seed=0, count=lambda batch: len(batch["targets"]))  # type: ignore[arg-type]
    except WordsError:
        made.close()
        raise
    _open.append(walked)
    return walked


def numbers(made: Stream, steps: int) -> list[int]:
    taken = []
    for _ in range(steps):
        assert not made.ends()
        taken += [int(each) for part in next(made).microbatches for each in part["inputs"][:, 0]]
    return taken


@pytest.mark.parametrize("make", [streamed.make, streamed.plain])
def test_a_rank_reads_its_shard_in_order(make: Any) -> None:
    assert numbers(walk(make), 5) == list(range(10))
    assert numbers(walk(make, 1, 3), 3) == [1, 4, 7, 10, 13, 16]


@pytest.mark.parametrize("make", [streamed.make, streamed.plain])
def test_it_goes_on_exactly(make: Any) -> None:
    made = walk(make)
    numbers(made, 7)
    assert not made.ends()  # the next one is at hand already
    state = json.loads(json.dumps(made.state_dict()))
    again = walk(make)
    again.load_state_dict(state)
    assert numbers(again, 3) == list(range(14, 20))
    assert state["marks"] == ([[7, {"at": 14}]] if make is streamed.make else [[0, None]])
    assert ("from its own state" if make is streamed.make else "by reading again") in made.notes[0]


@pytest.mark.parametrize("make", [streamed.make, streamed.plain])
def test_it_goes_back_and_skips(make: Any) -> None:
    """As on_spike=rewind and the end of a run do."""
    made = walk(make)
    numbers(made, 12)
    made.skip([10], seen=8)
    assert numbers(made, 3) == [8, 9, 12, 13, 14, 15]
    assert [sample["inputs"][0, 0].item() for _, _, sample in made.alone(16)] == [16, 17]
    assert numbers(made, 1) == [16, 17]


def test_another_number_of_ranks_is_refused() -> None:
    state = walk(streamed.make, 0, 2).state_dict()
    with pytest.raises(WordsError):
        walk(streamed.make).load_state_dict(state)
    with pytest.raises(
        WordsError, match=r"of 2 data-parallel rank\(s\).*here are 1\. Type nodes= and devices= that give 2"
    ):
        made = walk(streamed.make)
        made.load_state_dict({**state, "batch": 2})


def test_all_ranks_end_before_the_step_that_one_cannot_do() -> None:
    def work(mesh: Mesh) -> list[Any]:
        made = source(streamed.uneven)
        made.begin(mesh.data_rank, mesh.data_ranks, TWO.local)
        stream = Stream(made, batch=TWO, mesh=mesh, seed=0, count=lambda batch: len(batch["targets"]))
        steps = 0
        while not stream.ends():
            next(stream)
            steps += 1
        stream.close()
        return [steps, stream.over, stream.seen, len(stream.state_dict()["marks"])]

    assert on_mesh(work, dp_replicate=2) == [[4, "the stream has ended after 16 samples", 16, 2]] * 2


def test_a_stream_that_cannot_be_divided_is_refused() -> None:
    def alone() -> Iterator[Any]:
        return streamed.plain(0, 1)

    assert numbers(walk(alone), 2) == [0, 1, 2, 3]
    with pytest.raises(WordsError, match=r"is 1 shard, and 2 data-parallel ranks need one each.*make\(shard, shards\)"):
        walk(alone, 0, 2)
    with pytest.raises(WordsError, match="returned an int, which cannot be iterated over"):
        walk(lambda shard, shards: 3)
    with pytest.raises(WordsError, match="fewer than 2 samples, which is one batch"):
        walk(partial(streamed.plain, count=1))
    with pytest.raises(WordsError, match="data=stream reads one stream"):
        source(None)


def test_an_error_of_the_stream_is_raised_when_its_step_is_due() -> None:
    def torn(shard: int, shards: int) -> Iterator[Any]:
        yield from itertools.islice(streamed.plain(shard, shards), 6)
        raise RuntimeError("the connection is gone")

    made = walk(torn)
    assert numbers(made, 3) == list(range(6))
    with pytest.raises(RuntimeError, match="the connection is gone"):
        made.ends()


def table(count: int, shards: int) -> Any:
    def each(of: list[int]) -> Iterator[dict[str, Any]]:
        for shard in of:
            for number in range(shard, count, shards):
                yield {"x": [float(number), 1.0], "y": [0.5]}

    return datasets.IterableDataset.from_generator(each, gen_kwargs={"of": list(range(shards))})


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_dataset_of_hugging_face_goes_on_exactly(shuffled: bool) -> None:
    """From a fork: it starts threads."""
    ranks(1, lambda: _of_hugging_face(shuffled))


def _of_hugging_face(shuffled: bool) -> None:
    """With a buffer its own state loses rows, so it is read again."""
    whole = table(40, 4).shuffle(seed=1, buffer_size=8) if shuffled else table(40, 4)
    keys = {"inputs": "x", "targets": "y"}
    theirs = [int(each["x"][0]) for each in whole.shard(num_shards=2, index=1, contiguous=False)]
    straight = numbers(walk(whole, 1, 2, **keys), 10)
    assert straight == theirs and sorted(straight) == sorted([*range(1, 40, 4), *range(3, 40, 4)])
    made = walk(whole, 1, 2, **keys)
    numbers(made, 4)
    state = json.loads(json.dumps(made.state_dict()))
    assert (state["marks"][1][1] is None) == shuffled
    again = walk(whole, 1, 2, **keys)
    again.load_state_dict(state)
    assert numbers(again, 6) == straight[8:]
    assert again.ends()
    with pytest.raises(WordsError, match=r"has 4 shard\(s\), and 5 data-parallel ranks need one each"):
        walk(whole, 0, 5, **keys)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_files_are_divided_among_ranks(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        write(tmp_path / f"{name}.{format}", rows(10, first=10 * ord(name)))
    path = str(tmp_path / f"*.{format}")

    def read() -> list[int]:
        made = walk(None, 1, 2, path=path, inputs="x", targets="b")
        return [int(n) for _ in range(5) for part in next(made).microbatches for n in part["targets"]]

    assert ranks(1, read) == [[row["b"] for row in rows(10, first=10 * ord("b"))]]
    words = ["data=stream", f"data.path={path}", "data.inputs=x", "data.targets=b", "model=mlp", "objective=regression"]
    assert main([*words, "devices=4", "strategy=ddp", f"out={tmp_path / 'out'}"]) == 3
    assert "3 file(s) for 4 data-parallel ranks, each of which reads files of its own. Type devices=" in (
        capsys.readouterr().err
    )


def test_a_stream_is_no_source_of_a_mixture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "data=mixture", "data.of={a: {data: stream, path: x}}", "data.weights={a: 1}"]) == 2
    assert "data.of.a.data=stream: there is no such source for a mixture" in capsys.readouterr().err


def test_a_stream_is_no_set_to_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=mlp",
        "objective=regression",
        "data=stream",
        "data.path=a.jsonl",
        "evaluate.sets={b: {path: b.jsonl}}",
    ]
    assert main(["plan", *words]) == 2
    assert "evaluate.sets.b: data=stream has no index. Type evaluate.sets.b.data=" in capsys.readouterr().err


WORDS = (
    "model._target_=data.streamed.Counting", "model.rows=4000", "objective=regression", "data=stream", "trust=[data]",
    "data.stream.count=4000", "batch=4", "hook=[]",
)  # fmt: skip
PATHS = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])


def counts(left: dict[str, Any]) -> dict[float, int]:
    """How many rows the model of the last checkpoint has seen how often."""
    (seen,) = (each["model.seen"] for each in left["tensors"].values() if "model.seen" in each)
    values, times = np.unique(np.frombuffer(seen, np.float32), return_counts=True)
    return dict(zip(values.tolist(), times.tolist(), strict=True))


def test_a_run_ends_with_its_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    words = ["data.stream._target_=data.streamed.make", "data.stream.count=22", f"out={tmp_path / 'run'}", "steps=50"]
    for _ in range(2):
        done = commands.run(*WORDS, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "finished after 5 steps" in done.stdout and "the stream has ended after 20 samples" in done.stdout
        assert "data: a stream has no index: dtrain does not shuffle it" in done.stdout


@pytest.mark.often("ddp-make")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("make", ["make", "plain"])
@pytest.mark.parametrize("strategy", [pytest.param("single", marks=pytest.mark.slow), "ddp"])
def test_killed_ten_times_each_row_comes_once(
    make: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model counts its rows in a buffer that the checkpoint holds."""
    monkeypatch.setattr(launching, "WORDS", ("log.every=1", "logger=[]"))
    words = [*WORDS, f"data.stream._target_=data.streamed.{make}", "steps=900", "checkpoint.every=20", "launcher=local"]
    words += ["launcher.restarts=1000", f"strategy={strategy}", *["devices=2"] * (strategy == "ddp")]
    survive(words, tmp_path / "one", kills=0, seed=0)
    killed = survive(words, tmp_path / "killed", kills=10, seed=1)
    assert sum(killed.values()) >= 10
    mine, other = leavings(tmp_path / "killed"), leavings(tmp_path / "one")
    assert mine == other and mine["step"] == 900
    assert mine["facts"]["stream"]["seen"] == 3600
    assert counts(mine) == {0.0: 400, (1.0 if strategy == "single" else 0.5): 3600}
