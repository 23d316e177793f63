"""Facts of parts that are not dtrain's own words, read from the source of their class: the `about` of the class and of
its bases; a base that is a word of dtrain contributes that word's facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtrain.build import received
from dtrain.config import files
from dtrain.config.constraints import wants_text
from dtrain.config.facts import about, wrong
from dtrain.config.schema import GROUPS as EVERY
from dtrain.config.schema import Config
from dtrain.config.word import spelling
from dtrain.errors import WordsError
from dtrain.resolve.passed import signature_of_part
from dtrain.resolve.signature import Signature, home_of, lineage
from dtrain.resolve.source import literal
from dtrain.resolve.values import parts_of

GROUPS = (
    "strategy", "precision", "remat", "compile", "adapter", "data", "objective", "optim", "schedule", "backend",
    "launcher",
)  # fmt: skip
"""Groups in which a user's class inherits facts. A model is traced instead."""
_ADAM = {"state": {"every": ["whole", "whole", "count"]}, "needs": "elements", "copies": 2, "fused": True}
_MOMENTUM = {"state": {"every": [{"whole": "momentum"}]}, "needs": "elements", "copies": 2}
OF_TORCH: Mapping[str, Mapping[str, Any]] = {
    "torch.optim.adam.Adam": _ADAM,
    "torch.optim.sgd.SGD": {**_MOMENTUM, "fused": True},
    "torch.optim.radam.RAdam": {**_ADAM, "fused": False},
    "torch.optim.nadam.NAdam": {**_ADAM, "state": {"every": ["whole", "whole", "count", "count"]}, "fused": False},
    "torch.optim.adagrad.Adagrad": {**_ADAM, "state": {"every": ["whole", "count"]}},
    "torch.optim.rmsprop.RMSprop": {
        **_MOMENTUM, "state": {"every": ["whole", "count", {"whole": "momentum"}, {"whole": "centered"}]},
    },
}  # fmt: skip
"""Facts of torch classes, which state none themselves."""


def stated(config: Config) -> Config:
    """Add to each part the facts that its class states; those of its word take precedence. Raises WordsError for an
    invalid fact.
    """
    parts: dict[str, Any] = {group: with_stated(group, getattr(config, group)) for group in GROUPS}
    options = {
        group: {word: with_stated(group, part) for word, part in words.items()}
        for group, words in config.options.items()
    }
    problems = [
        problem for group in (*GROUPS, "hook") for _, part in parts_of(config, group) for problem in _wrong(group, part)
    ]
    problems += [
        problem for group, words in options.items() for part in words.values() for problem in _wrong(group, part)
    ]
    if problems:
        raise WordsError(*problems)
    every = {group: parts.get(group, getattr(config, group)) for group in EVERY}
    return replace(
        config, options=options, **{group: as_typed(part, group, config.numbers) for group, part in every.items()}
    )


def as_typed(value: Any, key: str, numbers: Mapping[str, str]) -> Any:
    """A part, in which each number that a class of the user's own takes as text is that text. `numbers`: key -> number
    as it was typed.
    """
    if not isinstance(value, Mapping):
        return value
    is_own = not str(value.get("_target_", "dtrain.")).startswith("dtrain.") or received(value) is not None
    takes = signature_of_part(value) if is_own else None
    texts = takes.allowed if isinstance(takes, Signature) else {}
    part = {name: as_typed(item, f"{key}.{name}", numbers) for name, item in value.items() if name != "_about_"}
    for name, item in part.items():
        if type(item) in (int, float) and wants_text(item, texts.get(name, "any")):
            part[name] = numbers.get(f"{key}.{name}", spelling(item))
    return {**value, **part}


def _wrong(group: str, part: Any) -> Iterator[str]:
    """A sentence for each mistake in the facts that the user's classes state from which a part derives."""
    target = part.get("_target_") if isinstance(part, Mapping) else None
    if not isinstance(target, str) or target.startswith("dtrain."):
        return
    for module, statement in lineage(target):
        own = None if module.startswith("dtrain.") else literal(statement, "about")
        for _, sentence in wrong(group, own):
            yield f"{module}.{statement.name} {sentence}"


def with_stated(group: str, part: Any) -> Any:
    """The part with the facts that its class states."""
    target = part.get("_target_") if isinstance(part, Mapping) else None
    if not isinstance(target, str) or (target.startswith("dtrain.") and about(part)):
        return part
    facts: dict[str, Any] = {}
    for inherited in _of_classes(group, target):
        facts |= inherited
    return {**part, "_about_": {**facts, **about(part)}} if facts else part


def _of_classes(group: str, target: str) -> Iterator[Mapping[str, Any]]:
    """Facts in the order of increasing precedence: from the last base to the class itself."""
    for module, statement in reversed(lineage(target)):
        own = literal(statement, "about")
        yield {**_of_word(group, module), **OF_TORCH.get(f"{module}.{statement.name}", {})}
        yield own if isinstance(own, Mapping) else {}
    yield _of_word(group, home_of(target))
    yield _of_word(group, target.rpartition(".")[0])


def _of_word(group: str, module: str) -> Mapping[str, Any]:
    """Arguments and facts of the word defined in `module`, without the fact `allowed`."""
    _, word = files.own_word(module)
    homes = (f"dtrain.{group}.{word}", f"dtrain.integrations.{word}.{group}")
    if module not in homes or word not in files.groups()[group]:
        return {}
    node = files.node(group, word)
    arguments = {name: value for name, value in node.items() if name[0] != "_"}
    return {**arguments, **{name: value for name, value in about(node).items() if name != "allowed"}}
