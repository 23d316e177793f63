"""Values that a script takes from elsewhere in itself, in the place where they are used: defaults of argparse for
`args.lr`, and entries of a mapping that is written once for `config["lr"]`. No line is run.
"""

import ast
from collections import Counter
from typing import Any

NUMBERS = ("int", "float", "str", "bool")


def looked_through(module: ast.Module) -> ast.Module:
    """The module with those values written out, and without conversions such as `int(...)` around a plain value."""
    written = _Written(_defaults(module), _entries(module))
    written.visit(module)
    return ast.fix_missing_locations(module)


def _defaults(module: ast.Module) -> dict[str, ast.expr]:
    """Argument of the command line -> its default, unless the script assigns another."""
    changed = {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute) and _is_store(node)}
    defaults: dict[str, ast.expr] = {}
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        options = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument" or not options:
            continue
        given = {word.arg: word.value for word in call.keywords}
        option = next((each for each in options if each.startswith("--")), options[0])
        name = _text(given.get("dest")) or option.lstrip("-").replace("-", "_")
        action = _text(given.get("action"))
        off = {"store_true": ast.Constant(False), "store_false": ast.Constant(True)}.get(action)
        default = given.get("default", off)
        if default is not None and name not in changed and not _is_none(default):
            defaults[name] = default
    return defaults


def _entries(module: ast.Module) -> dict[str, dict[str, ast.expr]]:
    """Name of a mapping that is written once and never changed -> its entries."""
    given = [
        (target.id, node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    times = Counter(name for name, _ in given)
    stores = [node for node in ast.walk(module) if isinstance(node, ast.Subscript) and _is_store(node)]
    changed = {(ast.unparse(node.value), _text(node.slice)) for node in stores}
    return {
        name: {
            _text(key): item
            for key, item in zip(value.keys, value.values, strict=True)
            if key and not {(name, _text(key)), (name, "")} & changed
        }
        for name, value in given
        if isinstance(value, ast.Dict) and times[name] == 1
    }


def _is_store(node: Any) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.expr | None) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


class _Written(ast.NodeTransformer):
    def __init__(self, defaults: dict[str, ast.expr], entries: dict[str, dict[str, ast.expr]]) -> None:
        self._defaults, self._entries = defaults, entries

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        is_one = isinstance(node.value, ast.Name) and not _is_store(node)
        names = ("args", "opt", "opts", "options", "flags", "FLAGS", "hparams")
        if is_one and ast.unparse(node.value) in names and node.attr in self._defaults:
            return self._defaults[node.attr]
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        entry = self._entries.get(ast.unparse(node.value), {}).get(_text(node.slice))
        return self.generic_visit(node) if entry is None or _is_store(node) else entry

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        is_plain = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and not node.keywords
        return node.args[0] if is_plain and ast.unparse(node.func) in NUMBERS else node
