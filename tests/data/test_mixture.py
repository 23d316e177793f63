"""A mixture: shares that are exact up to any position, each source in its own order, and the sources that were there."""

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import torch
from data.drawn import build as build_images
from data.drawn import build_shards, folder, shard
from data.drawn import samples as images_of
from data.files import rows, write
from data.test_rows import BUILD, everything
from data.test_stream import Numbers, stream, walk
from torch.utils.data import TensorDataset

from dtrain.data import whole
from dtrain.data.dataset import Dataset
from dtrain.data.mixture import PERIOD, Mixture, _number, counts, pattern
from dtrain.data.order import _mix64, samples
from dtrain.data.text import Text
from dtrain.errors import WordsError
from dtrain.planned import BatchShape

WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}


def numbers(**lengths: int) -> dict[str, Any]:
    return {name: Numbers(length) for name, length in lengths.items()}


def mixture(weights: Any = None, **lengths: int) -> Mixture:
    return Mixture(of=numbers(**(lengths or {"a": 50, "b": 7, "c": 1000})), weights=weights or WEIGHTS)


def owners(made: Mixture, count: int) -> np.ndarray[Any, Any]:
    """The source of each of the first positions."""
    return np.searchsorted(made.ends, made.order(np.arange(count), seed=1)[0], side="right")


def test_up_to_any_of_100_000_positions_the_shares_are_exact() -> None:
    owner = owners(mixture(), 100_000)
    for number, weight in enumerate(WEIGHTS.values()):
        given = np.cumsum(owner == number)
        assert abs(given - weight * np.arange(1, 100_001)).max() < 1
    assert np.bincount(owner).tolist() == [70_000, 20_000, 10_000]


@pytest.mark.parametrize("seed", range(8))
def test_shares_of_any_number_of_sources_are_exact_to_less_than_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = [int(weight) for weight in random.integers(1, 60, random.integers(1, 12))]
    parts = counts(weights)
    owner, before = pattern(tuple(parts))
    for number, weight in enumerate(weights):
        given = np.cumsum(owner == number)
        assert abs(given - weight / sum(weights) * np.arange(1, len(owner) + 1)).max() < 1
        assert before[owner == number].tolist() == [*range(parts[number])]


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([1], [1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([3, 1, 2], [3, 1, 2]),
        ([0.5, 0.25, 0.25], [2, 1, 1]),
        ([1e-3, 1], [1, 1000]),
    ],
)
def test_a_period_is_no_longer_than_the_weights_need(weights: list[float], parts: list[int]) -> None:
    assert counts(weights) == parts


def test_weights_with_many_digits_are_rounded_to_parts_of_the_longest_period() -> None:
    weights = [0.3333333333, 0.1234567891, 0.5432098776]
    parts = counts(weights)
    assert sum(parts) == PERIOD and max(abs(np.array(parts) / PERIOD - weights)) <= 1 / PERIOD


def test_each_source_goes_through_its_own_order_and_epochs() -> None:
    made = mixture()
    index, epoch = made.order(np.arange(3000), seed=4)
    owner, begins = np.searchsorted(made.ends, index, side="right"), [0, 50, 57]
    for number, name in enumerate(WEIGHTS):
        mine = owner == number
        length = len(made.of[name])
        sample, passes = samples(np.arange(mine.sum()), n=length, seed=_mix64(4 ^ _number(name)))
        assert (index[mine] - begins[number]).tolist() == sample.tolist() and epoch[mine].tolist() == passes.tolist()
    assert epoch[owner == 1].max() == 600 // 7 and epoch[owner == 2].max() == 0


def test_another_source_changes_the_order_of_none() -> None:
    """Nor do its weight and its place: each is seeded by its name."""
    one, two = mixture(), mixture({"a": 1, "z": 2, "b": 1, "c": 1}, a=50, z=9, b=7, c=1000)
    seen = []
    for made in one, two:
        index, _ = made.order(np.arange(5000), seed=4)
        number = [*made.of].index("b")
        begin = int(made.ends[number - 1])
        seen.append([value - begin for value in index.tolist() if begin <= value < begin + 7])
    shorter = min(map(len, seen))
    assert shorter >= 900 and seen[0][:shorter] == seen[1][:shorter]


def test_a_position_does_not_depend_on_those_beside_it() -> None:
    made = mixture()
    whole = made.order(np.arange(1000), seed=3)
    scattered = np.random.default_rng(0).permutation(1000)
    for one, other in zip(made.order(scattered, seed=3), whole, strict=True):
        assert one.tolist() == other[scattered].tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_is_the_same_on_any_ranks(ranks: int) -> None:
    whole = walk(stream(mixture(), BatchShape(12, 12, 1, 1)), 30)
    shape = BatchShape(12, 2, ranks, 12 // ranks // 2)
    shares = [walk(stream(mixture(), shape, rank=rank), 30) for rank in range(ranks)]
    assert [list(itertools.chain(*(share[step] for share in shares))) for step in range(30)] == whole


def test_a_sample_is_that_of_its_source() -> None:
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10)
    made = Mixture(of={"a": TensorDataset(x, y), "b": TensorDataset(x + 100, y + 5)}, weights={"a": 1, "b": 3})
    batch = made.take(*made.order(np.arange(40), seed=2))
    assert int((batch["inputs"][:, 0] >= 100).sum()) == 30
    for row, target in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True):
        assert row == [2 * (target % 100), 2 * target + 1] if row[0] < 100 else row[0] == 100 + 2 * (target - 5)
    assert made.facts == {"inputs": [2], "kind": "float32", "outputs": 15, "vocab": 15}
    assert len(made) == 18 and made.loading == "block" and not made.dense


def test_what_is_held_out_of_each_is_held_out(tmp_path: Path) -> None:
    x = torch.arange(40.0).view(20, 2)
    one, two = Dataset(TensorDataset(x, x), holdout=0.2), Dataset(TensorDataset(-x, -x), holdout=0.1)
    made = Mixture(of={"a": one, "b": two}, weights={"a": 1, "b": 1})
    held = made.holdout()
    assert held and len(held) == 6 and held.holdout() is None
    batch = held.take(np.arange(6), np.zeros(6, int))
    seen = made.take(*made.order(np.arange(400), seed=1))["inputs"]
    assert not {*map(tuple, batch["inputs"].tolist())} & {*map(tuple, seen.tolist())}
    assert (
        Mixture(of=dict.fromkeys("ab", Dataset(TensorDataset(x, x), holdout=0)), weights={"a": 1, "b": 1}).holdout()
        is None
    )


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (TensorDataset(torch.zeros(4, 3), torch.zeros(4)), r"the inputs of a are \[2\], those of b \[3\]"),
        (TensorDataset(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4)), "float32, those of b int64"),
    ],
)
def test_sources_that_do_not_fit_are_named(other: Any, sentence: str) -> None:
    made = Mixture(of={"a": TensorDataset(torch.zeros(4, 2), torch.zeros(4)), "b": other}, weights={"a": 1, "b": 1})
    with pytest.raises(WordsError, match=sentence):
        _ = made.facts
    with pytest.raises(WordsError, match="a batch needs one shape and type"):
        made.take(*made.order(np.arange(4), seed=0))


@pytest.mark.parametrize("weights", [{"a": 0, "b": 1}, {"a": -1, "b": 1}, {"a": 1}, {"a": 1, "b": 1, "c": 1}])
def test_each_source_has_a_weight_above_0(weights: dict[str, float]) -> None:
    with pytest.raises(WordsError, match="give each of a, b a weight above 0"):
        Mixture(of=numbers(a=3, b=4), weights=weights)


def test_text_of_a_mixture_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 99)
    text = Text(path=str(tmp_path / "a.txt"), sequence=8, tokenizer="bytes", holdout=0, cache=str(tmp_path))
    made = Mixture(of={"a": text}, weights={"a": 1}, sequence=8, tokenizer="bytes")
    assert made.decode(made.encode("abc")) == "abc" and made.facts == {"vocab": 256}


def files(folder: Path, *, grown: bool = False) -> Mixture:
    """Rows of two files, of which one may have more than before."""
    words = {"inputs": ["a"], "targets": "label", "holdout": 0.2, "outputs": 4, "cache": str(folder / "cache")}
    a, b = (str(folder / name) for name in ("a.jsonl", "b.jsonl"))
    write(folder / "a.jsonl", rows(80 if grown else 60))
    write(folder / "b.jsonl", rows(30, first=500))
    return Mixture(
        of={name: BUILD["jsonl"](path=path, **words) for name, path in (("a", a), ("b", b))}, weights={"a": 2, "b": 1}
    )


def test_a_run_goes_on_with_the_samples_that_were_there_when_a_source_has_grown(tmp_path: Path) -> None:
    shape = BatchShape(6, 6, 1, 1)
    whole = walk(stream(files(tmp_path), shape), 40)
    begun = stream(files(tmp_path), shape)
    assert walk(begun, 15) == whole[:15]
    then = everything(files(tmp_path))
    source = files(tmp_path, grown=True)
    held = source.holdout()
    after = stream(source, shape)
    after.load_state_dict(begun.state_dict())
    (note,) = after.notes
    assert note.startswith("data.of.a: 20 rows were added since this run began, which goes on with the 60 that it has.")
    assert walk(after, 25) == whole[15:]
    assert held is source.holdout() and everything(source) == then
    again = stream(files(tmp_path, grown=True), shape)
    again.load_state_dict(after.state_dict())
    assert again.notes == after.notes, "and so does each later start"


def test_a_source_that_changed_otherwise_is_other_data(tmp_path: Path) -> None:
    shape = BatchShape(6, 6, 1, 1)
    begun = stream(files(tmp_path), shape)
    walk(begun, 3)
    files(tmp_path)
    table = rows(80)
    table[3]["a"] = 77.5
    words = {"inputs": ["a"], "targets": "label", "holdout": 0.2, "outputs": 4, "cache": str(tmp_path / "cache")}
    a, b = write(tmp_path / "a.jsonl", table), str(tmp_path / "b.jsonl")
    changed = Mixture(
        of={name: BUILD["jsonl"](path=path, **words) for name, path in (("a", a), ("b", b))}, weights={"a": 2, "b": 1}
    )
    with pytest.raises(WordsError, match="trained on other data"):
        stream(changed, shape).load_state_dict(begun.state_dict())


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_rows_of_a_new_file_are_left_to_a_new_run(format: str, tmp_path: Path) -> None:
    words = {"inputs": ["a", "b"], "targets": "label", "holdout": 0.2, "outputs": 4, "cache": str(tmp_path / "cache")}
    write(tmp_path / f"rows/1.{format}", rows())
    before = BUILD[format](path=f"{tmp_path}/rows", **words)
    write(tmp_path / f"rows/2.{format}", rows(20, first=60))
    after = BUILD[format](path=f"{tmp_path}/rows", **words)
    held = after.holdout()
    assert after.fingerprint != before.fingerprint and after.as_of("rows-60-0") is None
    assert after.as_of(before.fingerprint) and after.fingerprint == before.fingerprint
    assert everything(after) == everything(before) and held is after.holdout()
    assert [each.tolist() for each in after.order(np.arange(99), seed=1)] == [
        each.tolist() for each in before.order(np.arange(99), seed=1)
    ]


SMALL = (
    "model=mlp", "objective=classification", "batch=6", "steps=400", "hook=[]", "logger=[]", "checkpoint.every=20", "evaluate.every=0",
    "data=mixture", "data.weights={a: 0.7, b: 0.3}",
)  # fmt: skip


@pytest.mark.campaign("kills")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("strategy=single",), marks=pytest.mark.slow),
        pytest.param(("strategy=ddp", "devices=2"), marks=pytest.mark.slow),
        ("strategy=ddp", "devices=3"),
    ],
)
def test_a_run_that_is_killed_five_times_is_the_untouched_one(words: tuple[str, ...], tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", rows()), write(tmp_path / "b.parquet", rows(37, first=100))
    of = f"data.of={{a: {{data: jsonl, path: {a}, inputs: x, targets: label}}, b: {{data: parquet, path: {b}, inputs: x, targets: label}}}}"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    whole = commands.run(*SMALL, of, *words, f"out={tmp_path}/whole", env=env)
    assert whole.returncode == 0, whole.stderr
    kills = 0
    while True:
        process = commands.Forked(
            [*commands.COMMAND, *SMALL, of, *words, f"out={tmp_path}/killed"],
            env=env,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            newest = len([*(tmp_path / "killed/checkpoints").glob("step-*/*/COMMIT.json")])
            if kills < 5 and newest and lines(tmp_path / "killed") > 60 * (kills + 1):
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
        process.wait()
        if process.returncode != -signal.SIGKILL:
            break
    assert (process.returncode, kills) == (0, 5)
    # sums of three ranks are rounded by the order in which they are added, which starts anew with each start
    exact = 1e-5 if "devices=3" in words else 0
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "whole"), rel=exact, abs=0)


def lines(out: Path) -> int:
    return (out / "metrics.jsonl").read_text().count("\n") if (out / "metrics.jsonl").exists() else 0


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_whole_sources_of_every_kind_draw_nothing(tmp_path: Path) -> None:
    drawn = {"augment": "crop_flip", "holdout": 0}
    shards = [shard(tmp_path / "0.tar", images_of(0, 6))]
    flowers = folder(tmp_path / "flowers", 2)
    kinds: list[Any] = [
        lambda: build_images(flowers, tmp_path / "cache", **drawn),
        lambda: build_shards(shards, tmp_path / "cache", **drawn),
        lambda: Dataset(TensorDataset(torch.zeros(6, 2), torch.zeros(6)), transform=_moved, holdout=0),
    ]
    for kind in kinds:
        index = np.arange(6)
        for made in (kind, lambda kind=kind: Mixture(of={"a": kind(), "b": kind()}, weights={"a": 1, "b": 1})):
            passes = [made().take(index, np.full(6, epoch))["inputs"] for epoch in (0, 1)]
            assert not torch.equal(*passes), "training draws"
            passes = [whole(made()).take(index, np.full(6, epoch))["inputs"] for epoch in (0, 1)]
            assert torch.equal(*passes)
            if kind is kinds[-1]:
                assert not passes[0].any()


def _moved(sample: Any, generator: torch.Generator | None) -> Any:
    return sample if generator is None else (sample[0] + torch.rand(2, generator=generator), sample[1])
