"""Tasks of lm_eval give, item by item, what its own Hugging Face backend gives for the export of the run."""

import json
from pathlib import Path
from typing import Any

import commands
import pytest
from chat import talks
from integrations.lm_eval.items import lines, write

from dtrain.errors import WordsError
from dtrain.integrations.lm_eval.benchmark import figures_of

SMALL = (
    "steps=40", "batch=8", "schedule.warmup=5", "optim.lr=0.01", "hook=[]", "logger=[]", "data.sequence=64", "evaluate.samples=4",
)  # fmt: skip
MODELS = {
    "gpt": ("model.layers=2", "model.width=64", "model.heads=4"),
    "moe": ("model=moe", "model.layers=2", "model.width=32", "model.heads=2", "model.experts=4"),
    "hf": ("model=hf", "model.name=llama", "model.weights=random"),
}
LLAMA = """
import transformers
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
transformers.LlamaConfig(**sizes, max_position_embeddings=64).save_pretrained("llama")
"""
THEIRS = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
model = HFLM(pretrained=sys.argv[1], device="cpu", batch_size=4, dtype="float32", max_length=64)
tasks = TaskManager(include_path="tasks", include_defaults=False)
results = simple_evaluate(model, tasks=sys.argv[2:], task_manager=tasks, bootstrap_iters=0)
json.dump({name: [item["resps"] for item in items] for name, items in results["samples"].items()}, open("theirs.json", "w"))
"""
TASKS = ("my_choice", "my_text", "my_write")
MESHES = {
    "gpt": ("strategy=fsdp devices=2", "mesh.tp=2 devices=2"),
    "moe": ("strategy=ddp devices=2",),
    "hf": ("strategy=fsdp devices=2",),
}


def dtrain(folder: Path, *words: str) -> str:
    done = commands.run(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(of: dict[str, Any]) -> list[Any]:
    """What was answered to each request, of each item of each task."""
    return [answers[0] for task in TASKS for item in of[task] for answers in item]


@pytest.mark.campaign("network")
@pytest.mark.parametrize("kind", ["gpt", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("moe", "hf"))])
def test_items_are_those_of_the_hugging_face_backend(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "tasks")
    talks.tokenizer(tmp_path / "tk", None)
    (tmp_path / "corpus.txt").write_text("".join(map(lines, range(300))))
    if kind == "hf":
        assert commands.python("-c", LLAMA, cwd=tmp_path).returncode == 0
    data = ("data.path=corpus.txt", "data.tokenizer=tk/tokenizer.json", "data.cache=cache")
    dtrain(tmp_path, *MODELS[kind], *SMALL, *data, "out=run")
    dtrain(tmp_path, "checkpoint", "export", "out=run", "to=exported", *(["as=transformers"] if kind != "hf" else []))
    ran = commands.python("-c", THEIRS, "exported", *TASKS, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    theirs = numbers(json.loads((tmp_path / "theirs.json").read_text()))
    for mesh in MESHES[kind]:
        asked = ("as=lm_eval", f"evaluate.tasks=[{','.join(TASKS)}]", "evaluate.tasks_path=tasks", "evaluate.batch=3")
        said = dtrain(tmp_path, "evaluate", "out=run", *asked, *mesh.split())
        assert "|my_choice|" in said and "byte_perplexity" in said
        items = {
            task: [
                json.loads(line)["resps"] for line in (tmp_path / f"run/lm_eval/{task}.jsonl").read_text().splitlines()
            ]
            for task in TASKS
        }
        mine = numbers(items)
        assert len(mine) == len(theirs) == 11 * 4 + 9 + 7
        for one, other in zip(mine, theirs, strict=True):
            if isinstance(other, str):
                assert one == other
            elif isinstance(other, list):
                assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1] is other[1]
            else:
                assert one == pytest.approx(other, rel=1e-5)
    known = json.loads((tmp_path / "run/lm_eval.json").read_text())["results"]
    event = json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[-1])
    assert event["event"] == "evaluated" and event["step"] == 40
    assert event["eval_my_choice_acc"] == known["my_choice"]["acc,none"]
    assert "eval_my_write_bleu" in dtrain(tmp_path, "runs", "run")


def test_figures_are_named_by_task_and_metric() -> None:
    rows = {
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": 0.1, "n": 3}
    }
    rows["a"] = {"acc,none": 1.0, "acc_stderr,none": "N/A"}
    assert figures_of(rows) == {"eval_gsm8k_exact_match_strict-match": 0.5, "eval_a_acc": 1.0}


@pytest.mark.campaign("network")
def test_options_of_a_generation_are_known_or_refused() -> None:
    from dtrain.integrations.lm_eval.benchmark import options_of

    greedy = options_of({"until": "\n", "do_sample": False, "top_k": 5}, "a")
    assert greedy == {"tokens": 256, "until": ["\n"], "temperature": 0.0, "top_p": 1.0}
    drawn = options_of({"until": [], "max_gen_toks": 7, "do_sample": True, "temperature": 0.5, "top_p": 0.9}, "a")
    assert drawn == {"tokens": 7, "until": [], "temperature": 0.5, "top_p": 0.9}
    for given, name in (
        ({"num_beams": 4}, "num_beams=4"),
        ({"do_sample": True, "temperature": 1, "top_k": 5}, "top_k=5"),
    ):
        with pytest.raises(WordsError, match=f"a generates with {name}, which dtrain has not"):
            options_of({"until": [], **given}, "a")
