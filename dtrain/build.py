"""Builds the objects that the parts of a plan name. Makes the last check of trust: on the object, not only on its name.

A caller of `dtrain.run` may pass objects that no other process could import by name; their parts name
`dtrain.build.given`.
"""

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from dtrain import secrets
from dtrain.config.facts import about
from dtrain.errors import PreflightError, WordsError, an
from dtrain.planned import Part
from dtrain.storage import hub

GIVEN = "dtrain.build.given"
"""The `_target_` of an object that was passed to `dtrain.run`."""
HINT = "Is the package installed, or in this folder?"

_trusted: Collection[str] | None = None
"""Packages that the user trusts while a plan is run; None: not set, and every name is allowed."""

_given: dict[str, Any] = {}
"""Objects that the caller of `dtrain.run` passed, by the name of their part; forked ranks inherit them."""


@contextlib.contextmanager
def giving(objects: Mapping[str, Any]) -> Iterator[None]:
    """A context in which `given` returns these objects."""
    before = dict(_given)
    _given.update(objects)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


def has_given() -> bool:
    return bool(_given)


def refuse_given() -> None:
    """Raises PreflightError if objects were passed to `dtrain.run`, where the ranks are no forks of this process."""
    if _given:
        raise PreflightError(
            "objects that were passed to dtrain.run exist in this process alone, and the ranks run in others. Put "
            "their classes into a module that the nodes have too."
        )


def given(*, of: str, **arguments: Any) -> Any:
    """The object that the caller of `dtrain.run` passed as `of`; a class or function is called with `arguments`.

    Raises WordsError in a process that does not have it.
    """
    if of not in _given:
        name = of.partition(".")[0]
        raise WordsError(f"{name}: {of} was passed to dtrain.run(..., {name}=...). Call that again.")
    thing = _given[of]
    return thing(**arguments) if makes_one(thing) else thing


def received(part: Part) -> Any:
    """The object that a part stands for and the caller of `dtrain.run` passed; None if it is not in this process."""
    return _given.get(str(part.get("of"))) if part.get("_target_") == GIVEN else None


def makes_one(thing: Any) -> bool:
    """Whether a passed object is a class or function, which is called with the words."""
    return inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, functools.partial)


@contextlib.contextmanager
def trusting(packages: Collection[str]) -> Iterator[None]:
    """A context in which only objects of dtrain, torch and these packages can be located, whatever their names."""
    global _trusted
    before, _trusted = _trusted, packages
    if packages:
        hub.watch()
    try:
        yield
    finally:
        _trusted = before


def build(part: Part, kind: Any = None, /, **given: Any) -> Any:
    """Call the part's `_target_` with its arguments and `given`. Nested parts are built first, except functions that
    the target itself `calls`, as its facts state.

    Raises WordsError if the target cannot be imported, does not take the arguments, or lacks a member of the protocol
    `kind`.
    """
    target, misfit = locate(str(part["_target_"])), None
    called = about(part).get("calls", ())
    arguments = {
        name: _function(value) if name in called else _nested(value)
        for name, value in part.items()
        if name not in ("_target_", "_about_")
    }
    arguments |= given
    try:
        _signature(target).bind(**arguments)
    except TypeError as error:
        misfit = error  # the signature may be incomplete: configs of transformers take more than theirs says
    except ValueError:  # builtins without a signature check their arguments themselves
        pass
    try:
        made = target(**arguments)
    except TypeError:
        if misfit is None:
            raise
        takes = ", ".join(_signature(target).parameters)
        raise WordsError(f"{part['_target_']}: {misfit}. It takes: {takes}.") from None
    except ValueError as error:
        if not str(part["_target_"]).startswith("dtrain."):
            raise  # the user's own code shows its traceback
        raise WordsError(f"{part['_target_']}: {error}.") from error
    lacking = [name for name in _members(kind) if not hasattr(made, name)]
    if lacking:
        group = kind.__module__.removeprefix("dtrain.")
        raise WordsError(
            f"{part['_target_']} returned {an(made)} without {', '.join(lacking)}. "
            f"A part of {group} needs {', '.join(_members(kind))}. Type dtrain {group} --help."
        )
    return made


def _signature(target: Any) -> inspect.Signature:
    """Its signature. inspect copies sys.modules to find that of a class without a constructor."""
    if type(target) is not type or any({"__init__", "__new__"} & vars(each).keys() for each in target.__mro__[:-1]):
        return inspect.signature(target)
    return inspect.Signature()


def _members(kind: Any) -> list[str]:
    """The names of the members of a protocol."""
    own = [*vars(kind), *vars(kind).get("__annotations__", ())] if kind else []
    return [name for name in own if name[0] != "_" or name == "__call__"]


def locate(name: str) -> Any:
    """The object with a dotted name, which must live in the package that the name begins with, or in a trusted one.

    `mypkg.os.system` is not mypkg's, `torch.nn.modules.os` not torch's. Raises WordsError.
    """
    package, path, *rest = name.split(".")[0], *name.split(".")
    if _trusted is not None and package not in ("dtrain", "torch") and not _is_trusted(name):
        raise WordsError(
            f"{name}: {package} is not trusted to run code. Type trust=[{package}] if you know what it does."
        )
    try:
        target: Any = importlib.import_module(path)
        for attribute in rest:
            path = f"{path}.{attribute}"
            if inspect.ismodule(target) and not hasattr(target, attribute):
                target = importlib.import_module(path)
            else:
                target = getattr(target, attribute)
    except SystemExit as error:
        raise WordsError(
            f"{name}: importing {path} ran the script, which ended it (SystemExit: {error.code}). Put what it runs "
            'below if __name__ == "__main__": and leave its classes above.'
        ) from error
    except (ImportError, AttributeError) as error:
        above, _, last = path.rpartition(".")
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == path != package
        if is_missing or isinstance(error, AttributeError):
            raise WordsError(f"{name}: {above} has no {last}.") from error
        raise WordsError(f"{name}: cannot be imported: {error}. {HINT}") from error
    if not callable(target):
        raise WordsError(f"{name} is {an(target)}, not a class or a function.")
    function = target
    while isinstance(function, functools.partial):
        function = function.func
    home = str(getattr(function, "__module__", None) or type(function).__module__)
    if not (f"{home}.".startswith(f"{package}.") or _is_trusted(f"{home}.")):
        raise WordsError(
            f"{name}: leads out of {package}, to {home}. Type trust=[{home.split('.')[0]}] if you know what it does."
        )
    if package == "torch" and not _is_trusted(name) and not _is_public_in_torch(target):
        raise WordsError(
            f"{name}: of torch, only the classes of torch.nn and torch.optim may run. Type trust=[torch] if you know "
            "what it does."
        )
    return target


def absent(part: Any) -> str:
    """A sentence about the first package that a part names and that is not here, which `build` would refuse; empty if
    all are here. None is imported.
    """
    if isinstance(part, list | tuple):
        return next(filter(None, map(absent, part)), "")
    if not isinstance(part, Mapping):
        return ""
    name = str(part.get("_target_", "dtrain"))
    package = name.partition(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        return f"{name}: cannot be imported: No module named {package!r}. {HINT}"
    return absent([*part.values()])


def _is_trusted(name: str) -> bool:
    return any(name.startswith(f"{package}.") for package in _trusted or ())


def _is_public_in_torch(target: Any) -> bool:
    """Whether the object itself is one of the public modules, optimizers and schedules of torch.nn and torch.optim."""
    import torch

    kinds = {
        torch.nn: torch.nn.Module,
        torch.optim: torch.optim.Optimizer,
        torch.optim.lr_scheduler: torch.optim.lr_scheduler.LRScheduler,
    }
    return inspect.isclass(target) and any(
        issubclass(target, kind) and getattr(space, target.__name__, None) is target for space, kind in kinds.items()
    )


def _function(value: Any) -> Any:
    """A part that is called later: an object of a class, or a function with its arguments."""
    target = locate(str(value["_target_"])) if isinstance(value, Mapping) and "_target_" in value else None
    if not inspect.isfunction(target):
        return _nested(value)
    arguments = {name: _nested(item) for name, item in value.items() if name != "_target_"}
    return functools.partial(target, **arguments) if arguments else target


def _nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value) if "_target_" in value else {name: _nested(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nested(item) for item in value]
    try:
        return secrets.opened(value)
    except KeyError as error:
        raise WordsError(
            f"{error.args[0]}: this process does not have the secret. A node that joins needs the DTRAIN_SECRET of "
            "the run."
        ) from None
