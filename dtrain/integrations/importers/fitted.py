"""Reads the parts of a Lightning script beside the arguments of its Trainer: the seed, the callbacks that it gathers by
code, and the model and data that it fits.
"""

import ast
from collections.abc import Collection
from typing import Any

from dtrain.integrations.importers import loops, scopes
from dtrain.integrations.importers.calls import Script, is_seed, last
from dtrain.integrations.importers.ledger import Code, Differs
from dtrain.integrations.importers.made import Made, made

CONFIGURES = "configure_optimizers"
SEEDS = ("seed_everything", "manual_seed")
GATHERED = ("EarlyStopping", "ModelCheckpoint")
"""Callbacks that decide when a run ends and what it keeps."""


def read(module: ast.Module, script: Script, calls: Collection[ast.Call], inside: Collection[int]) -> dict[str, Any]:
    """Further keys of the tree. `inside`: the ids of the calls that the arguments of the Trainer hold."""
    gathered = [script.value(call) for call in calls if last(call.func) in GATHERED and id(call) not in inside]
    seeds = [
        _first(call, "seed", script) for name in SEEDS for call in calls if last(call.func) == name and is_seed(call)
    ]
    seeds = list(dict.fromkeys(map(str, seeds))) if len({*map(str, seeds)}) > 1 else seeds[:1]
    size = scopes.batch_size(scopes.loaders(module), module, script)
    fits = [call for call in calls if last(call.func) == "fit" and "trainer" in ast.unparse(call.func).lower()]
    tree: dict[str, Any] = {"callbacks": gathered} if gathered else {}
    if seeds:
        tree["seed_everything"] = seeds[0] if len(seeds) == 1 else Differs(" or ".join(seeds))
    if size:
        tree["DataLoader"] = size
    tree |= _configured(module, script)
    held = [each for each in calls if last(each.func) == "DataLoader" and each not in scopes.loaders(module)]
    if held:
        tree["evaluation"] = Code(ast.unparse(held[0].args[0] if held[0].args else held[0]))
    for call in fits[:1]:
        things = {**dict(zip(("model", "data"), call.args, strict=False)), **_of_fit(call)}
        tree |= {name: _fitted(node, module, script) for name, node in things.items()}
    return tree


def _configured(module: ast.Module, script: Script) -> dict[str, Any]:
    """The optimizer and the scheduler that configure_optimizers makes, if it makes a scheduler, which dtrain does not
    step.
    """
    methods = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == CONFIGURES]
    calls = [node for method in methods for node in ast.walk(method) if isinstance(node, ast.Call)]
    optimizers = [call for call in calls if last(call.func).lower() in loops.OPTIMIZERS]
    schedulers = [call for call in calls if last(call.func) in loops.SCHEDULES]
    if not schedulers:
        return {}
    parts: dict[str, Any] = {"scheduler": {"name": " and ".join(last(call.func) for call in schedulers)}}
    if len(schedulers) == 1:
        parts["scheduler"] = loops.scheduler(_seen(schedulers[0], module), script)
    if len(optimizers) == 1:
        parts["optimizer"] = loops.optimizer(_seen(optimizers[0], module), script)
    return {CONFIGURES: parts}


def _seen(call: ast.Call, module: ast.Module) -> ast.Call:
    """The call with the expressions that its arguments stand for, such as self.lr."""
    words = [ast.keyword(word.arg, scopes.behind(word.value, module)) for word in call.keywords]
    return ast.Call(call.func, [scopes.behind(each, module) for each in call.args], words)


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
