"""data=webdataset: members of tar shards as samples, in any order."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.drawn import build_shards, encoded, samples, shard
from small import plan

from dtrain.data import pixels
from dtrain.launcher import preflight


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return [shard(tmp_path / f"{number:03d}.tar", samples(number * 250, 250)) for number in range(4)]


def take(source: Any, index: Any, epoch: int = 0) -> Any:
    return source.take(np.array(index), np.full(len(index), epoch))


def test_a_thousand_members_in_any_order_are_what_tarfile_gives(shards: list[str], tmp_path: Path) -> None:
    source = build_shards(f"{tmp_path}/{{000..003}}.tar", tmp_path, holdout=0)
    there = list[bytes]()
    for path in shards:
        with tarfile.open(path) as archive:
            there += [archive.extractfile(name).read() for name in archive.getnames() if name.endswith(".jpg")]  # type: ignore[union-attr]
    assert len(source) == len(there) == 1000
    order = np.random.default_rng(0).permutation(1000)
    assert source._decoder.images.read(order) == [there[number] for number in order]
    batch = take(source, order)
    places = source.original(order)
    out = np.empty((3, 8, 8), np.float32)
    for row, number in enumerate(places.tolist()):
        source._decoder.form.read(there[number], out, None)
        assert np.array_equal(batch["inputs"][row].numpy(), out)
    assert batch["targets"].tolist() == [number % 3 for number in places.tolist()]


@pytest.mark.campaign("commands")
def test_processes_read_what_the_rank_would(shards: list[str], tmp_path: Path) -> None:
    mine = take(build_shards(shards, tmp_path, augment="crop_flip"), range(20), 3)
    source = build_shards(shards, tmp_path, augment="crop_flip", workers=2)
    try:
        batch = take(source, range(20), 3)
        assert all(torch.equal(batch[name], mine[name]) for name in mine)
    finally:
        source._processes.close()


def test_shards_held_out_have_the_classes_of_training(shards: list[str], tmp_path: Path) -> None:
    source = build_shards(shards[:2], tmp_path, holdout_path=shards[3], label="json.about.kind")
    held = source.holdout()
    assert (len(source), len(held), source.classes) == (500, 250, ["kind 0", "kind 1", "kind 2"])
    numbers = held.original(np.arange(250))
    assert take(held, range(250))["targets"].tolist() == [(750 + number) % 3 for number in numbers.tolist()]


def test_a_torn_shard_is_told_before_the_launch(shards: list[str], tmp_path: Path) -> None:
    words = ("model=cnn", "data=webdataset", f"data.cache={tmp_path}", f"out={tmp_path}/run")
    assert preflight.missing(plan(*words, f"data.path={tmp_path}/*.tar")) == []
    Path(shards[2]).write_bytes(Path(shards[2]).read_bytes()[:5000])
    (told,) = preflight.missing(plan(*words, f"data.path={tmp_path}/*.tar"))
    assert told.startswith(f"data.path={shards[2]} is torn")
    (told,) = preflight.missing(plan(*words, f"data.path={tmp_path}/*.tgz"))
    assert told.endswith("no file is there")


def test_a_torn_image_is_named_with_its_shard(tmp_path: Path) -> None:
    members = samples(0, 6)
    members["0002.jpg"] = encoded(2, width=300, height=300)[:3000]
    source = build_shards(shard(tmp_path / "a.tar", members), tmp_path, holdout=0)
    with pytest.raises(Exception, match=r"a.tar: 0002.jpg is torn"):
        take(source, range(6))
    assert issubclass(pixels.NoImage, ValueError)
