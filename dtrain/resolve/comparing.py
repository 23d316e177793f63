"""Checks an objective that compares the model with another one, or takes its samples in another shape than the data has
them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import Config


def pairs(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check data and mesh for an objective of pairs. The shape of a user's own samples shows in the first batch."""
    if not about(draft["objective"]).get("pairs"):
        return
    word, facts = f"objective={config.word('objective')}", about(config.data)
    if facts.get("gives") in ("tokens", "any") and not facts.get("pairs"):
        yield (
            f"{word} takes pairs of a chosen and a rejected answer, and data={config.word('data')} has none. Type "
            "data=chat data.path=<rows with chosen and rejected>, or data=dataset for pairs of your own."
        )
    if draft["mesh"].cp > 1:
        yield (
            f"{word}: the loss of a pair needs whole rows, and mesh.cp={draft['mesh'].cp} splits them. Leave mesh.cp "
            "out, or type mesh.tp for long rows."
        )


def teacher(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check the mesh for an objective with a teacher, whose blocks, heads and experts are its own."""
    part = draft["objective"]
    if about(part).get("reference") != "teacher":
        return
    word = f"objective={config.word('objective')}"
    for axis in ("pp", "cp", "ep"):
        if (degree := getattr(draft["mesh"], axis)) > 1:
            yield (
                f"{word}: a teacher is split by the data axes and mesh.tp alone, and mesh.{axis}={degree}. Leave "
                f"mesh.{axis} out, or type strategy=fsdp or mesh.tp for models that are too large."
            )
    place = part.get("teacher")
    if config.out is not None and str(place).split("/checkpoints/")[0].rstrip("/") == config.out.rstrip("/"):
        yield f"objective.teacher={place} is this run: out={config.out}. Type out=<another place>."


def masks(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check data and model for an objective that hides tokens."""
    part = draft["objective"]
    if not about(part).get("masks"):
        return
    word, data, model = (f"{group}={config.word(group)}" for group in ("objective", "data", "model"))
    facts = about(config.data)
    if config.data.get("packing") == "pack":
        yield f"{word} hides tokens of rows that are not packed. Type data.packing=none."
    elif not facts.get("text") or facts.get("chat"):
        yield f"{word} hides tokens of plain text, and {data} is none. Type data=text data.tokenizer=<its tokenizer>."
    elif "vocab_of" in facts and config.data.get("tokenizer") in facts["vocab_of"]:
        yield (
            f"{word} needs a mask token, and data.tokenizer={config.data['tokenizer']} has none. Type "
            "data.tokenizer=<a tokenizer.json with a mask token>."
        )
    if about(config.model).get("takes") == "tokens":
        yield (
            f"{word} needs a model that reads a row in both directions, and {model} reads forwards. Type model=hf "
            "model.name=<a model such as BERT> model.task=masked_lm."
        )
    elif about(config.model).get("weights_at") and config.model.get("task") != "masked_lm":
        yield f"{word}: the head of {model} is for model.task={config.model.get('task')}. Type model.task=masked_lm."
    if sum(part.get(name) or 0 for name in ("hidden", "random")) > 1:
        yield (
            f"objective.hidden={part['hidden']} and objective.random={part['random']} are more than all targets. "
            f"Type objective.random={round(1 - part['hidden'], 3):g}."
        )
