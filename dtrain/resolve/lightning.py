"""Refuses a LightningModule of which parts that it defines would be left out without a word: its training_step, its
optimizer or its data. It is known by its class, also where Lightning is not installed.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dtrain.build import received
from dtrain.cluster import Cluster
from dtrain.config.schema import WORDS, Config
from dtrain.resolve.signature import lineage

PACKAGES = ("lightning", "pytorch_lightning")
MODULE = "LightningModule"
INSTEAD = {
    "training_step": (
        "objective", "objective=lightning for its training_step, or another objective for what its forward returns"
    ),
    "configure_optimizers": ("optim", "optim=lightning for its configure_optimizers, or another optimizer"),
    "train_dataloader": (
        "data", "data=dataset data.dataset._target_=<its dataset> in place of its train_dataloader, or other data"
    ),
}  # fmt: skip
"""Method -> the group that does the same here, and what to type."""


def chosen(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check that objective, optimizer and data are typed for a LightningModule that has its own."""
    target, given = str(config.model.get("_target_")), received(config.model)
    if config.choices["model"] is not None:
        return
    methods = set(_of_given(given) if given is not None else _of_source(target))
    missing = [sentence for name, (group, sentence) in INSTEAD.items() if name in methods and _is_open(config, group)]
    if missing:
        name = f"model._target_={target}" if given is None else f"model={config.model['of'].partition('.')[2]}"
        yield (
            f"{name} is a LightningModule, and dtrain calls its forward alone unless told. Type {'; '.join(missing)}. "
            "docs/moving.md shows all of it."
        )


def _is_open(config: Config, group: str) -> bool:
    """Whether the word of a group is its default, which nobody typed."""
    return config.choices[group] == WORDS[group] and group not in config.sources


def _of_source(target: str) -> Iterator[str]:
    """The methods that a class and its bases define below LightningModule, by their source."""
    if target.startswith("dtrain."):
        return
    classes = [statement for module, statement in lineage(target) if module.split(".")[0] not in PACKAGES]
    bases = [ast.unparse(base).rpartition(".")[2] for statement in classes for base in statement.bases]
    if MODULE in bases:
        yield from (entry.name for each in classes for entry in each.body if isinstance(entry, ast.FunctionDef))


def _of_given(thing: Any) -> Iterator[str]:
    """The same of a class, or of an object, that was passed to `dtrain.run`."""
    classes = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
    own = [each for each in classes if each.__module__.split(".")[0] not in PACKAGES]
    if any(each.__name__ == MODULE for each in classes if each not in own):
        yield from (name for each in own for name in vars(each))
