"""Signatures of classes and functions, read off its source without running a line of it: neither torch nor the user's
package is imported.

Modules are found by walking the folders of sys.path. What cannot be known so (C extensions, metaclasses, decorators,
`*args`) is passed over in silence, as is what is not installed on this machine.
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
    """`required` and `optional` names that may be given by keyword; `open`: it takes any other as well."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    open: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


@dataclass(frozen=True)
class Missing:
    """The module is there, and has no such attribute; `others` has those it has."""

    module: str
    name: str
    others: tuple[str, ...]


def signature(target: str) -> Signature | Missing | None:
    """Of a dotted name. None: it cannot be known from here."""
    return _signature(target, _paths())


def _paths() -> tuple[str, ...]:
    """Where packages lie; this one may be found in another way, as where it is installed to be edited."""
    return (*sys.path, str(Path(__file__).parents[2]))


@cache
def _signature(target: str, paths: tuple[str, ...]) -> Signature | Missing | None:
    try:
        return _of_name(target.split("."), paths, 0)
    except RecursionError:
        return None


def home_of(target: str) -> str:
    """The module that defines a class or function, whatever other modules call it; empty where it is not found."""
    found = _definition(target.split("."), _paths(), 0)
    return found[0] if found else ""


def class_of(target: str) -> tuple[Path, ast.ClassDef] | None:
    """(the file, the statement) that defines the class of a dotted name. None: it is no class, or cannot be found from
    here.
    """
    found = _definition(target.split("."), _paths(), 0)
    return (found[1], found[2]) if found and isinstance(found[2], ast.ClassDef) else None


def lineage(target: str) -> list[tuple[str, ast.ClassDef]]:
    """(module, statement) of the class of a dotted name and of those it is derived from, in the order in which an
    attribute is looked for, as far as they are found; of a function, those of the class that it says it returns.
    """
    classes, waiting, seen = list[tuple[str, ast.ClassDef]](), [target], set[str]()
    while waiting and len(seen) < DEEPEST:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        found = _definition(name.split("."), _paths(), 0)
        module, statement = (found[0], found[2]) if found else ("", None)
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
    """(module, file, statement) of a class or function, under whatever other names modules have it."""
    cuts = range(len(parts) - 1, 0, -1)
    module, cut = next(((made, cut) for cut in cuts if (made := module_of(".".join(parts[:cut]), paths))), (None, 0))
    if module is None or depth > DEEPEST:
        return None
    name, *rest = parts[cut:]
    found, path = module.defined.get(name), file_of(module.name, paths)
    if isinstance(found, ast.ClassDef | ast.FunctionDef) and path and not rest:
        return module.name, path, found
    if isinstance(found, ast.Assign | ast.AnnAssign) and found.value and (other := _dotted_name(found.value)):
        return _definition([*module.name.split("."), *other.split("."), *rest], paths, depth + 1)
    if name in module.imported:
        source, attribute = module.imported[name]
        return _definition([*source.split("."), *([attribute] if attribute else []), *rest], paths, depth + 1)
    if name not in module.defined:
        for source in (star for star in module.stars if mentions(star, name, paths)):
            if there := _definition([*source.split("."), name, *rest], paths, depth + 1):
                return there
    # packages that load their parts when they are asked for, as transformers does: of LlamaConfig in
    # models/llama/configuration_llama.py
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
            found = next(
                (
                    entry
                    for entry in ast.parse(path.read_text()).body
                    if isinstance(entry, ast.ClassDef) and entry.name == name
                ),
                None,
            )
            if found:
                return path, found
    return None


def _of_name(parts: Sequence[str], paths: tuple[str, ...], depth: int) -> Signature | Missing | None:
    """The longest prefix that is a module, and what the rest names in it."""
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
        found = module.defined[name]
        if isinstance(found, ast.Assign | ast.AnnAssign):
            return _of_value(module, found.value, rest, paths, depth)
        return _of_method(module, found, rest) if rest else _of_statement(module, found, paths, depth)
    if name in module.imported:
        source, attribute = module.imported[name]
        return _of_name([*source.split("."), *([attribute] if attribute else []), *rest], paths, depth + 1)
    others = [*module.defined, *module.imported]
    for source in sorted(module.stars, key=lambda star: not mentions(star, name, paths)):
        found_there = _of_name([*source.split("."), *parts], paths, depth + 1)
        if not isinstance(found_there, Missing):
            return found_there
        others += found_there.others
    if module.dynamic or file_of(f"{module.name}.{name}", paths):
        return None
    return Missing(module.name, name, tuple(other for other in others if not other.startswith("_")))


def _of_statement(module: Module, found: ast.stmt, paths: tuple[str, ...], depth: int) -> Signature | None:
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return _of_function(found, skip=0) if _plain(found.decorator_list) else None
    if isinstance(found, ast.ClassDef):
        return _of_class(module, found, paths, depth)
    return None


def _of_value(
    module: Module, value: ast.expr | None, rest: Sequence[str], paths: tuple[str, ...], depth: int
) -> Signature | Missing | None:
    """Another name of something, or a partial of it."""
    if isinstance(value, ast.Name | ast.Attribute) and _dotted(value):
        found = _attribute(module, [*_dotted(value).split("."), *rest], paths, depth + 1)
        return found if isinstance(found, Signature) else None
    if (
        isinstance(value, ast.Call)
        and _dotted(value.func) in ("partial", "functools.partial")
        and len(value.args) == 1
        and not rest
    ):
        given = [keyword.arg for keyword in value.keywords]
        found = _attribute(module, _dotted(value.args[0]).split("."), paths, depth + 1)
        if isinstance(found, Signature) and None not in given:
            late = tuple(name for name in found.required if name in given)
            return Signature(
                tuple(name for name in found.required if name not in given), (*late, *found.optional), found.open
            )
    return None


def _of_method(module: Module, found: ast.stmt, rest: Sequence[str]) -> Signature | Missing | None:
    """A class method or static method."""
    if not isinstance(found, ast.ClassDef) or len(rest) > 1 or found.keywords or not _plain(found.decorator_list):
        return None
    methods = {entry.name: entry for entry in found.body if isinstance(entry, ast.FunctionDef)}
    method = methods.get(rest[0])
    if method is None:
        names = {name.id for entry in found.body for name in ast.walk(entry) if isinstance(name, ast.Name)}
        return (
            Missing(f"{module.name}.{found.name}", rest[0], tuple(methods))
            if not found.bases and rest[0] not in names
            else None
        )
    kinds = [_dotted(decorator) for decorator in method.decorator_list]
    return (
        _of_function(method, skip=int(kinds == ["classmethod"]))
        if kinds in (["classmethod"], ["staticmethod"])
        else None
    )


def _of_class(module: Module, found: ast.ClassDef, paths: tuple[str, ...], depth: int) -> Signature | None:
    if found.keywords or not _plain(found.decorator_list):
        return None
    body = {entry.name: entry for entry in found.body if isinstance(entry, ast.FunctionDef)}
    if "__new__" in body:
        return None
    if "__init__" in body:
        return _of_function(body["__init__"], skip=1) if _plain(body["__init__"].decorator_list) else None
    bases = [
        _dotted(base)
        for base in found.bases
        if _dotted(base) not in ("object", "Generic", "Protocol", "typing.Generic")
    ]
    above = _above(module, bases, paths, depth)
    if any(_dotted(decorator).endswith("dataclass") for decorator in found.decorator_list):
        return _of_dataclass(found, above) if not bases or above else None
    return above if bases else Signature()


def _above(module: Module, bases: Sequence[str], paths: tuple[str, ...], depth: int) -> Signature | None:
    """The signature of the only base class."""
    if len(bases) != 1 or not bases[0]:
        return None
    found = _attribute(module, bases[0].split("."), paths, depth + 1)
    return found if isinstance(found, Signature) else None


def _of_dataclass(found: ast.ClassDef, above: Signature | None) -> Signature | None:
    required, optional = list(above.required if above else ()), list(above.optional if above else ())
    for decorator in found.decorator_list:
        if isinstance(decorator, ast.Call) and any(keyword.arg == "init" for keyword in decorator.keywords):
            return None
    for entry in found.body:
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


def _of_function(found: ast.FunctionDef | ast.AsyncFunctionDef, skip: int) -> Signature:
    given = found.args
    positional = [*given.posonlyargs, *given.args][skip:]
    by_name = [argument.arg for argument in positional if argument not in given.posonlyargs]
    late = len(given.defaults)
    required = by_name[: len(by_name) - late] if late else by_name
    optional = by_name[len(by_name) - late :] if late else []
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        (optional if default is not None else required).append(argument.arg)
    return Signature(tuple(required), tuple(optional), given.kwarg is not None or bool(given.posonlyargs[skip:]))


def _plain(decorators: Sequence[ast.expr]) -> bool:
    return all(_dotted(decorator) in KNOWN_DECORATORS for decorator in decorators)


def _dotted_name(node: ast.expr) -> str:
    """Empty for what is no name."""
    return _dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Call | ast.Subscript):
        return _dotted(node.func if isinstance(node, ast.Call) else node.value)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""
