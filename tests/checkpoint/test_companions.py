"""What is beside the weights of an export: AutoTokenizer reads it, and gives the tokens of the run."""

import json
import shutil
from pathlib import Path

import commands
import pytest
import tokenizers

from dtrain.checkpoint import companions
from dtrain.tokenizer.__init__ import Bytes

TEXTS = ["Once upon a time, there was a cat.\n\tIt sat;  it slept!", "\N{SNOWMAN} ümlaut", "\0\x7f\xad"]


def plan(run: Path, text: str) -> str:
    run.mkdir()
    (run / "plan.yaml").write_text(text)
    return f"{run}/checkpoints/step-00000001/x"


def test_tokens_that_are_bytes_have_a_tokenizer(tmp_path: Path) -> None:
    files, faults = companions.of_run(plan(tmp_path / "run", "data: {tokenizer: bytes}\nmodel: {_target_: x}\n"))
    assert not faults and {*files} == {"tokenizer.json", "tokenizer_config.json"}
    theirs = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in TEXTS:
        assert theirs.encode(text).ids == [*Bytes().encode(text.encode())]
        assert theirs.decode([*text.encode()]) == text


def test_a_model_of_others_brings_its_own_and_a_given_tokenizer_wins(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, names in ((model, (*companions.OF_MODEL, *companions.TOKENIZER, "x.py")), (other, ("tokenizer.json",))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(f"{folder.name} {name}")
    of_model = f"model: {{_target_: {companions.HF}, name: {model}}}\n"
    files, _ = companions.of_run(plan(tmp_path / "a", of_model))
    assert {*files} == {*companions.OF_MODEL, *companions.TOKENIZER}
    for number, tokenizer in enumerate((f"{other}/tokenizer.json", str(other))):
        data = f"data: {{of: {{a: {{tokenizer: {tokenizer}}}}}}}\n"
        files, _ = companions.of_run(plan(tmp_path / f"b{number}", of_model + data))
        assert files["tokenizer.json"] == b"other tokenizer.json"
        assert {*files} == {*companions.OF_MODEL, "tokenizer.json", "tokenizer_config.json"}
    (model / "mine.json").write_text("mine")
    files, _ = companions.of_run(plan(tmp_path / "c", of_model + f"data: {{tokenizer: {model}/mine.json}}\n"))
    assert files["tokenizer.json"] == b"mine"
    shutil.rmtree(model)
    files, faults = companions.of_run(plan(tmp_path / "d", of_model))
    assert not files and faults == [f"{model} is not there any more"]
    assert companions.of_run(str(tmp_path / "none")) == ({}, [])


USE = """import sys, transformers
for place in sys.argv[1:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    text = "Once upon a time"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, place
    made = transformers.pipeline("text-generation", model=place)(text, max_new_tokens=5, do_sample=False)
    assert made[0]["generated_text"].startswith(text), made
    print(len(tokenizer(text)["input_ids"]), transformers.AutoModelForCausalLM.from_pretrained(place).generation_config.max_length)
"""
MODEL = """import tokenizers, transformers
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
model.generation_config.max_length = 77
model.save_pretrained("model")
tokenizer = tokenizers.ByteLevelBPETokenizer()
tokenizer.train(["text.txt"], vocab_size=300)
tokenizer.save("model/tokenizer.json")
"""


@pytest.mark.campaign("documents")
def test_a_pipeline_of_transformers_reads_the_export_at_once(tmp_path: Path) -> None:
    """Of a gpt on bytes, of a model of transformers, and of an adapter on it."""
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat, and once there was a dog.\n" * 200)
    assert commands.python("-c", MODEL, cwd=tmp_path).returncode == 0
    small = [
        "steps=2",
        "data.path=text.txt",
        "data.sequence=16",
        "hook=[]",
        "logger=[]",
        "evaluate.samples=8",
        "batch=4",
    ]
    llama = ["model=hf", "model.name=model", "data.tokenizer=model/tokenizer.json"]
    runs = {"gpt": ["model.layers=1", "model.width=32", "model.heads=2"], "hf": llama, "lora": [*llama, "adapter=lora"]}
    for name, words in runs.items():
        done = commands.run(*small, *words, f"out={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        more = {"gpt": ["as=transformers"], "hf": [], "lora": ["adapter=merged", "shard=20KB"]}[name]
        done = commands.run("checkpoint", "export", f"out={name}", f"to={name}-to", *more, cwd=tmp_path)
        assert done.returncode == 0 and "tokenizer.json" in done.stdout, done.stdout + done.stderr
    used = commands.python("-c", USE, "gpt-to", "hf-to", "lora-to", cwd=tmp_path)
    assert used.returncode == 0, used.stderr
    numbers = [line.split() for line in used.stdout.splitlines() if line[:1].isdigit()]
    assert numbers[0][0] == "16" and [row[1] for row in numbers[1:]] == ["77", "77"]
    order = [path.name for path in sorted((tmp_path / "lora-to").iterdir(), key=lambda path: path.stat().st_mtime_ns)]
    assert order[-2:] == ["model.safetensors.index.json", "config.json"]
    assert json.loads((tmp_path / "gpt-to/config.json").read_text())["model_type"] == "qwen3"
