"""The names that a module's source defines and their statements, read without running it."""

import ast
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
IMPORTS = (ast.Import, ast.ImportFrom)
QUIET = (*DEFINITIONS, *ASSIGNMENTS, *IMPORTS, ast.If, ast.Try, ast.Expr, ast.AugAssign, ast.Assert)
"""Statements whose defined names are visible in the source; a loop, for example, may define others."""


@dataclass(frozen=True)
class Module:
    """The top level of a source file. `stars`: modules it star-imports; `dynamic`: it may define names at runtime."""

    name: str
    path: Path
    defined: Mapping[str, ast.stmt]
    imported: Mapping[str, tuple[str, str | None]]
    stars: tuple[str, ...]
    dynamic: bool


@cache
def file_of(name: str, paths: tuple[str, ...]) -> Path | None:
    """The source file of a module; for a package, its __init__.py."""
    *above, last = name.split(".")
    for folder in folders_of(above, paths):
        for path in (folder / last / "__init__.py", folder / f"{last}.py"):
            if path.is_file():
                return path
    return None


def folders_of(package: Sequence[str], paths: tuple[str, ...]) -> list[Path]:
    """Folders with the modules of a package; a namespace package may have several."""
    if not package:
        return [Path(path or ".") for path in paths]
    file = file_of(".".join(package), paths)
    if file:
        return [file.parent] if file.name == "__init__.py" else []
    return [folder / package[-1] for folder in folders_of(package[:-1], paths) if (folder / package[-1]).is_dir()]


@cache
def module_of(name: str, paths: tuple[str, ...]) -> Module | None:
    path = file_of(name, paths)
    if path is None:
        return None
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    package = path.name == "__init__.py"
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, tuple[str, str | None]] = {}
    stars: list[str] = []
    for entry in statements(tree.body):
        if isinstance(entry, DEFINITIONS):
            defined[entry.name] = entry
        elif isinstance(entry, ASSIGNMENTS):
            names = (name for target in _targets(entry) for name in getattr(target, "elts", [target]))
            defined |= {name.id: entry for name in names if isinstance(name, ast.Name)}
        elif isinstance(entry, ast.Import):
            for alias in entry.names:
                top = alias.name.split(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top, None
        elif isinstance(entry, ast.ImportFrom):
            origin = _absolute(entry, name, package=package)
            stars += [origin for alias in entry.names if alias.name == "*"]
            imported |= {alias.asname or alias.name: (origin, alias.name) for alias in entry.names if alias.name != "*"}
    dynamic = (
        "__getattr__" in defined
        or b"sys.modules[" in source
        or b"globals()" in source
        or not all(isinstance(entry, QUIET) for entry in tree.body)
    )
    return Module(name=name, path=path, defined=defined, imported=imported, stars=tuple(stars), dynamic=dynamic)


@cache
def mentions(module: str, name: str, paths: tuple[str, ...]) -> bool:
    """Whether a name occurs in the source of a module or of its star imports, so that it may be defined there.

    A text search is fast; parsing all of transformers takes 20 seconds and a gigabyte.
    """
    path = file_of(module, paths)
    with contextlib.suppress(OSError, RecursionError):
        source = path.read_bytes() if path else b""
        if name.encode() in source or b"import *" not in source:
            return name.encode() in source
        parsed = module_of(module, paths)
        return parsed is not None and any(mentions(star, name, paths) for star in parsed.stars)
    return False


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, including those inside `if` and `try`."""
    for entry in body:
        yield entry
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(entry, ast.If | ast.Try):
                yield from statements(getattr(entry, inner, []))


def _absolute(entry: ast.ImportFrom, module: str, *, package: bool) -> str:
    if not entry.level:
        return str(entry.module)
    base = module.split(".")
    above = base[: len(base) - entry.level + package]
    return ".".join([*above, entry.module] if entry.module else above)


def literal(statement: ast.ClassDef, name: str) -> Any:
    """The value of a class attribute, if it is a literal."""
    for entry in statement.body:
        if isinstance(entry, ASSIGNMENTS) and entry.value and assigned(entry) == [name]:
            with contextlib.suppress(ValueError):
                return ast.literal_eval(entry.value)
    return None


def assigned(entry: ast.stmt) -> list[str]:
    """The names to which a statement assigns a value."""
    return [ast.unparse(target) for target in _targets(entry)]


def _targets(entry: ast.stmt) -> list[ast.expr]:
    return [entry.target] if isinstance(entry, ast.AnnAssign) else getattr(entry, "targets", [])
