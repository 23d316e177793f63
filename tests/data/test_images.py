"""data=images: the same samples on any mesh and with any number of processes, cut out at random by seed, pass and image."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.drawn import build, encoded, folder
from small import plan

import dtrain
from dtrain.data.pictures import Pictures
from dtrain.errors import DtrainError
from dtrain.files import records
from dtrain.launcher import preflight
from dtrain.verb.evaluate import look_back


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    return folder(tmp_path / "flowers")


def take(source: Any, index: Any = None, epoch: int = 0) -> Any:
    index = np.arange(len(source)) if index is None else np.array(index)
    return source.take(index, np.full(len(index), epoch))


def test_each_image_is_one_sample_with_its_class(flowers: Path, tmp_path: Path) -> None:
    source = build(flowers, tmp_path)
    held = source.holdout()
    assert (len(source), len(held)) == (29, 7)
    names = ["daisy", "rose", "tulip"]
    assert source.facts == {"inputs": [3, 8, 8], "kind": "float32", "outputs": 3, "class_names": names}
    assert source.classes == ["daisy", "rose", "tulip"]
    both = [*source.original(np.arange(29)), *held.original(np.arange(7))]
    assert sorted(both) == list(range(36))
    for part in (source, held):
        batch = take(part)
        assert batch["inputs"].dtype == torch.float32 and batch["targets"].dtype == torch.int64
        assert batch["targets"].tolist() == [int(number) // 12 for number in part.original(np.arange(len(part)))]
    grey = build(flowers, tmp_path, colors="grey", size=[4, 6], normalize="imagenet")
    assert take(grey)["inputs"].shape == (29, 1, 4, 6)
    own = build(flowers, tmp_path, normalize={"mean": [0.5] * 3, "std": [0.5] * 3})
    half = build(flowers, tmp_path, normalize="half")
    assert torch.equal(take(own)["inputs"], take(half)["inputs"])
    assert torch.allclose(take(half)["inputs"], take(source)["inputs"] * 2 - 1, atol=1e-6)


def test_a_random_part_depends_on_seed_pass_and_image_alone(flowers: Path, tmp_path: Path) -> None:
    source = build(flowers, tmp_path, augment="crop_flip")
    whole = take(source)["inputs"]
    order = np.random.default_rng(0).permutation(29)
    assert torch.equal(take(source, order)["inputs"], whole[order]), "whatever else is in the batch"
    assert torch.equal(torch.cat([take(source, [number])["inputs"] for number in range(29)]), whole)
    again = build(flowers, tmp_path, augment="crop_flip")
    assert torch.equal(take(again)["inputs"], whole)
    assert not torch.equal(take(source, epoch=1)["inputs"], whole)
    assert not torch.equal(take(build(flowers, tmp_path, augment="crop_flip", seed=6))["inputs"], whole)
    plain = build(flowers, tmp_path)
    assert torch.equal(take(source.holdout())["inputs"], take(plain.holdout())["inputs"]), "evaluation sees the centre"


@pytest.mark.campaign("commands")
def test_processes_read_what_the_rank_would(flowers: Path, tmp_path: Path) -> None:
    mine = take(build(flowers, tmp_path, augment="crop_flip"), [3, 1, 4, 15, 9, 2, 6], 2)
    source = build(flowers, tmp_path, augment="crop_flip", workers=2)
    try:
        for _ in range(2):
            batch = take(source, [3, 1, 4, 15, 9, 2, 6], 2)
            assert all(torch.equal(batch[name], mine[name]) for name in mine)
        number = int(source.original(np.array([4]))[0])
        (flowers / source._decoder.images.name(number)).write_bytes(b"\xff\xd8\xff torn")
        with pytest.raises(DtrainError, match=r"\d.jpg changed since its index was made"):
            take(source, [4])
    finally:
        source._processes.close()


def test_a_torn_image_is_named_at_its_step(flowers: Path, tmp_path: Path) -> None:
    (flowers / "rose/5.jpg").write_bytes(encoded(9, width=300, height=300)[:3000])
    source = build(flowers, tmp_path, holdout=0)
    index = source.original(np.arange(36)).tolist().index(12 + 7)  # daisy, then rose: 0 1 10 11 2 3 4 5
    with pytest.raises(DtrainError, match=r"data.path: .*/flowers/rose/5.jpg is torn \("):
        take(source, [index])


def test_images_held_out_may_be_others_and_have_the_classes_of_training(flowers: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "other", 2, ["tulip", "rose"])
    source = build(flowers, tmp_path, holdout_path=str(other))
    held: Pictures = source.holdout()
    assert (len(source), len(held)) == (36, 4)
    names = [held._decoder.images.name(int(number)).split("/")[-2] for number in held.original(np.arange(4))]
    assert take(held)["targets"].tolist() == [["daisy", "rose", "tulip"].index(name) for name in names]
    assert held.facts["outputs"] == 3


def test_another_folder_has_another_fingerprint(flowers: Path, tmp_path: Path) -> None:
    print_ = build(flowers, tmp_path).fingerprint
    assert build(flowers, tmp_path / "other").fingerprint == print_
    (flowers / "rose/5.jpg").rename(flowers / "daisy/50.jpg")
    assert build(flowers, tmp_path).fingerprint != print_


def missing(flowers: Path, tmp_path: Path, *words: str) -> list[str]:
    made = plan(
        "model=cnn", "data=images", f"data.path={flowers}", f"data.cache={tmp_path}", f"out={tmp_path}/run", *words
    )
    return preflight.missing(made)


def test_what_is_wrong_is_told_before_the_launch(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing(flowers, tmp_path) == []
    other = folder(tmp_path / "other", 2, ["rose", "tulips"])
    (told,) = missing(flowers, tmp_path, f"data.holdout_path={other}")
    assert told == "data.holdout_path has 1 class(es) that training lacks: tulips. Did you mean tulip?"
    (told,) = missing(flowers, tmp_path, "data.normalize={mean: [1], std: [0]}")
    assert told.startswith("data.normalize: mean and std need 3 number(s) each")
    (flowers / "rose/0.jpg").write_text("<html>")
    (told,) = missing(flowers, tmp_path)
    assert told == f"data.path: {flowers}/rose/0.jpg is no image. Remove what is no image."
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (told,) = [each for each in missing(flowers, tmp_path) if "pillow" in each]
    assert told.endswith("Type: pip install 'dtrain[images]'")


def test_a_run_with_checkpoints_is_told_that_images_changed(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = records.opened("images", str(flowers), tmp_path / "cache", image="image", label="label")
    trained = f"{records.fingerprint(images)}-{'0' * 8}"
    monkeypatch.setattr("dtrain.launcher.preflight.trained_on", lambda plan: {"data": trained})
    assert missing(flowers, tmp_path) == []
    gone = (flowers / "rose/5.jpg").read_bytes()
    (flowers / "rose/5.jpg").unlink()
    for _ in range(2):
        (told,) = missing(flowers, tmp_path)
        assert "images were added, removed or changed since this run began" in told
    (flowers / "rose/5.jpg").write_bytes(gone)
    assert missing(flowers, tmp_path) == []


def test_an_evaluation_says_that_images_changed(
    flowers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("model=cnn", "data=images", f"data.path={flowers}", f"data.cache={tmp_path}", "data.size=8", "logger=[]")
    dtrain.run(*words, "steps=1", f"out={tmp_path}/run")
    look_back([f"out={tmp_path}/run"], loop="dtrain.evaluation.evaluate.evaluate")
    assert "the data changed" not in capfd.readouterr().err
    (flowers / "rose/5.jpg").unlink()
    look_back([f"out={tmp_path}/run"], loop="dtrain.evaluation.evaluate.evaluate")
    assert "note: the data changed since step 1 was trained on it" in capfd.readouterr().err


def test_the_seed_is_that_of_the_run(flowers: Path) -> None:
    assert plan("model=cnn", "data=images", f"data.path={flowers}", "seed=3").data["seed"] == 3
    assert plan("model=cnn", "data=images", f"data.path={flowers}", "seed=3", "data.seed=4").data["seed"] == 4
    of = "data.of={a: {data: images, path: a}, b: {data: images, path: b, seed: 9}}"
    mixed = plan("model=cnn", "data=mixture", of, "data.weights={a: 1, b: 1}", "seed=3").data["of"]
    assert (mixed["a"]["seed"], mixed["b"]["seed"]) == (3, 9)


def test_a_further_set_with_fewer_classes_has_the_numbers_of_training(tmp_path: Path) -> None:
    trained, other = build(folder(tmp_path / "a", 4), tmp_path), folder(tmp_path / "b", 4)
    shutil.rmtree(tmp_path / "b" / "daisy")
    further = build(other, tmp_path, holdout=0)
    further.as_classes(trained.class_names)
    targets = further.take(np.arange(8), np.zeros(8, np.int64))["targets"]
    assert sorted(targets.tolist()) == [1] * 4 + [2] * 4, "rose and tulip of daisy, rose and tulip"
