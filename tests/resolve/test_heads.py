"""What the head of a model of transformers is for, where nobody types it."""

import json
from pathlib import Path

import pytest
from small import CPUS

from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.resolve import resolve

ROWS = ("data=jsonl", "data.path=rows.jsonl", "data.inputs=input_ids", "data.targets=label", "data.pad=0")
TEXT = ("data=text", "data.path=a.txt", "data.tokenizer=tokenizer.json")


def task(folder: Path, architecture: str | None, *words: str) -> str:
    described = {"model_type": "bert"} | ({"architectures": [architecture]} if architecture else {})
    (folder / "config.json").write_text(json.dumps(described))
    plan = resolve(compose(["model=hf", f"model.name={folder}", "steps=2", "batch=2", *words]), CPUS)
    return str(plan.model["task"])


@pytest.mark.parametrize(
    ("architecture", "words", "expected"),
    [
        ("BertForSequenceClassification", ROWS, "classification"),
        ("BertForSequenceClassification", (*ROWS, "objective=regression"), "classification"),
        ("LlamaForCausalLM", TEXT, "causal_lm"),
        ("GPT2LMHeadModel", TEXT, "causal_lm"),
        (None, TEXT, "causal_lm"),
        (
            "ViTForImageClassification",
            ("data=dataset", "data.dataset._target_=m.D", "trust=[m]"),
            "image_classification",
        ),
        ("ViTModel", ("data=images", "data.path=flowers", "data.size=8"), "image_classification"),
        ("BertForSequenceClassification", (*TEXT, "objective=masked"), "masked_lm"),
        ("BertForSequenceClassification", (*ROWS, "model.task=masked_lm"), "masked_lm"),
    ],
)
def test_the_task_is_what_config_json_or_the_data_says(
    architecture: str | None, words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    assert task(tmp_path, architecture, *words) == expected


def test_a_head_for_something_else_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(WordsError, match=r"class is BertForTokenClassification\. Type model\.task=<one of causal_lm"):
        task(tmp_path, "BertForTokenClassification", *ROWS)
