"""Signatures of classes and functions, read from their source without running it: neither torch nor the user's package
is imported.

Modules are looked up in the folders of sys.path. Signatures that the source does not show (C extensions, metaclasses,
decorators, `*args`) and packages that are not installed are ignored.
"""

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dtrain.resolve.source import Module, file_of, mentions, module_of

KNOWN_DECORATORS = (
    "dataclass",
    "dataclasses.dataclass",
    "final",
    "runtime_checkable",
    "typing.final",
    "torch.no_grad",
    "cache",
    "functools.cache",
    "staticmethod",
)
DEEPEST = 12


@dataclass(frozen=True)
class Signature:
    """`required` and `optional` keyword arguments; `open`: any other keyword is accepted too."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    open: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


@dataclass(frozen=True)
class Missing:
    """The module exists but has no attribute `name`; `others`: its public attributes."""

    module: str
    name: str
    others: tuple[str, ...]


def signature(target: str) -> Signature | Missing | None:
    """Signature of a dotted name; None if its source does not show it."""
    return _signature(target, _paths())


def _paths() -> tuple[str, ...]:
    """Folders to search; dtrain itself may be outside sys.path, for example in an editable install."""
    return (*sys.path, str(Path(__file__).parents[2]))


@cache
def _signature(target: str, paths: tuple[str, ...]) -> Signature | Missing | None:
    try:
        return _of_name(target.split("."), paths, 0)
    except RecursionError:
        return None


def home_of(target: str) -> str:
    """The module that defines a class or function, through all re-exports; empty if it cannot be found."""
    definition = _definition(target.split("."), _paths(), 0)
    return definition[0] if definition else ""


def class_of(target: str) -> tuple[Path, ast.ClassDef] | None:
    """(file, statement) that defines the class of a dotted name; None if it is no class or cannot be found."""
    definition = _definition(target.split("."), _paths(), 0)
    return (definition[1], definition[2]) if definition and isinstance(definition[2], ast.ClassDef) else None


def lineage(target: str) -> list[tuple[str, ast.ClassDef]]:
    """(module, statement) of the class of a dotted name and of its bases, in the order of attribute lookup, as far as
    they can be found; for a function, those of its annotated return class.
    """
    classes, waiting, seen = list[tuple[str, ast.ClassDef]](), [target], set[str]()
    while waiting and len(seen) < DEEPEST:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        definition = _definition(name.split("."), _paths(), 0)
        module, statement = (definition[0], definition[2]) if definition else ("", None)
        if isinstance(statement, ast.FunctionDef) and statement.returns and not classes:
            returns = statement.returns
            named = str(returns.value) if isinstance(returns, ast.Constant) else _dotted(returns)
            waiting.append(f"{module}.{named}")
        if isinstance(statement, ast.ClassDef):
            classes.append((module, statement))
            waiting[:0] = [f"{module}.{name}" for base in statement.bases if (name := _dotted(base)) and module]
    return classes


def _definition(
    parts: Sequence[str], paths: tuple[str, ...], depth: int
) -> tuple[str, Path, ast.ClassDef | ast.FunctionDef] | None:
    """(module, file, statement) of a class or function, following aliases and re-exports."""
    cuts = range(len(parts) - 1, 0, -1)
    module, cut = next(((made, cut) for cut in cuts if (made := module_of(".".join(parts[:cut]), paths))), (None, 0))
    if module is None or depth > DEEPEST:
        return None
    name, *rest = parts[cut:]
    statement, path = module.defined.get(name), file_of(module.name, paths)
    if isinstance(statement, ast.ClassDef | ast.FunctionDef) and path and not rest:
        return module.name, path, statement
    if (
        isinstance(statement, ast.Assign | ast.AnnAssign)
        and statement.value
        and (other := _dotted_name(statement.value))
    ):
        return _definition([*module.name.split("."), *other.split("."), *rest], paths, depth + 1)
    if name in module.imported:
        source, attribute = module.imported[name]
        return _definition([*source.split("."), *([attribute] if attribute else []), *rest], paths, depth + 1)
    if name not in module.defined:
        for source in (star for star in module.stars if mentions(star, name, paths)):
            if definition := _definition([*source.split("."), name, *rest], paths, depth + 1):
                return definition
    # transformers loads its modules lazily: LlamaConfig is defined in models/llama/configuration_llama.py
    late = _class_in_folders(module, name, paths) if not rest and path and path.parent.name == "transformers" else None
    return late and ("", *late)


def _class_in_folders(module: Module, name: str, paths: tuple[str, ...]) -> tuple[Path, ast.ClassDef] | None:
    package = file_of(module.name, paths)
    folders = (
        [path for path in (package.parent / "models").iterdir() if name.lower().startswith(path.name.replace("_", ""))]
        if package
        else []
    )
    for folder in sorted(folders, key=lambda path: -len(path.name)):
        for path in sorted(folder.glob("configuration_*.py")):
            for entry in ast.parse(path.read_text()).body:
                if isinstance(entry, ast.ClassDef) and entry.name == name:
                    return path, entry
    return None


def _of_name(parts: Sequence[str], paths: tuple[str, ...], depth: int) -> Signature | Missing | None:
    """Resolve the rest of a dotted name in its longest prefix that is a module."""
    for cut in range(len(parts) - 1, 0, -1):
        module = module_of(".".join(parts[:cut]), paths)
        if module:
            return _attribute(module, parts[cut:], paths, depth)
    return None


def _attribute(module: Module, parts: Sequence[str], paths: tuple[str, ...], depth: int) -> Signature | Missing | None:
    name, *rest = parts
    if depth > DEEPEST:
        return None
    if name in module.defined:
        statement = module.defined[name]
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            return _of_value(module, statement.value, rest, paths, depth)
        return _of_method(module, statement, rest) if rest else _of_statement(module, statement, paths, depth)
    if name in module.imported:
        source, attribute = module.imported[name]
        return _of_name([*source.split("."), *([attribute] if attribute else []), *rest], paths, depth + 1)
    others = [*module.defined, *module.imported]
    for source in sorted(module.stars, key=lambda star: not mentions(star, name, paths)):
        result = _of_name([*source.split("."), *parts], paths, depth + 1)
        if not isinstance(result, Missing):
            return result
        others += result.others
    if module.dynamic or file_of(f"{module.name}.{name}", paths):
        return None
    return Missing(module.name, name, tuple(other for other in others if not other.startswith("_")))


def _of_statement(module: Module, statement: ast.stmt, paths: tuple[str, ...], depth: int) -> Signature | None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return _of_function(statement, skip=0) if _plain(statement.decorator_list) else None
    if isinstance(statement, ast.ClassDef):
        return _of_class(module, statement, paths, depth)
    return None


def _of_value(
    module: Module, value: ast.expr | None, rest: Sequence[str], paths: tuple[str, ...], depth: int
) -> Signature | Missing | None:
    """Signature behind an alias or a functools.partial."""
    if isinstance(value, ast.Name | ast.Attribute) and _dotted(value):
        target = _attribute(module, [*_dotted(value).split("."), *rest], paths, depth + 1)
        return target if isinstance(target, Signature) else None
    if (
        isinstance(value, ast.Call)
        and _dotted(value.func) in ("partial", "functools.partial")
        and len(value.args) == 1
        and not rest
    ):
        given = [keyword.arg for keyword in value.keywords]
        target = _attribute(module, _dotted(value.args[0]).split("."), paths, depth + 1)
        if isinstance(target, Signature) and None not in given:
            late = tuple(name for name in target.required if name in given)
            return Signature(
                tuple(name for name in target.required if name not in given), (*late, *target.optional), target.open
            )
    return None


def _of_method(module: Module, statement: ast.stmt, rest: Sequence[str]) -> Signature | Missing | None:
    """Signature of a class method or static method."""
    if (
        not isinstance(statement, ast.ClassDef)
        or len(rest) > 1
        or statement.keywords
        or not _plain(statement.decorator_list)
    ):
        return None
    methods = {entry.name: entry for entry in statement.body if isinstance(entry, ast.FunctionDef)}
    method = methods.get(rest[0])
    if method is None:
        names = {name.id for entry in statement.body for name in ast.walk(entry) if isinstance(name, ast.Name)}
        return (
            Missing(f"{module.name}.{statement.name}", rest[0], tuple(methods))
            if not statement.bases and rest[0] not in names
            else None
        )
    kinds = [_dotted(decorator) for decorator in method.decorator_list]
    return (
        _of_function(method, skip=int(kinds == ["classmethod"]))
        if kinds in (["classmethod"], ["staticmethod"])
        else None
    )


def _of_class(module: Module, statement: ast.ClassDef, paths: tuple[str, ...], depth: int) -> Signature | None:
    if statement.keywords or not _plain(statement.decorator_list):
        return None
    body = {entry.name: entry for entry in statement.body if isinstance(entry, ast.FunctionDef)}
    if "__new__" in body:
        return None
    if "__init__" in body:
        return _of_function(body["__init__"], skip=1) if _plain(body["__init__"].decorator_list) else None
    bases = [
        _dotted(base)
        for base in statement.bases
        if _dotted(base) not in ("object", "Generic", "Protocol", "typing.Generic")
    ]
    above = _above(module, bases, paths, depth)
    if any(_dotted(decorator).endswith("dataclass") for decorator in statement.decorator_list):
        return _of_dataclass(statement, above) if not bases or above else None
    return above if bases else Signature()


def _above(module: Module, bases: Sequence[str], paths: tuple[str, ...], depth: int) -> Signature | None:
    """The signature of the only base class."""
    if len(bases) != 1 or not bases[0]:
        return None
    base = _attribute(module, bases[0].split("."), paths, depth + 1)
    return base if isinstance(base, Signature) else None


def _of_dataclass(statement: ast.ClassDef, above: Signature | None) -> Signature | None:
    required, optional = list(above.required if above else ()), list(above.optional if above else ())
    for decorator in statement.decorator_list:
        if isinstance(decorator, ast.Call) and any(keyword.arg == "init" for keyword in decorator.keywords):
            return None
    for entry in statement.body:
        if (
            not isinstance(entry, ast.AnnAssign)
            or not isinstance(entry.target, ast.Name)
            or re.search("ClassVar|KW_ONLY", ast.dump(entry.annotation))
        ):
            continue
        options = (
            {keyword.arg for keyword in entry.value.keywords}
            if isinstance(entry.value, ast.Call) and _dotted(entry.value.func).endswith("field")
            else None
        )
        if options is not None and "init" in options:
            continue
        needed = entry.value is None or (options is not None and not options & {"default", "default_factory"})
        (required if needed else optional).append(entry.target.id)
    return Signature(tuple(required), tuple(optional))


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, skip: int) -> Signature:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args][skip:]
    by_name = [argument.arg for argument in positional if argument not in arguments.posonlyargs]
    late = len(arguments.defaults)
    required = by_name[: len(by_name) - late] if late else by_name
    optional = by_name[len(by_name) - late :] if late else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (optional if default is not None else required).append(argument.arg)
    return Signature(
        tuple(required), tuple(optional), arguments.kwarg is not None or bool(arguments.posonlyargs[skip:])
    )


def _plain(decorators: Sequence[ast.expr]) -> bool:
    return all(_dotted(decorator) in KNOWN_DECORATORS for decorator in decorators)


def _dotted_name(node: ast.expr) -> str:
    """The dotted name of a node; empty if it is no name."""
    return _dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Call | ast.Subscript):
        return _dotted(node.func if isinstance(node, ast.Call) else node.value)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""
