"""A part of the plan -> the object it names. The last check of trust: the object itself, not only its name."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from dtrain.errors import WordsError
from dtrain.plan import Part


def build(part: Part, **given: Any) -> Any:
    """Call the part's `_target_` with its arguments and `given`; nested parts are built first.

    Raises WordsError when the target cannot be imported or does not take the arguments.
    """
    target = locate(str(part["_target_"]))
    arguments = {name: _nested(value) for name, value in part.items() if name not in ("_target_", "_about_")} | given
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(target).parameters)
        raise WordsError(f"{part['_target_']}: {error}. It takes: {takes}.") from None
    except ValueError:  # builtins without a signature judge their arguments themselves
        pass
    try:
        return target(**arguments)
    except ValueError as error:
        if not str(part["_target_"]).startswith("dtrain."):
            raise  # the user's own code shows its traceback
        raise WordsError(f"{part['_target_']}: {error}.") from error


def locate(name: str) -> Any:
    """The object behind a dotted name. Of dtrain and torch, only what is defined there: `dtrain.build.importlib` is not ours."""
    path, *rest = name.split(".")
    try:
        found: Any = importlib.import_module(path)
        for attribute in rest:
            path = f"{path}.{attribute}"
            found = getattr(found, attribute) if hasattr(found, attribute) else importlib.import_module(path)
    except (ImportError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == path != name.split(".")[0]:
            raise WordsError(f"{name}: {path.rpartition('.')[0]} has no {path.rpartition('.')[2]}.") from error
        raise WordsError(f"{name}: cannot be imported: {error}. Is the package installed, or in this folder?") from error
    owner = name.split(".")[0]
    if owner in ("dtrain", "torch") and not str(getattr(found, "__module__", "")).startswith(f"{owner}."):
        raise WordsError(f"{name}: leads out of {owner}, to {getattr(found, '__module__', found)!r}.")
    if not callable(found):
        raise WordsError(f"{name}: is a {type(found).__name__}, not a class or a function.")
    return found


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value) if "_target_" in value else {name: _nested(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nested(item) for item in value]
    return value
