"""A new head on a pretrained model of transformers: it begins from the seed, on any mesh, and the rest as it was."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from data.drawn import folder

import dtrain
from dtrain.errors import DtrainError
from dtrain.verb import checkpoint

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Three classes of images, and a model of five."""
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(1)
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=5)
    transformers.ViTForImageClassification(config).save_pretrained(place / "vit")
    return (
        "model=hf", f"model.name={place}/vit", "model.task=image_classification", "model.config={num_labels: 3}",
        "data=images", f"data.path={folder(place / 'flowers', 4)}", f"data.cache={place}", "data.size=16", "steps=1",
        "batch=4", "logger=[]", "optim=sgd", "optim.lr=0",
    )  # fmt: skip


@pytest.mark.parametrize(
    "mesh", ["strategy=single", pytest.param("strategy=fsdp devices=2", marks=pytest.mark.campaign("commands"))]
)
def test_the_head_begins_from_the_seed_and_the_rest_as_it_was(
    mesh: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    loss = dtrain.run(*words, *mesh.split(), "model.head=new", f"out={tmp_path}/a").loss
    assert checkpoint.run(["export", f"out={tmp_path}/a", f"to={tmp_path}/b"]) == 0
    ours = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "b")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(words[1].removeprefix("model.name="))
    for name, value in theirs.vit.state_dict().items():
        assert torch.equal(ours.vit.state_dict()[name], value), name
    assert loss == pytest.approx(dtrain.run(*words, "model.head=new", f"out={tmp_path}/c").loss, rel=1e-6)
    weight, bias = ours.classifier.weight.detach(), ours.classifier.bias.detach()
    assert weight.shape == (3, 16) and 0.01 < float(weight.std()) < 0.04 and not bias.any()


def test_another_number_of_classes_is_refused_with_what_to_type(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(DtrainError, match=r"classifier\.bias is \[5\] there, \[3\] here.*Type model\.head=new"):
        dtrain.run(*words, f"out={tmp_path}/a")


def test_weights_of_a_masked_language_model_lack_the_pooler_which_begins_too(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=32, max_position_embeddings=16))
    bert.save_pretrained(tmp_path / "bert")
    rows = [json.dumps({"input_ids": [row % 7, row % 5, 3], "label": row % 3}) for row in range(41)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    words = (
        "recipe=classify", "data=jsonl", f"data.path={tmp_path}/rows.jsonl", f"data.cache={tmp_path}", "data.inputs=[input_ids]", "data.targets=label",
        f"model.name={tmp_path}/bert", "model.config={num_labels: 3}", "steps=1", "batch=4", "schedule.warmup=0", "logger=[]", "optim=sgd", "optim.lr=0",
        "strategy=single", "evaluate.every=1", "evaluate.samples=4",
    )  # fmt: skip
    with pytest.raises(DtrainError, match=r"missing .*Type model\.head=new"):
        dtrain.run(*words, f"out={tmp_path}/a")
    dtrain.run(*words, "model.head=new", f"out={tmp_path}/a")
    assert checkpoint.run(["export", f"out={tmp_path}/a", f"to={tmp_path}/b"]) == 0
    ours = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "b")
    for name, value in bert.bert.state_dict().items():
        assert torch.equal(ours.bert.state_dict()[name], value), name
    pooled = ours.bert.pooler.dense
    assert 0.01 < float(pooled.weight.detach().std()) < 0.04 and not pooled.bias.any()


def test_an_adapter_takes_no_new_head(words: tuple[str, ...], tmp_path: Path) -> None:
    adapter = ("adapter=lora", "adapter.targets=[q_proj]", "model.head=new", "optim.lr=0.1")
    with pytest.raises(DtrainError, match="beside an adapter the head stays as it is"):
        dtrain.run(*words, *adapter, f"out={tmp_path}/a")
