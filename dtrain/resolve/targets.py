"""The arguments of every `_target_`, nested ones too, against what its source says it takes."""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import GROUPS, LISTS, Config
from dtrain.errors import WordsError, nearest
from dtrain.resolve import trust
from dtrain.resolve.signature import Missing, signature
from dtrain.resolve.unknown import UNKNOWN, Undecided

GIVEN: Mapping[str, frozenset[str]] = {
    "optim": frozenset({"model"}),
    "schedule": frozenset({"steps"}),
    "checkpoint": frozenset({"out", "mesh", "resume", "before_commit"}),
    "logger": frozenset({"out", "steps"}),
}
"""group -> the keywords that the loop gives when it builds a part of it."""


def arguments(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WordsError for each argument that a target does not take, or needs and does not get."""
    try:
        trust.targets(config, cluster, draft)
    except WordsError:
        raise Undecided from None  # what may not run is not read either
    problems = list[str]()
    for group in GROUPS:
        parts = getattr(config, group)
        if parts is UNKNOWN:
            continue  # another mistake, which hides none here
        for path, part in (
            [(f"{group}.{word}", part) for word, part in parts.items()] if group in LISTS else [(group, parts)]
        ):
            given = GIVEN.get(group, frozenset()) if part.get("_target_") else frozenset()
            own = config.choices[group] is not None and str(part.get("_target_", "")).startswith("dtrain.")
            called = {f"{path}.{name}" for name in about(part).get("calls", ())}
            problems += [problem for nested, found in _targets(part, path)
                         for problem in _judge(found, nested, given if found is part else frozenset(),
                         called=nested in called)
                         if not (own and found is part)]  # fmt: skip
    if problems:
        raise WordsError(*problems)
    return {}


def _targets(node: Any, path: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(where it stands, the part) for all that have a `_target_`."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, node
        for name, value in node.items():
            if name != "_about_":
                yield from _targets(value, f"{path}.{name}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}.{index}")


def _judge(part: Mapping[str, Any], path: str, given: frozenset[str], *, called: bool) -> Iterable[str]:
    """`called`: a function that is called while the run goes on, with arguments that are not known here."""
    target = part["_target_"]
    found = signature(target) if isinstance(target, str) else None
    if isinstance(found, Missing):
        yield (
            f"{path}._target_={target}: {found.module} has no "
            f"{found.name}.{nearest(found.name, found.others) if found.others else ''}"
        )
    elif found is not None:
        hidden = sorted(
            name for name in part if name.startswith("_") and name not in ("_target_", "_about_", *found.names)
        )
        said = {name for name in part if name not in ("_target_", "_about_", *hidden)}
        for name in hidden:
            yield (
                f"{path}.{name}={part[name]}: of Hydra's own, a part has _target_ alone. Name a function of yours "
                "that makes what you mean."
            )
        unasked = sorted(given - set(found.names)) if not found.open else []
        if unasked:
            yield (
                f"{path}._target_={target} takes no {', '.join(unasked)}, which the run gives it. Name a function "
                f"of yours that does, or a word: {path}=<word>."
            )
        takes = [name for name in found.names if name not in given]
        for name in () if found.open else sorted(said - set(found.names)):
            near = (
                nearest(name, takes).replace("Did you mean ", f"Did you mean {path}.")
                if takes
                else " It takes nothing."
            )
            yield f"{path}.{name}={part[name]}: {target} takes no {name}.{near}"
        for name in sorted(said & given):
            yield f"{path}.{name}={part[name]}: the run itself gives {target} its {name}. Leave it out."
        for name in found.required if not unasked and not hidden and not called else ():
            if name not in said | given:
                yield f"{path}._target_={target} needs {name}. Type {path}.{name}=<value>."
