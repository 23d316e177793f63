"""The values of a Python file, which is never executed: the arguments of its calls, as far as they are literals."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtrain.integrations.importers.ledger import Code, Differs

CALLS = {
    "Trainer": "trainer",
    "LightningCLI": "cli",
    "ScalingConfig": "scaling_config",
    "RunConfig": "run_config",
    "FailureConfig": "failure_config",
    "CheckpointConfig": "checkpoint_config",
    "TorchTrainer": "ray_trainer",
    "DataParallelTrainer": "ray_trainer",
}
"""Calls that configure a run -> the key of their arguments in the tree."""
OWNERS = ("torch", "torch.random", "torch.cuda")
"""Modules whose manual_seed seeds all generators."""
DEEPEST = 50
"""Names that stand for names."""
BRANCHES = (ast.If, ast.For, ast.While)


class Script:
    """The values of a Python file that are known without running it; `inside` are the ids of calls nested in
    another.
    """

    def __init__(self, module: ast.Module) -> None:
        self.inside: set[int] = set()
        given: dict[str, ast.expr] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                given[node.targets[0].id] = node.value
        times = Counter(name for node in ast.walk(module) for name in _changes(node, given))
        self._names = {
            name: value for name, value in given.items() if times[name] == 1
        }  # a reassigned name has no certain value
        assigned = [node for node in ast.walk(module) if isinstance(node, ast.Assign) and len(node.targets) == 1]
        self._owners = {id(node.value): ast.unparse(node.targets[0]) for node in assigned}
        self._later = list(_attributes(module))

    def arguments(self, call: ast.Call, deep: int = 0) -> dict[str, Any]:
        """Return a call's arguments by name, including those of a literal **mapping."""
        values = {f"args.{number}": self.value(node, deep) for number, node in enumerate(call.args)}
        for word in call.keywords:
            values |= _spread(word.value, self.value(word.value, deep), word.arg)
        return values

    def later(self, call: ast.Call) -> dict[str, Any]:
        """Return the attributes that are set on the object of a call after it is made; Code for one set on a
        condition.
        """
        owner = self._owners.get(id(call))
        found = [(name, value, is_sure) for object_, name, value, is_sure in self._later if object_ == owner]
        return {name: self.value(value) if is_sure else Code(ast.unparse(value)) for name, value, is_sure in found}

    def value(self, node: ast.expr, deep: int = 0) -> Any:
        """Return a plain value; class_path and init_args for a call of another class; Code for a computed value."""
        if isinstance(node, ast.Name) and node.id in self._names and deep < DEEPEST:
            return self.value(self._names[node.id], deep + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, deep) for item in node.elts]
        if isinstance(node, ast.Dict) and all(key is None or isinstance(key, ast.Constant) for key in node.keys):
            return self._entries(node, deep)
        if isinstance(node, ast.Call) and last(node.func) == "dict" and not node.args:
            return self.arguments(node, deep)
        if isinstance(node, ast.Call):
            self.inside.add(id(node))
            name = ast.unparse(node.func)
            arguments = self.arguments(node, deep)
            return arguments if last(node.func) in CALLS else {"class_path": name, "init_args": arguments}
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            return Code(ast.unparse(node))

    def _entries(self, node: ast.Dict, deep: int) -> dict[str, Any]:
        """Return the entries of a literal mapping; an unknown ** mapping in it becomes Code."""
        values: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            name = str(key.value) if isinstance(key, ast.Constant) else None
            values |= _spread(item, self.value(item, deep), name)
        return values


def _spread(node: ast.expr, value: Any, name: str | None) -> dict[str, Any]:
    """Return a named value, or the entries of a ** mapping; an unknown mapping becomes Code."""
    if name is not None:
        return {name: value}
    known = isinstance(value, dict) and "class_path" not in value
    return value if known else {f"**{ast.unparse(node)}": Code(value)}


def _changes(node: ast.AST, given: Mapping[str, ast.expr]) -> Iterator[str]:
    """Yield the names that a node binds, or whose list or mapping it may mutate."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)):
        root: ast.expr = node
        while isinstance(root, ast.Subscript | ast.Attribute):
            root = root.value
        literal = given.get(root.id) if isinstance(root, ast.Name) else None
        if isinstance(literal, ast.List | ast.Dict) or (
            isinstance(literal, ast.Call) and last(literal.func) in ("dict", "list")
        ):
            yield ast.unparse(root)


def same(values: Sequence[Any]) -> Any:
    """The value that several calls agree on; Differs where they do not; None if there is none."""
    if not values:
        return None
    first, *others = values
    if all(each == first and type(each) is type(first) for each in others):
        return first
    if all(isinstance(each, dict) for each in values):
        names = dict.fromkeys(name for each in values for name in each)
        return {name: same([each.get(name) for each in values]) for name in names}
    return Differs(" or ".join(dict.fromkeys("nothing" if each is None else str(each) for each in values)))


def is_seed(call: ast.Call) -> bool:
    """Whether a call of a seeding function seeds the run, and not one generator: `Generator().manual_seed(1)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner is None or last(call.func) != "manual_seed" or ast.unparse(owner) in OWNERS


def last(node: ast.expr) -> str:
    """The last part of a dotted name; empty for another expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _attributes(module: ast.Module) -> Iterator[tuple[str, str, ast.expr, bool]]:
    """Yield the attributes that a file sets: the object, the name, the value, and whether no condition decides it."""
    branches = [node for node in ast.walk(module) if isinstance(node, BRANCHES) and not _is_main(node)]
    unsure = {id(node) for branch in branches for node in ast.walk(branch)}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield ast.unparse(target.value), target.attr, node.value, id(node) not in unsure
        elif isinstance(node, ast.Call) and last(node.func) == "setattr" and len(node.args) == 3:
            owner, name, value = node.args
            if isinstance(name, ast.Constant):
                yield ast.unparse(owner), str(name.value), value, id(node) not in unsure


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
