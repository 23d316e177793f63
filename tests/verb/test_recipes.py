"""The recipes at hand, each in a line or two."""

from pathlib import Path

import commands
import pytest
from chat import talks

from dtrain.__main__ import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["recipes", *words]) == 0
    return capsys.readouterr().out


def test_what_dtrain_brings_is_listed_with_its_story(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys).splitlines()
    named = [line.split()[0] for line in lines if line[0] != " "]
    assert named == sorted(named) and {
        "classify",
        "digits",
        "dpo",
        "gpt2",
        "lora",
        "pretrain",
        "sft",
        "shakespeare",
    } <= set(named)
    (place,) = (number for number, line in enumerate(lines) if line.startswith("digits"))
    assert "Handwritten digits" in lines[place]
    assert "needs scikit-learn" in lines[place + 1] and "eval_accuracy 0.98" in lines[place + 1]


def test_recipes_of_this_folder_come_after_ours(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "recipes").mkdir()
    (here / "recipes" / "mine.yaml").write_text(
        "# Mine. And more.\nrequires: {gpus: 2, memory: 40}\nexpect: {step: 50, loss: [1, 2]}\nsteps: 5\n"
    )
    (here / "recipes" / "broken.yaml").write_text("steps: 1\nmodel: [\n")
    output = listed(capsys)
    assert "recipes/mine.yaml    Mine. And more." in output
    assert "needs 2 GPU(s), 40 GiB · loss 1 to 2 at step 50" in output
    assert "recipes/broken.yaml  cannot be read: line 3" in output


def test_a_folder_or_url_can_be_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text("steps: 5\n")
    assert listed(capsys, ".") == "./a.yaml  (no description)\n"
    assert main(["recipes", "nothing"]) == 3
    assert "there is no .yaml file" in capsys.readouterr().err
    assert main(["recipes", "--all"]) == 2


@pytest.mark.campaign("documents")
def test_conversations_are_learnt_as_the_recipe_expects(tmp_path: Path) -> None:
    """With a small tokenizer and configuration in place of those of the hub."""
    talks.write(tmp_path / "chats.jsonl", talks.talks())
    code = "import sys, transformers; transformers.Qwen2Config(vocab_size=512, use_sliding_window=False).save_pretrained(sys.argv[1])"
    assert commands.python("-c", code, f"{tmp_path}/model").returncode == 0
    words = [
        f"data.path={tmp_path}/chats.jsonl",
        f"data.tokenizer={talks.tokenizer(tmp_path / 'model')}",
        f"model.name={tmp_path}/model",
    ]
    done = commands.run(
        "verify", "recipe=sft", *words, "model.weights=random", f"data.cache={tmp_path}/cache", f"out={tmp_path}/run"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_adapter_is_tuned_as_its_recipe_expects(tmp_path: Path) -> None:
    """On a model that has seen conversations before, in place of the one of the hub."""
    talks.write(tmp_path / "chats.jsonl", talks.talks())
    sizes = "vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2"
    code = f"import transformers; transformers.Qwen2Config({sizes}, use_sliding_window=False).save_pretrained('model')"
    assert commands.python("-c", code, cwd=tmp_path).returncode == 0
    data = ("data.path=chats.jsonl", f"data.tokenizer={talks.tokenizer(tmp_path / 'model')}", "data.cache=cache")
    first = (
        "model=hf",
        "model.name=model",
        "model.weights=random",
        "data=chat",
        "data.sequence=256",
        "steps=60",
        "optim.lr=0.01",
        "schedule.warmup=5",
        "hook=[]",
    )
    for words in (
        [*first, *data, "out=base"],
        ["checkpoint", "export", "out=base", "to=whole"],
        ["verify", "recipe=lora", "model.name=whole", *data, "out=run"],
    ):
        done = commands.run(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
