"""The tasks that heads of transformers' models are for."""

from collections.abc import Mapping
from typing import Any

TASKS = {
    "CausalLM": "causal_lm", "SequenceClassification": "classification", "MaskedLM": "masked_lm",
    "ImageClassification": "image_classification", "Seq2SeqLM": "seq2seq",
}  # fmt: skip
"""The end of the name of a class of transformers, after `For` -> model.task."""
OTHERS = {"LMHeadModel": "causal_lm", "ForConditionalGeneration": "seq2seq"}
"""Other ends of such names: of GPT-2 and of T5."""


def task_of(name: str) -> str | None:
    """model.task of a class of transformers, such as BertForSequenceClassification; None if its head is another."""
    named = TASKS.get(name.rpartition("For")[2])
    return named or next((task for end, task in OTHERS.items() if name.endswith(end)), None)


def architecture(described: Mapping[str, Any]) -> str:
    """The class that a config.json names; empty if it names none."""
    names = described.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
