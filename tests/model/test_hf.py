"""Models of transformers by their config.json: what a checkpoint fills needs no memory, and leaves as it came."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import transformers

import dtrain
from dtrain.errors import DtrainError, WordsError
from dtrain.model.hf import load
from dtrain.storage import hub
from dtrain.tracing import shapes_of
from dtrain.verb import checkpoint
from dtrain.verb.evaluate import look_back

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
    "num_key_value_heads": 2,
}  # fmt: skip
SMALL = ("model=hf", "data=text", "data.sequence=16", "steps=1", "hook=[]", "logger=[]", "evaluate.samples=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in several files."""
    place = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place, max_shard_size="20KB")
    assert len(list(place.glob("*.safetensors"))) > 3
    return place


def test_what_a_checkpoint_fills_takes_no_memory_but_that_of_its_buffers(folder: Path) -> None:
    model = load(name=str(folder), task="causal_lm", weights="pretrained", config={"tie_word_embeddings": True})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert {name for name, _ in model.named_buffers()} == {name for name, _ in theirs.named_buffers()}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, theirs.get_buffer(name))
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: 0 in config.json or model.config: no such model"),
        ({"num_hidden_layers": 1_000_000_000}, "at most 10000 layers can be built"),
        ({"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 1e9}}, "at most 10000 layers"),
    ],
)
def test_sizes_that_no_model_has_are_a_sentence(config: dict[str, object], message: str, folder: Path) -> None:
    with pytest.raises(WordsError, match=message):
        load(name=str(folder), task="causal_lm", weights="random", config=config)


def test_a_vision_transformer_is_planned(tmp_path: Path) -> None:
    """transformers initialises it by the values of tensors, which a trace does not have."""
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config.save_pretrained(tmp_path)
    words = ("model=hf", f"model.name={tmp_path}", "model.task=image_classification", "model.weights=random")
    for cluster in ("cluster=auto", "cluster=h100x8"):
        plan = dtrain.plan(*words, cluster, "data=synthetic", "data.inputs=[3,16,16]", "data.outputs=2")
        assert not shapes_of(plan).unknown


@pytest.mark.parametrize(
    ("task", "config", "kind"),
    [
        ("causal_lm", {}, "LlamaForCausalLM"),
        ("classification", {"num_labels": 3}, "LlamaForSequenceClassification"),
        ("masked_lm", {"model_type": "bert"}, "BertForMaskedLM"),
        ("image_classification", {"model_type": "vit"}, "ViTForImageClassification"),
        ("seq2seq", {"model_type": "t5"}, "T5ForConditionalGeneration"),
    ],
)
def test_a_task_has_its_head(task: str, config: dict[str, object], kind: str, folder: Path) -> None:
    model = load(name=str(folder), task=task, weights="pretrained", config=config)
    assert type(model).__name__ == kind
    if "num_labels" in config:
        assert model.score.out_features == 3  # type: ignore[union-attr]


def test_random_weights_are_those_of_the_seed(folder: Path, tmp_path: Path) -> None:
    words = (*SMALL, f"model.name={folder}", "model.weights=random")
    losses = [
        dtrain.run(*words, f"seed={seed}", f"out={tmp_path}/{number}").loss for number, seed in enumerate((3, 3, 4))
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.often("strategy=fsdp devices=2")
@pytest.mark.parametrize("mesh", ["strategy=single", "strategy=fsdp devices=2"])
def test_a_pretrained_model_leaves_as_it_came(mesh: str, folder: Path, tmp_path: Path) -> None:
    words = (*SMALL, f"model.name={folder}", "optim=sgd", "optim.lr=0", *mesh.split())
    dtrain.run(*words, f"out={tmp_path}/a")
    assert checkpoint.run(["export", f"out={tmp_path}/a", f"to={tmp_path}/b"]) == 0
    ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(place) for place in (tmp_path / "b", folder))
    assert type(ours) is type(theirs)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.campaign("commands")
def test_what_was_tuned_is_evaluated_and_goes_on(folder: Path, tmp_path: Path) -> None:
    words = (*SMALL, f"model.name={folder}", "optim.lr=0.01", f"out={tmp_path}/a")
    tuned = dtrain.run(*words, "steps=3", "stop_after=2")
    assert tuned.metrics["eval_loss"] != dtrain.run(*words[:-1], f"out={tmp_path}/b").metrics["eval_loss"]
    _, again = look_back([f"out={tmp_path}/a"], loop="dtrain.evaluation.evaluate.evaluate")
    assert again and again.metrics["eval_loss"] == pytest.approx(tuned.metrics["eval_loss"])
    whole = dtrain.run(*words[:-1], "steps=3", f"out={tmp_path}/c")
    assert dtrain.run(*words, "steps=3").loss == whole.loss


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "lama"}, "has no model of the type 'lama'. Did you mean llama?"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "x.y"}}, "Its code is in the repository, which is not run"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int"),
        ({"hidden_act": "gelo"}, "hidden_act: gelo in config.json or model.config is not known to transformers"),
        ({"model_type": "vit"}, "model.task=causal_lm: Unrecognized configuration class"),
    ],
)
def test_what_cannot_be_built_is_told(config: dict[str, object], sentence: str, folder: Path) -> None:
    with pytest.raises(WordsError) as refused:
        load(name=str(folder), task="causal_lm", weights="random", config=config)
    assert sentence in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"hidden_sise": 64}, "LlamaConfig has no hidden_sise. Did you mean hidden_size?"),
        ({"model_type": "gpt2", "n_layers": 2}, "GPT2Config has no n_layers. Did you mean n_layer?"),
        ({"torch_dtype": "bfloat16"}, "Type precision=bf16_true"),
        ({"dtype": "float99"}, "Type precision=bf16_true"),
    ],
)
def test_an_entry_that_nothing_would_use_is_refused(config: dict[str, object], sentence: str, folder: Path) -> None:
    with pytest.raises(WordsError) as refused:
        load(name=str(folder), task="causal_lm", weights="random", config=config)
    assert sentence in str(refused.value)


def test_an_entry_of_an_older_config_is_used(folder: Path, tmp_path: Path) -> None:
    """Beside rope_parameters transformers drops rope_theta; without, it becomes a part of them."""
    described = json.loads((folder / "config.json").read_text())
    del described["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = {"rope_theta": 77.0, "num_labels": 3, "attn_implementation": "eager"}
    model = load(name=str(tmp_path), task="causal_lm", weights="random", config=config)
    assert model.config.rope_parameters["rope_theta"] == 77.0  # type: ignore[union-attr,index]
    assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]
    with pytest.raises(WordsError, match="LlamaConfig has no rope_theta"):
        load(name=str(folder), task="causal_lm", weights="random", config={"rope_theta": 77.0})


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "there is no "), ("{", "is not JSON"), ("[1]", "has no configuration")]
)
def test_a_place_without_a_configuration_is_told(text: str | None, sentence: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WordsError, match=sentence):
        load(name=str(tmp_path), task="causal_lm", weights="random", config={})


def test_a_name_is_a_folder_a_url_or_one_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.place("org/name@v1.0") == "hf://org/name@v1.0"
    assert hub.place("s3://bucket/name") == "s3://bucket/name"
    monkeypatch.chdir(folder.parent.parent)
    assert hub.place(f"{folder.parent.name}/llama") == f"{folder.parent.name}/llama"


@pytest.mark.campaign("network")
def test_offline_the_cache_of_the_hub_is_enough_for_a_plan(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--my--llama"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for name, code, sentence in (("my/llama", 0, "memory      peak"), ("my/other", 3, "offline, and")):
        words = ["plan", *SMALL, f"model.name={name}"]
        done = subprocess.run([*commands.COMMAND, *words], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        assert sentence in done.stdout + done.stderr


def test_its_own_words_are_checked_before_anything(tmp_path: Path) -> None:
    with pytest.raises(DtrainError, match=r"model\.task"):
        dtrain.plan(*SMALL, "model.name=x", "model.task=chat")


@pytest.mark.parametrize(
    "attention",
    [
        {"text_config": {"_attn_implementation": "evil/kernel"}}, {"attn_implementation": {"": "evil/kernel"}}, {"attn_implementation": "flash_attention_2"},
        {"text_config": {"attn_implementation": {"vision_config": {"": "flash_attention_3"}}}}, {"attn_implementation": "paged|evil/kernel"},
    ],
)  # fmt: skip
def test_an_attention_that_would_be_downloaded_is_refused(attention: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16, **attention}))
    with pytest.raises(WordsError, match="is code that would be downloaded"):
        load(name=str(tmp_path), task="causal_lm", weights="random", config={})
