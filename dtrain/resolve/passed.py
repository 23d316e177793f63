"""Signatures of the objects that were passed to `dtrain.run`, which no other process can import: of a class or function
that is here, where `dtrain.resolve.signature` reads sources.
"""

import ast
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from dtrain.build import makes_one, received
from dtrain.resolve import annotation
from dtrain.resolve.signature import Missing, Signature, signature

SEVERAL = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
EMPTY = inspect.Parameter.empty


def signature_of_part(part: Mapping[str, Any]) -> Signature | Missing | None:
    """The signature of a part: of an object that was passed to `dtrain.run`, or of a dotted name."""
    thing, target = received(part), part["_target_"]
    if thing is None:
        return signature(target) if isinstance(target, str) else None
    return signature_of(thing) if makes_one(thing) else None


def signature_of(thing: Any) -> Signature | None:
    """The signature of a class or function; None if it does not show it: a metaclass, `__new__`, a wrapped function."""
    if not inspect.isclass(thing):
        return _of_function(thing)
    if type(thing).__call__ is not type.__call__ or thing.__new__ is not object.__new__:
        return None
    return Signature() if thing.__init__ is object.__init__ else _of_function(partial(thing.__init__, None))


def _of_function(function: Any) -> Signature | None:
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    by_name = [each for each in parameters if each.kind not in (*SEVERAL, inspect.Parameter.POSITIONAL_ONLY)]
    more = {each.kind for each in parameters} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}
    allowed = {each.name: annotation.allowed(_annotation(each), _default(each)) for each in by_name}
    return Signature(
        tuple(each.name for each in by_name if each.default is EMPTY),
        tuple(each.name for each in by_name if each.default is not EMPTY),
        bool(more),
        {name: values for name, values in allowed.items() if values},
    )


def _annotation(parameter: inspect.Parameter) -> ast.expr | None:
    text = parameter.annotation
    if text is EMPTY:
        return None
    return _parsed(text if isinstance(text, str) else inspect.formatannotation(text))


def _default(parameter: inspect.Parameter) -> ast.expr | None:
    return None if parameter.default is EMPTY else _parsed(repr(parameter.default)) or ast.Name("unknown")


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
