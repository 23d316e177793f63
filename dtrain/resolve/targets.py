"""Checks the arguments of every `_target_`, including nested ones, against the signature in its source: their names,
and the values that its annotations declare.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dtrain import secrets
from dtrain.build import makes_one, received
from dtrain.cluster import Cluster
from dtrain.config import constraints
from dtrain.config.facts import SHARED, about
from dtrain.config.files import groups
from dtrain.config.schema import GROUPS, Config
from dtrain.config.trust import TORCH
from dtrain.config.word import CALL
from dtrain.errors import nearest
from dtrain.resolve import trust
from dtrain.resolve.passed import signature_of_part
from dtrain.resolve.signature import Missing, Signature
from dtrain.resolve.unknown import UNKNOWN
from dtrain.resolve.values import parts_of, sentence

PASSED: Mapping[str, frozenset[str]] = {
    "optim": frozenset({"model"}),
    "schedule": frozenset({"steps"}),
    "checkpoint": frozenset({"out", "mesh", "resume", "before_commit"}),
    "logger": frozenset({"out", "steps"}),
}
"""group -> keywords that the training loop passes when it builds a part of the group."""


OWN: Mapping[str, str] = {
    "optim": "a function of yours that does, such as def optimizer(model, lr=1e-3): return {}(model.parameters(), lr), "
    "by optim._target_=<package>.optimizer trust=[<package>]",
    "schedule": "a class of yours that does, with factor(step), by schedule._target_=<package>.<class> "
    "trust=[<package>]",
}
"""group -> how a part of the user's own looks, and its word."""


def arguments(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check that each target takes its arguments and has all it needs."""
    if any(trust.targets(config, cluster, draft)):
        return  # code that may not run is not inspected either
    for group in GROUPS:
        for path, part in parts_of(config, group):
            own = config.choices[group] is not None and str(part.get("_target_", "")).startswith("dtrain.")
            called = {f"{path}.{name}" for name in about(part).get("calls", ())}
            for place, nested in _targets(part, path):
                passed = PASSED.get(group, frozenset[str]()) if nested is part else frozenset[str]()
                shared = SHARED.get(group, {}) if nested is part else {}
                if not (own and nested is part):
                    yield from _judge(nested, place, passed, shared, called=place in called)
                    yield from _values(nested, place, config, shared)
                    yield from _ignored(nested, place, config)


def judged(part: Mapping[str, Any], path: str, config: Config) -> Iterable[str]:
    """Check a part that is in no group, with the parts inside it."""
    for place, nested in _targets(part, path):
        yield from _judge(nested, place, frozenset(), (), called=False)
        yield from _values(nested, place, config, {})


def _targets(node: Any, path: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(dotted key, part) of every nested part that has a `_target_`."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, node
        for name, value in node.items():
            if name != "_about_":
                yield from _targets(value, f"{path}.{name}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}.{index}")


def _ignored(part: Mapping[str, Any], path: str, config: Config) -> Iterable[str]:
    """A sentence for each word of a call about an object that is made already."""
    thing = received(part)
    for name in () if thing is None or makes_one(thing) else part:
        if config.sources.get(f"{path}.{name}") == CALL and name not in ("_target_", "of"):
            yield (
                f"{path}.{name}={part[name]} ({CALL}): {type(thing).__name__} was passed to dtrain.run as an object, "
                "which takes no arguments. Pass its class, or leave the word out."
            )


def _typed_in(path: str, name: str) -> str:
    """The way to type an argument of a part in a list: within the list, which is one value. Empty for other parts."""
    item = re.fullmatch(r"(.*?)\.(\d+)(\..*)?", path)
    return f"{name}:<value> in item {int(item[2]) + 1} of {item[1]}=[...]" if item else ""


def _instead(path: str, target: str) -> str:
    """The advice where a target does not take what the run passes: a function of the user's own, or a word."""
    group = path.split(".")[0]
    made = target if TORCH.fullmatch(target) else "<its class>"
    own = OWN.get(group, "a function of yours that does").format(made)
    words = ", ".join(f"{path}={word}" for word in groups()[group]) if path in groups() else f"{path}=<word>"
    return f"Name {own}, or a word: {words}."


def _values(part: Mapping[str, Any], path: str, config: Config, shared: Mapping[str, Any]) -> Iterable[str]:
    """One sentence per argument whose value its annotation does not allow, or that a file leaves to the user. The
    `_about_` of a word takes precedence: its values are checked with those of dtrain's own words.
    """
    takes, stated = signature_of_part(part), about(part).get("allowed") or {}
    declared = {**shared, **(takes.allowed if isinstance(takes, Signature) else {})}
    for name, value in part.items():
        if name in stated or name[0] == "_" or value is UNKNOWN:
            continue
        allowed = declared.get(name, "any")
        late = isinstance(value, str) and (secrets.HERE.search(value) or (path == "model" and value == "auto"))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_no_text = is_number and constraints.wants_text(value, allowed)
        endless = isinstance(value, float) and not math.isfinite(value) and not is_no_text
        if value == "???" or is_no_text or not (late or endless or constraints.fits(value, allowed)):
            yield sentence(f"{path}.{name}", value, allowed, config)


def _judge(
    part: Mapping[str, Any], path: str, passed: frozenset[str], shared: Collection[str], *, called: bool
) -> Iterable[str]:
    """Problems of one part. `passed`: arguments that the run passes; `shared`: those that the run itself acts on;
    `called`: a function that the run calls later, with arguments that are not known yet.
    """
    takes, target = signature_of_part(part), part["_target_"]
    subject = f"{path}._target_={target}"
    if received(part) is not None:
        target = part["of"].partition(".")[2]
        subject, part = f"{path}: {target}", {name: value for name, value in part.items() if name != "of"}
    if isinstance(takes, Missing):
        near = nearest(takes.name, takes.others) if takes.others else ""
        yield f"{subject}: {takes.module} has no {takes.name}.{near}"
    if not isinstance(takes, Signature):
        return
    names = set(part) - {"_target_", "_about_"}
    hidden = sorted(name for name in names if name.startswith("_") and name not in takes.names)
    names -= set(hidden)
    for name in hidden:
        yield (
            f"{path}.{name}={part[name]}: of Hydra's own keys, only _target_ is supported. Name a function of "
            "yours that builds the object."
        )
    unasked = sorted(passed - set(takes.names)) if not takes.open else []
    if unasked:
        yield f"{subject} takes no {', '.join(unasked)}, which the run passes to it. {_instead(path, str(target))}"
    accepted = [name for name in takes.names if name not in passed]
    for name in () if takes.open else sorted(names - set(takes.names) - set(shared)):
        near = nearest(name, accepted).replace("Did you mean ", f"Did you mean {path}.")
        yield f"{path}.{name}={part[name]}: {target} takes no {name}.{near if accepted else ' It takes no arguments.'}"
    for name in sorted(names & passed):
        yield f"{path}.{name}={part[name]}: the run itself passes {name} to {target}. Leave it out."
    for name in takes.required if not unasked and not hidden and not called else ():
        if name not in names | passed:
            made = "" if takes.allowed.get(name) else f", or {path}.{name}._target_=<its class> for an object"
            yield f"{subject} needs {name}. Type {_typed_in(path, name) or f'{path}.{name}=<value>{made}'}."
