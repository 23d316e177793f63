"""The objects that a Python script makes, as far as its source shows their class and arguments."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.integrations.importers.calls import Script, last
from dtrain.integrations.importers.ledger import Code, Ledger, flatten, show

WRAPPERS = {
    "DistributedDataParallel": "ddp", "DDP": "ddp", "FullyShardedDataParallel": "fsdp", "FSDP": "fsdp",
    "fully_shard": "fsdp",
}  # fmt: skip


class Made(Code):
    """An expression that makes an object: `target` is the dotted name of its class or function, which begins with a dot
    if it is in this file, and is empty if it cannot be seen; `given` are its literal arguments by name.
    """

    node: ast.expr
    target: str = ""
    given: Mapping[str, Any] = {}
    is_loaded: bool = False
    """Whether a DataLoader is given it."""
    is_guarded: bool = True
    """Whether this file can be imported without running the training."""

    def name(self, place: str) -> str:
        """The dotted name of the class in the file at `place`."""
        own = place.rpartition("/")[2].partition(".")[0]
        return f"{own}{self.target}" if self.target.startswith(".") else self.target


def made(node: ast.expr, module: ast.Module, script: Script) -> Made:
    """The call behind an expression, also of a name that is assigned a few times, the first of which counts."""
    if isinstance(node, ast.Name):
        assigned = (each for each in ast.walk(module) if isinstance(each, ast.Assign))
        calls = (_inner(each.value) for each in assigned if [ast.unparse(one) for one in each.targets] == [node.id])
        node = next((call for call in calls if isinstance(call, ast.Call)), node)
    node = _inner(node)
    thing = Made(ast.unparse(node))
    thing.node = node
    if isinstance(node, ast.Call):
        thing.target = _origin(ast.unparse(node.func), module)
        thing.given = _literals(script.arguments(node), _parameters(thing.target, module))
    guards = (ast.unparse(each.test) for each in module.body if isinstance(each, ast.If))
    thing.is_guarded = any("__name__" in guard for guard in guards)
    return thing


def named(word: str, thing: Any, ledger: Ledger) -> str:
    """The words for a class and its literal arguments, as far as they can be seen."""
    if not isinstance(thing, Made) or not thing.target:
        return f"{word}._target_=<its class> trust=[<its package>]"
    target = thing.name(ledger.place)
    words = {"_target_": target, **thing.given}
    typed = " ".join(f"{word}.{name}={show(value)}" for name, value in words.items())
    typed += f" trust=[{target.partition('.')[0]}]"
    is_run = thing.target.startswith(".") and not thing.is_guarded
    return f"{typed} once the class is in a file that trains nothing" if is_run else typed


def _literals(arguments: Mapping[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
    """The arguments whose values are plain and whose names are known."""
    places = {f"args.{place}": name for place, name in enumerate(parameters)}
    by_name = {places.get(name, name): value for name, value in arguments.items()}
    plain = {name: value for name, value in by_name.items() if name.isidentifier()}
    return {name: value for name, value in plain.items() if not any(_is_code(each) for _, each in flatten(value, name))}


def _is_code(value: Any) -> bool:
    return isinstance(value, Code | dict) or (isinstance(value, list) and any(map(_is_code, value)))


def _parameters(target: str, module: ast.Module) -> list[str]:
    """The names of the arguments of a class of this file, in their places."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and target == f".{node.name}"]
    entries = [entry for each in classes for entry in each.body if isinstance(entry, ast.FunctionDef)]
    return [argument.arg for entry in entries if entry.name == "__init__" for argument in entry.args.args[1:]]


def _origin(name: str, module: ast.Module) -> str:
    """The dotted name that a name of this file stands for."""
    first, _, rest = name.partition(".")
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return f".{name}"
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (alias.asname or alias.name) == first:
                package = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
                return f"{package}{alias.name}{f'.{rest}' if rest else ''}"
            if isinstance(node, ast.Import) and alias.name.partition(".")[0] == first:
                return name
    return ""


def _inner(node: ast.expr) -> ast.expr:
    """The begin of a chain of `.to(...)`, `.cuda()` and wrappers."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "cpu", "train", "float"):
            node = node.func.value
        elif last(node.func) in (*WRAPPERS, "compile", "DataParallel") and node.args:
            node = node.args[0]
        else:
            break
    return node
