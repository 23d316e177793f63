"""Answers of a model that was trained on conversations: to a message, and to the prompts of a file."""

import json
from pathlib import Path

import commands
import pytest
from chat import talks

GPT = ("model=gpt", "model.layers=2", "model.width=64", "optim.lr=0.01")
SMALL = (
    "steps=40",
    "batch=8",
    "schedule.warmup=5",
    "hook=[]",
    "logger=[]",
    "data=chat",
    "data.sequence=128",
    "evaluate.samples=4",
)
GREEDY = ("generate.temperature=0", "generate.tokens=30")
LLAMA = """
import sys, torch, transformers
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes)).save_pretrained(sys.argv[1])
"""
THEIRS = """
import json, sys, transformers
place, asked = sys.argv[1], json.loads(sys.argv[2])
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[3])
model = transformers.AutoModelForCausalLM.from_pretrained(place)
texts = []
for messages in asked:
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    made = model.generate(**given, do_sample=False, max_new_tokens=30, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    texts.append(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
print("TEXTS" + json.dumps(texts))
"""


def trained(folder: Path, *words: str) -> str:
    talks.write(folder / "rows.jsonl", talks.talks())
    done = commands.run(
        *words, *SMALL, f"data.path={folder}/rows.jsonl", f"data.tokenizer={talks.tokenizer(folder / 'tk')}", f"data.cache={folder}/cache",
        f"out={folder}/run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return f"out={folder}/run"


def said(*words: str) -> str:
    done = commands.run("generate", *GREEDY, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_messages_are_answered_one_by_one_and_together(tmp_path: Path) -> None:
    run, questions = trained(tmp_path, *GPT), ["What is the square of 3?", "How are you?", "And é?"]
    (tmp_path / "asked.txt").write_text("\n".join(questions))
    alone = [said(run, f"generate.prompt='{question}'").rstrip("\n") for question in questions]
    rows = [json.loads(line) for line in said(run, f"generate.prompts={tmp_path}/asked.txt").splitlines()]
    assert rows == [{"prompt": question, "answer": answer} for question, answer in zip(questions, alone, strict=True)]
    assert alone[0].startswith("The square of ") and alone[0].endswith(".") and "<|im_end|>" not in "".join(alone)
    talks.write(tmp_path / "asked.jsonl", [{"messages": talks.said(question, system="")} for question in questions])
    assert (
        said(
            run,
            f"generate.prompts={tmp_path}/asked.jsonl",
            f"generate.to={tmp_path}/answers.jsonl",
            "generate.batch=2",
            "strategy=fsdp",
            "devices=2",
        )
        == ""
    )
    written = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in written] == alone and written[1]["messages"][0]["content"] == questions[1]
    assert said(run, "generate.chat=false", "generate.prompt='What is'").startswith("What is")
    (tmp_path / "bad.jsonl").write_text('{"promt": 1}')
    refused = commands.run("generate", run, f"generate.prompts={tmp_path}/bad.jsonl")
    assert refused.returncode == 3 and "Did you mean prompt?" in refused.stderr and not refused.stdout


@pytest.mark.often("strategy=fsdp devices=2")
@pytest.mark.campaign("fuzz")
@pytest.mark.parametrize("mesh", ["strategy=single", "strategy=fsdp devices=2"])
def test_answers_are_those_of_transformers(mesh: str, tmp_path: Path) -> None:
    assert commands.python("-c", LLAMA, f"{tmp_path}/llama").returncode == 0
    run = trained(tmp_path, "model=hf", f"model.name={tmp_path}/llama", "optim.lr=0.01")
    asked = [talks.said(f"What is the square of {i}?") for i in range(6)]
    talks.write(tmp_path / "asked.jsonl", [{"messages": each} for each in asked])
    mine = said(run, f"generate.prompts={tmp_path}/asked.jsonl", "generate.batch=4", *mesh.split())
    assert commands.run("checkpoint", "export", run, f"to={tmp_path}/out").returncode == 0
    theirs = commands.python("-c", THEIRS, f"{tmp_path}/out", json.dumps(asked), f"{tmp_path}/tk")
    assert theirs.returncode == 0, theirs.stderr
    texts = json.loads(theirs.stdout.split("TEXTS")[1])
    assert [json.loads(line)["answer"] for line in mine.splitlines()] == texts and all(
        text.startswith("The ") for text in texts
    )
