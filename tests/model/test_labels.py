"""A classifier of transformers and the images and classes of its data."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dtrain.errors import WordsError
from dtrain.model import caveats, configuration, labels
from dtrain.model.hf import load

VIT = {
    "model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "image_size": 32, "patch_size": 8, "num_labels": 5,
}  # fmt: skip


def made(place: Path, weights: str = "random", **config: Any) -> nn.Module:
    (place / "config.json").write_text(json.dumps(VIT))
    return load(name=str(place), task="image_classification", weights=weights, config=config)


@pytest.mark.parametrize(
    ("shape", "typed"),
    [
        ([3, 16, 16], "has 16 x 16 and 3. Type data.size=32, or model.config={image_size: 16}."),
        ([3, 32, 16], "has 32 x 16 and 3. Type data.size=32."),
        ([1, 32, 32], "has 32 x 32 and 1. Type data.size=32 data.colors=rgb, or"),
    ],
)
def test_images_of_another_size_are_refused_as_the_model_is_built(shape: list[int], typed: str, tmp_path: Path) -> None:
    with pytest.raises(WordsError) as error:
        labels.fit(made(tmp_path), {"inputs": shape})
    assert "takes images of 32 x 32 pixels and 3 channel(s)" in str(error.value) and typed in str(error.value)


def test_a_model_of_any_size_is_left_alone(tmp_path: Path) -> None:
    labels.fit(made(tmp_path, weights="pretrained"), {"inputs": [3, 32, 32]})
    sizes = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    labels.fit(made(tmp_path, **sizes), {"inputs": [3, 24, 20]})
    labels.fit(nn.Linear(2, 2), {"inputs": [3, 20, 20]})


@pytest.mark.parametrize(("weights", "head"), [("pretrained", "model.head=new "), ("random", "")])
def test_a_head_has_as_many_outputs_as_the_data_has_classes(weights: str, head: str, tmp_path: Path) -> None:
    model, facts = made(tmp_path, weights=weights), {"inputs": [3, 32, 32], "outputs": 7}
    with pytest.raises(
        WordsError, match=rf"has 5 outputs and the data 7 classes. Type {head}model.config=.num_labels: 7"
    ):
        labels.fit(model, facts)
    labels.fit(model, {**facts, "outputs": 3, "class_names": ["a", "b", "c"]})
    (note,) = labels.notes(model)
    assert "5 outputs and the data 3 classes" in note and note.endswith(f"type {head}model.config={{num_labels: 3}}.")
    labels.fit(made(tmp_path, num_labels=1), facts)


def test_outputs_that_no_class_has_are_told_and_classes_have_their_names(tmp_path: Path) -> None:
    facts = {"inputs": [3, 32, 32], "outputs": 2, "class_names": ["cat", "dog"]}
    model = made(tmp_path, weights="pretrained")
    labels.fit(model, facts)
    assert any("5 outputs and the data 2 classes" in each and "num_labels: 2" in each for each in caveats(model))
    model = made(tmp_path, weights="pretrained", num_labels=2)
    labels.fit(model, facts)
    assert labels.notes(model) == []
    described = configuration(model)
    assert described is not None and described["label2id"] == {"cat": 0, "dog": 1}
    assert {str(number): name for number, name in described["id2label"].items()} == {"0": "cat", "1": "dog"}
