"""Reads the parts of a Lightning script beside the arguments of its Trainer: the seed, the callbacks that it gathers by
code, and the model and data that it fits.
"""

import ast
from collections.abc import Collection
from typing import Any

from dtrain.integrations.importers import scopes
from dtrain.integrations.importers.calls import Script, last
from dtrain.integrations.importers.ledger import Differs
from dtrain.integrations.importers.made import Made, made

SEEDS = ("seed_everything", "manual_seed")
GATHERED = ("EarlyStopping", "ModelCheckpoint")
"""Callbacks that decide when a run ends and what it keeps."""


def read(module: ast.Module, script: Script, calls: Collection[ast.Call], inside: Collection[int]) -> dict[str, Any]:
    """Further keys of the tree. `inside`: the ids of the calls that the arguments of the Trainer hold."""
    gathered = [script.value(call) for call in calls if last(call.func) in GATHERED and id(call) not in inside]
    seeds = [_first(call, "seed", script) for name in SEEDS for call in calls if last(call.func) == name]
    seeds = list(dict.fromkeys(map(str, seeds))) if len({*map(str, seeds)}) > 1 else seeds[:1]
    size = scopes.batch_size(scopes.loaders(module), module, script)
    fits = [call for call in calls if last(call.func) == "fit" and "trainer" in ast.unparse(call.func).lower()]
    tree: dict[str, Any] = {"callbacks": gathered} if gathered else {}
    if seeds:
        tree["seed_everything"] = seeds[0] if len(seeds) == 1 else Differs(" or ".join(seeds))
    if size:
        tree["DataLoader"] = size
    for call in fits[:1]:
        things = {**dict(zip(("model", "data"), call.args, strict=False)), **_of_fit(call)}
        tree |= {name: _fitted(node, module, script) for name, node in things.items()}
    return tree


def _of_fit(call: ast.Call) -> dict[str, ast.expr]:
    names = {"model": "model", "datamodule": "data", "train_dataloaders": "data", "train_dataloader": "data"}
    return {names[word.arg]: word.value for word in call.keywords if word.arg in names}


def _fitted(node: ast.expr, module: ast.Module, script: Script) -> Made:
    """The model or data that is fitted; of a DataLoader the dataset in it."""
    thing = made(node, module, script)
    if not isinstance(thing.node, ast.Call) or last(thing.node.func) != "DataLoader":
        return thing
    named = [word.value for word in thing.node.keywords if word.arg == "dataset"]
    datasets = [*thing.node.args[:1], *named]
    dataset = made(datasets[0], module, script) if datasets else thing
    dataset.is_loaded = True
    return dataset


def _first(call: ast.Call, name: str, script: Script) -> Any:
    arguments = script.arguments(call)
    return arguments.get("args.0", arguments.get(name, 0))
