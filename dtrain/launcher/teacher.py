"""Checks the teacher of an objective before ranks start: its weights, the code of its model, its vocabulary."""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.build import GIVEN
from dtrain.config import trust
from dtrain.config.facts import about
from dtrain.config.word import cut
from dtrain.errors import StoreError
from dtrain.planned import Plan
from dtrain.predict import formulas, reference
from dtrain.weights import plain
from dtrain.weights.owner import Owner, configuration, owner_of, tokens, vocab_in


def problems(plan: Plan) -> Iterable[str]:
    """One sentence for each problem."""
    if not reference.is_teacher(plan):
        return
    key = f"objective.teacher={cut(str(plan.objective['teacher']), 400)}"
    try:
        owner = owner_of(str(plan.objective["teacher"]))
    except StoreError as error:
        yield f"{key}: {error}"
        return
    for name in _targets(owner.part):
        if name == GIVEN:
            yield f"{key}: its model was an object passed to dtrain.run, which no other run has. Export it first."
        elif not trust.allowed(name, "model", plan.trust):
            yield f"{key}: {trust.refusal('model._target_', name)}"
    mine = vocabulary(plan)
    if mine and owner.vocab and mine != owner.vocab:
        yield (
            f"{key}: its vocabulary has {owner.vocab} tokens, that of the model {mine}. Name a teacher with the "
            "vocabulary of the data, or give the model the teacher's."
        )
    elif other := _another(plan, owner):
        yield f"{key}: {other}"


def vocabulary(plan: Plan) -> int | None:
    """How many tokens the model of a plan knows; None if only building it tells."""
    part = plan.model
    if name := about(part).get("weights_at"):
        return vocab_in({**configuration(str(part[name])), **part.get("config", {})})
    vocab = part.get("vocab")
    if vocab == "auto":
        vocab = formulas.facts_of(plan.data).get("vocab")
        if vocab is None and isinstance(tokenizer := plan.data.get("tokenizer"), str):
            vocab = 1 + max(tokens(tokenizer), default=-1) or None
        vocab = vocab or plan.data.get("outputs")
    return vocab if isinstance(vocab, int) else None


def _another(plan: Plan, owner: Owner) -> str:
    """The first token that is another one in the teacher's tokenizer; empty if there is none."""
    mine = plan.data.get("tokenizer")
    if not isinstance(mine, str) or owner.tokenizer in (None, mine):
        return ""
    ours, theirs = tokens(mine), tokens(str(owner.tokenizer))
    odd = next((number for number in sorted(ours.keys() & theirs.keys()) if ours[number] != theirs[number]), None)
    if odd is None:
        return ""
    return (
        f"its tokenizer is another: token {odd} is {plain(theirs[odd])!r} there, {plain(ours[odd])!r} here. Type "
        f"data.tokenizer={owner.tokenizer}."
    )


def _targets(node: Any) -> Iterable[str]:
    """All names of code in a part."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from [str(value)] if name == "_target_" else _targets(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _targets(value)
