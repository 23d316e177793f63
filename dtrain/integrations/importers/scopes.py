"""The expression that a name stands for where it is used: what the calls of a function give its parameter, what an
object keeps as an attribute. No line is run.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from dtrain.integrations.importers.calls import DEEPEST, Script, last, same

Function = ast.FunctionDef | ast.AsyncFunctionDef


def behind(node: ast.expr, module: ast.Module) -> ast.expr:
    """The expression behind a parameter, a local name or an attribute, as far as all uses of it agree."""
    for _ in range(DEEPEST):
        found = None
        if isinstance(node, ast.Name):
            found = _of_name(node, module)
        elif isinstance(node, ast.Attribute):
            found = _of_attribute(node, module)
        if found is None:
            break
        node = found
    return node


def loaders(module: ast.Module) -> list[ast.Call]:
    """The calls that make the loaders of the training: each shuffles, or a name says what it is for."""
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and last(node.func) == "DataLoader"]
    return [call for call in calls if _is_trained(call, module)] or calls[:1]


def batch_size(calls: Sequence[ast.Call], module: ast.Module, script: Script) -> dict[str, Any]:
    """`batch_size` of loaders; empty if none says it."""
    nodes = [_argument(call, "batch_size", ("dataset", "batch_size")) for call in calls]
    found = same([script.value(behind(node, module)) for node in nodes if node])
    return {} if found is None else {"batch_size": found}


def _is_trained(call: ast.Call, module: ast.Module) -> bool:
    shuffles = [word.value for word in call.keywords if word.arg == "shuffle"]
    if any(isinstance(value, ast.Constant) and value.value for value in shuffles):
        return True
    owners = [node for node in ast.walk(module) if isinstance(node, ast.Assign) and node.value is call]
    names = [ast.unparse(target) for node in owners for target in node.targets]
    names += [each.name for each in _around(call, module) if isinstance(each, Function) and "loader" in each.name]
    return any("train" in name.lower() for name in names)


def _of_name(node: ast.Name, module: ast.Module) -> ast.expr | None:
    """The value of a name: as a parameter from the calls, else where it is assigned once."""
    for scope in (*_around(node, module), module):
        if isinstance(scope, ast.ClassDef):
            continue
        values = [value for target, value in _assigned(scope) if target == node.id]
        if values:
            return values[0] if len(values) == 1 else None
        if isinstance(scope, Function) and node.id in _parameters(scope):
            return _given(scope, node.id, module)
    return None


def _of_attribute(node: ast.Attribute, module: ast.Module) -> ast.expr | None:
    """The value that an object of a class of this file keeps: `self.size`, `self.hparams.size`, or `config.size`."""
    is_saved = isinstance(node.value, ast.Attribute) and node.value.attr == "hparams"
    owner = _class(node.value.value if is_saved and isinstance(node.value, ast.Attribute) else node.value, module)
    if owner is None:
        return None
    begin = next((each for each in owner.body if isinstance(each, Function) and each.name == "__init__"), None)
    kept = [value for target, value in _assigned(owner) if target == f"self.{node.attr}"]
    kept = kept or [value for target, value in _assigned(ast.Module(owner.body, [])) if target == node.attr]
    if len(kept) == 1:
        return kept[0]
    is_parameter = is_saved and begin is not None and node.attr in _parameters(begin)
    return _given(begin, node.attr, module) if is_parameter and begin else None


def _class(node: ast.expr, module: ast.Module) -> ast.ClassDef | None:
    """The class of an object, if this file has it."""
    if not isinstance(node, ast.Name):
        return None
    if node.id == "self":
        return next((each for each in _around(node, module) if isinstance(each, ast.ClassDef)), None)
    made = _of_name(node, module)
    name = last(made.func) if isinstance(made, ast.Call) else node.id
    return next((each for each in ast.walk(module) if isinstance(each, ast.ClassDef) and each.name == name), None)


def _given(function: Function, name: str, module: ast.Module) -> ast.expr | None:
    """The value that all calls of a function give a parameter, else its default."""
    owner = next((each for each in _around(function, module) if isinstance(each, ast.ClassDef)), None)
    called = owner.name if owner and function.name == "__init__" else function.name
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and last(node.func) == called]
    places = _parameters(function)[owner is not None :]
    values = [_argument(call, name, places) or _default(function, name) for call in calls]
    values = values or [_default(function, name)]
    first = values[0]
    return first if first and len({each and ast.unparse(each) for each in values}) == 1 else None


def _argument(call: ast.Call, name: str, places: Sequence[str]) -> ast.expr | None:
    named = {word.arg: word.value for word in call.keywords}
    return named.get(name, dict(zip(places, call.args, strict=False)).get(name))


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _default(function: Function, name: str) -> ast.expr | None:
    arguments = function.args
    placed = [*arguments.posonlyargs, *arguments.args][::-1]
    defaults: list[tuple[ast.arg, Any]] = [*zip(placed, arguments.defaults[::-1], strict=False)]
    defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return next((value for argument, value in defaults if argument.arg == name), None)


def _assigned(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Every assignment in a function or class; of a file those outside of both."""
    inner = [] if not isinstance(scope, ast.Module) else [
        part for each in scope.body if isinstance(each, Function | ast.ClassDef) for part in ast.walk(each)
    ]  # fmt: skip
    skipped = set(map(id, inner))
    for node in ast.walk(scope):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value:
            yield ast.unparse(node.target), node.value


def _around(node: ast.AST, module: ast.Module) -> Sequence[ast.AST]:
    """The functions and classes that a node is in, the nearest first."""
    scopes = [each for each in ast.walk(module) if isinstance(each, Function | ast.ClassDef) and each is not node]
    holding = [scope for scope in scopes if any(inside is node for inside in ast.walk(scope))]
    return holding[::-1]
