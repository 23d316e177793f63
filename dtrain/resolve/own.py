"""Facts of parts that are not words of ours, read off the source of their class: what `about` of the class and of those
it is derived from states, ours with the facts of their words.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtrain.config import files
from dtrain.config.facts import about, wrong
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.resolve.signature import home_of, lineage
from dtrain.resolve.source import literal

GROUPS = ("strategy", "precision", "remat", "compile", "data", "objective", "optim", "schedule", "backend", "launcher")
"""Those whose facts an own class inherits. What a model is shaped like is seen by running it."""
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
"""Classes of torch, which state no facts."""


def stated(config: Config) -> Config:
    """The config in which each part has the facts that its class states; those of its word go before them. Raises
    WordsError for a fact that means nothing.
    """
    parts: dict[str, Any] = {group: _stated(group, getattr(config, group)) for group in GROUPS}
    options = {
        group: {word: _stated(group, part) for word, part in words.items()} for group, words in config.options.items()
    }
    every = [*parts.items(), *((group, part) for group, words in options.items() for part in words.values())]
    problems = [sentence for group, part in every if isinstance(part, Mapping) for sentence in wrong(group, part)]
    if problems:
        raise WordsError(*problems)
    return replace(config, options=options, **parts)


def _stated(group: str, part: Any) -> Any:
    target = part.get("_target_") if isinstance(part, Mapping) else None
    if not isinstance(target, str) or (target.startswith("dtrain.") and about(part)):
        return part
    facts: dict[str, Any] = {}
    for found in _of_classes(group, target):
        facts |= found
    return {**part, "_about_": {**facts, **about(part)}} if facts else part


def _of_classes(group: str, target: str) -> Iterator[Mapping[str, Any]]:
    """From the last base to the class itself."""
    for module, statement in reversed(lineage(target)):
        own = literal(statement, "about")
        yield {**_of_word(group, module), **OF_TORCH.get(f"{module}.{statement.name}", {})}
        yield own if isinstance(own, Mapping) else {}
    yield _of_word(group, home_of(target))
    yield _of_word(group, target.rpartition(".")[0])


def _of_word(group: str, module: str) -> Mapping[str, Any]:
    """Arguments and facts of the word whose file is `module`, but for what its values may be."""
    _, _, word = module.removeprefix("dtrain.").partition(".")
    if not module.startswith(f"dtrain.{group}.") or word not in files.groups()[group]:
        return {}
    node = files.node(group, word)
    arguments = {name: value for name, value in node.items() if name[0] != "_"}
    return {**arguments, **{name: value for name, value in about(node).items() if name != "allowed"}}
