"""The allowed values of an argument as its annotation declares them, in the syntax of dtrain/config/constraints.py:
`int | None` is `int or null`. Annotations of other than plain values, and lists of them, declare nothing.
"""

import ast
from collections.abc import Sequence

from dtrain.config import constraints

VALUES = {"int": "int", "float": "number", "bool": "bool", "str": "text", "None": "null"}
LISTS = dict.fromkeys(("list", "List", "Sequence", "tuple", "Tuple"), "list of any")
PLAIN = VALUES | LISTS


def allowed(annotation: ast.expr | None, default: ast.expr | None) -> str:
    """The allowed values; empty if the annotation does not declare them. A default of None allows null; any other
    default that the annotation does not allow shows that it is not meant literally.
    """
    kinds = _kinds(annotation)
    try:
        value = ast.literal_eval(default) if default else ...
    except ValueError:  # an expression
        value = ...
    if kinds and value is None:
        kinds = [*kinds, "null"]
    declared = " or ".join(dict.fromkeys(kinds))
    return declared if value is ... or (kinds and constraints.fits(value, declared)) else ""


def _kinds(node: ast.expr | None) -> Sequence[str]:
    """The alternatives of an annotation; none if one of them is not a plain value."""
    match node:
        case ast.Constant(value=str(text)):
            try:
                return _kinds(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return ()
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([left, right])
        case ast.Subscript(value=generic, slice=ast.Tuple(elts=inner)):
            return _generic(_name(generic), inner)
        case ast.Subscript(value=generic, slice=inner):
            return _generic(_name(generic), [inner])
        case ast.Name() | ast.Attribute() | ast.Constant(value=None):
            name = _name(node)
            return (PLAIN[name],) if name in PLAIN else ()
    return ()


def _generic(name: str, inner: Sequence[ast.expr]) -> Sequence[str]:
    items = [item.value if isinstance(item, ast.Constant) else item for item in inner]
    if name == "Union":
        return _union(inner)
    if name == "Optional":
        return _union([*inner, ast.Constant(None)])
    if name == "Literal":
        words = ["null" if item is None else item for item in items if item is None or isinstance(item, str)]
        return words if len(words) == len(items) and all(map(_is_word, words)) else ()
    if name not in LISTS:
        return ()
    count = len(inner) if name in ("tuple", "Tuple") and ... not in items else 0
    kinds = {tuple(_kinds(item)) for item in inner if ast.unparse(item) != "..."}
    one = kinds.pop() if len(kinds) == 1 else ()
    plain = len(one) == 1 and one[0] in VALUES.values()
    return (f"list of {f'{count} ' if count else ''}{one[0]}",) if plain else ()


def _union(nodes: Sequence[ast.expr]) -> Sequence[str]:
    kinds = [_kinds(node) for node in nodes]
    return [kind for each in kinds for kind in each] if all(kinds) else ()


def _is_word(text: str) -> bool:
    """Whether a constraint means the text itself."""
    return text == "null" or constraints.choices_of(text) == [text]


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return ast.unparse(node).rpartition(".")[2]
