"""Signatures of classes and functions, read from their source without running it: neither torch nor the user's package
is imported.

Modules are looked up in the folders of sys.path. Signatures that the source does not show (C extensions, metaclasses,
decorators, `*args`) and packages that are not installed are ignored.
"""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dtrain.resolve import annotation
from dtrain.resolve.source import ASSIGNMENTS, Module, file_of, mentions, module_of

KNOWN_DECORATORS = {
    "dataclass", "dataclasses.dataclass", "final", "typing.final", "runtime_checkable", "torch.no_grad", "cache",
    "functools.cache", "staticmethod",
}  # fmt: skip
EMPTY_BASES = ("object", "Generic", "Protocol", "typing.Generic")
"""Bases that add no argument."""
DEEPEST = 12


@dataclass(frozen=True)
class Signature:
    """`required` and `optional` keyword arguments; `open`: any other keyword is accepted too; `allowed`: the values of
    those whose annotations declare them.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    open: bool = False
    allowed: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


@dataclass(frozen=True)
class Missing:
    """The module exists but has no attribute `name`; `others`: its public attributes."""

    module: str
    name: str
    others: tuple[str, ...]


class Definition(NamedTuple):
    """A statement at the top of a module, and the `rest` of the dotted name that led to it."""

    module: Module
    statement: ast.stmt
    rest: list[str]


def signature(target: str) -> Signature | Missing | None:
    """Signature of a dotted name; None if its source does not show it."""
    return _signature(target, search_folders())


def search_folders() -> tuple[str, ...]:
    """Folders to search; dtrain itself may be outside sys.path, for example in an editable install."""
    return (*sys.path, str(Path(__file__).parents[2]))


@cache
def _signature(target: str, paths: tuple[str, ...]) -> Signature | Missing | None:
    try:
        return _of(_find(target.split("."), paths), paths)
    except RecursionError:
        return None


def home_of(target: str) -> str:
    """The module that defines a class or function, through all re-exports; empty if it cannot be found."""
    definition = _class_or_function(target)
    return definition.module.name if definition else ""


def class_of(target: str) -> tuple[Path, ast.ClassDef] | None:
    """(file, statement) that defines the class of a dotted name; None if it is no class or cannot be found."""
    definition = _class_or_function(target, lazy=True)
    if definition is None or not isinstance(definition.statement, ast.ClassDef):
        return None
    return definition.module.path, definition.statement


def lineage(target: str) -> list[tuple[str, ast.ClassDef]]:
    """(module, statement) of the class of a dotted name and of its bases, in the order of attribute lookup, as far as
    they can be found; for a function, those of its annotated return class.
    """
    classes, waiting, seen = list[tuple[str, ast.ClassDef]](), [target], set[str]()
    while waiting and len(seen) < DEEPEST:
        name = waiting.pop(0)
        definition = None if name in seen else _class_or_function(name)
        seen.add(name)
        if definition is None:
            continue
        module, statement = definition.module.name, definition.statement
        if isinstance(statement, ast.ClassDef):
            classes.append((module, statement))
            waiting[:0] = [f"{module}.{name}" for name in map(_dotted, statement.bases) if name]
        elif isinstance(statement, ast.FunctionDef) and statement.returns and not classes:
            returns = statement.returns
            named = str(returns.value) if isinstance(returns, ast.Constant) else _dotted(returns)
            waiting.append(f"{module}.{named}")
    return classes


def _class_or_function(target: str, *, lazy: bool = False) -> Definition | None:
    """The class or function of a dotted name."""
    definition = _find(target.split("."), search_folders(), lazy=lazy)
    if isinstance(definition, Definition) and not definition.rest:
        return definition if isinstance(definition.statement, ast.ClassDef | ast.FunctionDef) else None
    return None


def _find(
    parts: Sequence[str], paths: tuple[str, ...], depth: int = 0, *, lazy: bool = False
) -> Definition | Missing | None:
    """Look up the rest of a dotted name in its longest prefix that is a module, through aliases and re-exports. `lazy`:
    also in the modules that transformers loads on demand.
    """
    cuts = range(len(parts) - 1, 0, -1)
    module, cut = next(((made, cut) for cut in cuts if (made := module_of(".".join(parts[:cut]), paths))), (None, 0))
    if module is None or depth > DEEPEST:
        return None
    name, *rest = parts[cut:]
    statement = module.defined.get(name)
    if isinstance(statement, ASSIGNMENTS) and (alias := _alias(statement)):
        definition = _find([*module.name.split("."), *alias.split("."), *rest], paths, depth + 1, lazy=lazy)
        return None if isinstance(definition, Missing) else definition
    if statement:
        return Definition(module, statement, rest)
    if name in module.imported:
        source, attribute = module.imported[name]
        inner = [attribute] if attribute else []
        return _find([*source.split("."), *inner, *rest], paths, depth + 1, lazy=lazy)
    if lazy and module.path.parent.name == "transformers":
        return _loaded_late(module, name, paths)
    others = [*module.defined, *module.imported]
    for source in sorted(module.stars, key=lambda star: not mentions(star, name, paths)):
        definition = _find([*source.split("."), name, *rest], paths, depth + 1, lazy=lazy)
        if not isinstance(definition, Missing):
            return definition
        others += definition.others

    if module.dynamic or file_of(f"{module.name}.{name}", paths):
        return None
    return Missing(module.name, name, tuple(other for other in others if not other.startswith("_")))


def _loaded_late(package: Module, name: str, paths: tuple[str, ...]) -> Definition | None:
    """The class of a config of transformers: LlamaConfig is defined in models/llama/configuration_llama.py."""
    folders = (package.path.parent / "models").iterdir()
    near = [folder for folder in folders if name.lower().startswith(folder.name.replace("_", ""))]
    for folder in sorted(near, key=lambda path: -len(path.name)):
        for path in sorted(folder.glob("configuration_*.py")):
            definition = _find([package.name, "models", folder.name, path.stem, name], paths)
            if isinstance(definition, Definition):
                return definition
    return None


def _of(definition: Definition | Missing | None, paths: tuple[str, ...], depth: int = 0) -> Signature | Missing | None:
    if not isinstance(definition, Definition):
        return definition
    module, statement, rest = definition
    if isinstance(statement, ASSIGNMENTS):
        return None if rest else _of_partial(module, statement.value, paths, depth)
    if rest:
        return _of_method(module, statement, rest)
    if isinstance(statement, ast.ClassDef):
        return _of_class(module, statement, paths, depth)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and _plain(statement.decorator_list):
        return _of_function(statement, skip=0)
    return None


def _inside(module: Module, name: str, paths: tuple[str, ...], depth: int) -> Signature | None:
    """Signature of a name as a module sees it."""
    if depth > DEEPEST:
        return None
    known = _of(_find([*module.name.split("."), *name.split(".")], paths, depth + 1), paths, depth + 1)
    return known if isinstance(known, Signature) else None


def _of_partial(module: Module, value: ast.expr | None, paths: tuple[str, ...], depth: int) -> Signature | None:
    """Signature behind a functools.partial."""
    is_partial = isinstance(value, ast.Call) and _dotted(value.func) in ("partial", "functools.partial")
    if not isinstance(value, ast.Call) or not is_partial or len(value.args) != 1:
        return None
    bound = {keyword.arg for keyword in value.keywords}
    target = _inside(module, _dotted(value.args[0]), paths, depth)
    if target is None or None in bound:
        return None
    required = tuple(name for name in target.required if name not in bound)
    late = tuple(name for name in target.required if name in bound)
    return Signature(required, (*late, *target.optional), target.open, target.allowed)


def _of_method(module: Module, statement: ast.stmt, rest: Sequence[str]) -> Signature | Missing | None:
    """Signature of a class method or static method."""
    if not isinstance(statement, ast.ClassDef) or len(rest) > 1 or not _is_plain_class(statement):
        return None
    methods = _methods(statement)
    if rest[0] in methods:
        kinds = [_dotted(decorator) for decorator in methods[rest[0]].decorator_list]
        known = kinds in (["classmethod"], ["staticmethod"])
        return _of_function(methods[rest[0]], skip=int(kinds == ["classmethod"])) if known else None
    names = {name.id for entry in statement.body for name in ast.walk(entry) if isinstance(name, ast.Name)}
    if statement.bases or rest[0] in names:
        return None
    return Missing(f"{module.name}.{statement.name}", rest[0], tuple(methods))


def _methods(statement: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {entry.name: entry for entry in statement.body if isinstance(entry, ast.FunctionDef)}


def _is_plain_class(statement: ast.ClassDef) -> bool:
    return not statement.keywords and _plain(statement.decorator_list)


def _of_class(module: Module, statement: ast.ClassDef, paths: tuple[str, ...], depth: int) -> Signature | None:
    if not _is_plain_class(statement):
        return None
    methods = _methods(statement)
    if "__new__" in methods:
        return None
    if "__init__" in methods:
        return _of_function(methods["__init__"], skip=1) if _plain(methods["__init__"].decorator_list) else None
    bases = [name for name in map(_dotted, statement.bases) if name not in EMPTY_BASES]
    above = _inside(module, bases[0], paths, depth) if len(bases) == 1 and bases[0] else None
    if bases and above is None:
        return None
    is_dataclass = any(_dotted(decorator).endswith("dataclass") for decorator in statement.decorator_list)
    inherited = above or Signature()
    return _of_dataclass(statement, inherited) if is_dataclass else inherited


def _of_dataclass(statement: ast.ClassDef, above: Signature) -> Signature | None:
    required, optional, allowed = list(above.required), list(above.optional), dict(above.allowed)
    for decorator in statement.decorator_list:
        if isinstance(decorator, ast.Call) and any(keyword.arg == "init" for keyword in decorator.keywords):
            return None
    for entry in statement.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        if re.search("ClassVar|KW_ONLY", ast.dump(entry.annotation)):
            continue
        needed = entry.value is None
        if isinstance(entry.value, ast.Call) and _dotted(entry.value.func).endswith("field"):
            options = {keyword.arg for keyword in entry.value.keywords}
            if "init" in options:
                continue
            needed = not options & {"default", "default_factory"}
        (required if needed else optional).append(entry.target.id)
        allowed[entry.target.id] = annotation.allowed(entry.annotation, entry.value)
    return Signature(tuple(required), tuple(optional), allowed=_declared(allowed))


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, skip: int) -> Signature:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    by_name = [argument.arg for argument in positional if argument not in arguments.posonlyargs]
    first = len(by_name) - len(arguments.defaults)
    required, optional = by_name[:first], by_name[first:]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (optional if default is not None else required).append(argument.arg)
    is_open = arguments.kwarg is not None or bool(arguments.posonlyargs[skip:])
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    allowed = {
        argument.arg: annotation.allowed(argument.annotation, default)
        for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=False)
    }
    return Signature(tuple(required), tuple(optional), is_open, _declared(allowed))


def _declared(allowed: Mapping[str, str]) -> Mapping[str, str]:
    return {name: values for name, values in allowed.items() if values}


def _plain(decorators: Sequence[ast.expr]) -> bool:
    return all(_dotted(decorator) in KNOWN_DECORATORS for decorator in decorators)


def _alias(statement: ast.Assign | ast.AnnAssign) -> str:
    """The dotted name that a statement gives another name; empty if it does not."""
    value = statement.value
    return _dotted(value) if isinstance(value, ast.Name | ast.Attribute) else ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Call | ast.Subscript):
        return _dotted(node.func if isinstance(node, ast.Call) else node.value)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""
