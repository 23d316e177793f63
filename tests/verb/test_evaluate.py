"""evaluate and generate: a run's checkpoint, from any mesh."""

import json
from pathlib import Path

import commands
import pytest
import safetensors.torch
import tokenizers
import transformers

SMALL = [
    "steps=6",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "data.sequence=16",
    "hook=[]",
    "evaluate.samples=21",
    "generate.tokens=20",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "corpus.txt").write_text("".join(f"line {number} says {number * number}\n" for number in range(2000)))
    dtrain("train", *SMALL, f"data.path={folder / 'corpus.txt'}", f"out={folder / 'out'}", "strategy=fsdp", "devices=2")
    return folder / "out"


def dtrain(*words: str) -> str:
    done = commands.run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_mesh_sees_the_loss_that_training_saw(run: Path) -> None:
    trained = json.loads((run / "result.json").read_text())["metrics"]["eval_loss"]
    for words in ([], ["strategy=ddp", "devices=2"], ["strategy=fsdp", "devices=2", "precision=fp32"]):
        dtrain("evaluate", f"out={run}", *words)
        assert json.loads((run / "evaluate.json").read_text())["metrics"]["eval_loss"] == pytest.approx(
            trained, rel=1e-5
        )


def test_a_checkpoint_is_found_by_its_url(run: Path) -> None:
    step = next((run / "checkpoints").iterdir())
    output = dtrain("evaluate", f"out={run}")
    assert dtrain("evaluate", f"init={step}") == output
    assert dtrain("evaluate", f"init={next(step.iterdir())}") == output


def test_every_mesh_writes_the_same_text(run: Path) -> None:
    alone = dtrain("generate", f"out={run}", "generate.prompt='line '")
    assert alone.startswith("line ")
    assert dtrain("generate", f"out={run}", "generate.prompt='line '", "strategy=fsdp", "devices=2") == alone
    assert dtrain("generate", f"out={run}", "generate.prompt='line '", "mesh.tp=2", "devices=2") == alone
    assert dtrain("generate", f"out={run}", "generate.prompt='line '", "seed=5") != alone


def test_no_run_is_named() -> None:
    done = commands.run("evaluate")
    assert done.returncode == 2
    assert "out=<the run>" in done.stderr


def test_no_run_is_there(tmp_path: Path) -> None:
    done = commands.run("evaluate", "out=gone", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert "gone" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rows_that_were_trained_on_are_told(tmp_path: Path) -> None:
    for name in ("rows", "dev"):
        (tmp_path / f"{name}.csv").write_text("a,y\n" + "".join(f"{n},{2 * n}\n" for n in range(30)))
    out = f"out={tmp_path / 'run'}"
    dtrain("train", "data=csv", f"data.path={tmp_path / 'rows.csv'}", "data.targets=y", "data.holdout=0", "model=mlp",
           "objective=regression", "steps=2", out)  # fmt: skip
    refused = commands.run("evaluate", out)
    assert refused.returncode == 3
    assert "evaluate.sets.dev.path=dev.jsonl" in refused.stderr
    assert "data.holdout=0.1" not in refused.stderr
    told = "it saw rows that are held out now. Name others: evaluate.sets.dev.path=dev.jsonl"
    for verb in ("evaluate", "predict"):
        assert told in commands.run(verb, out, "data.holdout=0.1").stderr
    assert "note: data" not in commands.run("evaluate", out, f"evaluate.sets.dev.path={tmp_path / 'dev.csv'}").stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 300 tokens as a folder of transformers, with its tokenizer."""
    place = tmp_path_factory.mktemp("models") / "merged"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300)
    config.save_pretrained(place)
    weights = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    safetensors.torch.save_file(weights, place / "model.safetensors", {"format": "pt"})  # without a thread
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(300)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tokenizer.json"))
    return place


def test_a_folder_of_transformers_writes_text_with_its_own_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"w{number % 300}" for number in range(2000)))
    model, prompt = ("model=hf", f"model.name={folder}"), ("generate.prompt=w1 w2", "generate.tokens=5")
    written = dtrain("generate", *model, *prompt).split()
    assert written[:2] == ["w1", "w2"]
    assert len(written) == 7
    assert dtrain("generate", *model, *prompt, f"init={folder}").split() == written
    dtrain("generate", *model, *prompt, "data.tokenizer=bytes")
    assert "eval_loss" in dtrain("evaluate", *model, f"data.path={tmp_path / 'text.txt'}", "data.sequence=16",
                                 f"out={tmp_path / 'out'}")  # fmt: skip
    for key in ("out", "init"):
        refused = commands.run("generate", f"{key}={folder}", *prompt)
        assert refused.returncode == 2
        assert f"Type dtrain generate model=hf model.name={folder} 'generate.prompt=w1 w2'" in refused.stderr
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "Type data.tokenizer=<" in commands.run("generate", *model, *prompt).stderr
