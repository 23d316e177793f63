"""Refuses a LightningModule of which parts that it defines would be left out without a word: its training_step, its
optimizer or its data. It is known by its class, also where Lightning is not installed.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dtrain.build import received
from dtrain.cluster import Cluster
from dtrain.config.schema import WORDS, Config
from dtrain.resolve.signature import lineage

PACKAGES = ("lightning", "pytorch_lightning")
MODULE, DATAMODULE = "LightningModule", "LightningDataModule"
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


def datamodules(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check that no DataModule is named where a dataset is."""
    parts = {"data": config.data} | {f"evaluate.sets.{name}": part for name, part in config.evaluate.sets.items()}
    for key, part in parts.items():
        own = part.get("dataset") if isinstance(part, Mapping) else None
        if isinstance(own, Mapping) and DATAMODULE in _bases(own):
            given = received(own)
            named = str(own.get("_target_")) if given is None else (getattr(given, "__name__", type(given).__name__))
            yield (
                f"{key}.dataset: {named} is a DataModule of Lightning, which makes loaders; dtrain takes the datasets "
                f"in them. Type {key}.dataset._target_=<the class of a dataset in it, or a function that returns it>. "
                "docs/moving.md has an example with data for training and for evaluation."
            )


def scheduled(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check that the configure_optimizers of optim=lightning returns no scheduler, as far as its source shows."""
    if config.choices["optim"] != "lightning" or config.choices["model"] is not None:
        return
    method = _configure(config.model)
    returns = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)] if method else []
    if method and returns and all(_has_scheduler(value, method) for value in returns):
        yield (
            "optim=lightning: configure_optimizers returns a scheduler, which dtrain does not step. Type optim=<word> "
            "optim.lr=<value> schedule=linear, cosine, constant or wsd, or return the optimizer alone."
        )


def _configure(part: Mapping[str, Any]) -> ast.FunctionDef | None:
    """The source of a model's configure_optimizers."""
    given = received(part)
    if given is None:
        classes = [each for module, each in lineage(str(part.get("_target_"))) if module.split(".")[0] not in PACKAGES]
        entries = [entry for each in classes for entry in each.body]
    else:
        try:
            source = inspect.getsource(given.configure_optimizers)
            entries = ast.parse(textwrap.dedent(source)).body
        except (AttributeError, OSError, TypeError, SyntaxError):
            return None
    methods = (entry for entry in entries if isinstance(entry, ast.FunctionDef))
    return next((method for method in methods if method.name == "configure_optimizers"), None)


def _has_scheduler(value: ast.expr | None, method: ast.FunctionDef) -> bool:
    """Whether a returned expression is certain to hold a scheduler, in one of the forms that Lightning takes."""
    if isinstance(value, ast.Name):
        assigned = [node for node in ast.walk(method) if isinstance(node, ast.Assign)]
        values = [node.value for node in assigned if [ast.unparse(one) for one in node.targets] == [value.id]]
        return len(values) == 1 and not isinstance(values[0], ast.Name) and _has_scheduler(values[0], method)
    if isinstance(value, ast.Dict):
        entries = zip(value.keys, value.values, strict=True)
        given = [each for key, each in entries if isinstance(key, ast.Constant) and key.value == "lr_scheduler"]
        return any(not (isinstance(each, ast.Constant) and each.value is None) for each in given)
    parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    return len(parts) == 2 and isinstance(parts[1], ast.List | ast.Tuple) and bool(parts[1].elts)


def _bases(part: Mapping[str, Any]) -> set[str]:
    """The names of the bases of a class that a part names, or of an object that was passed."""
    given = received(part)
    if given is not None:
        return {each.__name__ for each in (given if isinstance(given, type) else type(given)).__mro__}
    return {
        ast.unparse(base).rpartition(".")[2] for _, each in lineage(str(part.get("_target_"))) for base in each.bases
    }


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
