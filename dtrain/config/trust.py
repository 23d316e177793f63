"""Decides which code may run: dtrain's own words, each in its group, the classes of torch.nn and torch.optim, and
packages that the user trusts.

Only names are checked here, without importing anything; `dtrain.build` checks the imported object again. To see a
refusal: `dtrain plan model._target_=os.system`.
"""

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dtrain.config.files import folder

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
TORCH = re.compile(r"torch\.(nn|optim|optim\.lr_scheduler)\.[A-Z]\w*", re.ASCII)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "model": ("dtrain.build.given",),
    "data": ("dtrain.data.digits.Digits", "dtrain.build.given"),
    "objective": ("dtrain.build.given",),
    "loop": ("dtrain.train.train",),
    "hook": ("dtrain.testing.faults.AtStep", "dtrain.build.given"),
    "logger": ("dtrain.build.given",),
}
"""dtrain's own targets that are not words in conf/. The fault hook is for the command line: a recipe from elsewhere may
not name it.
"""
MADE_OF = ("model", "data", "objective", "optim", "schedule")
"""Groups in which a recipe from elsewhere may name code of a package that the user trusts; parts of the other groups
act on the machine.
"""


@cache
def own() -> Mapping[str, frozenset[str]]:
    """Group -> targets of its words, read from conf/."""
    targets = {
        group.name: re.findall(
            r"^_target_: (\S+)", "\n".join(path.read_text("utf-8") for path in group.glob("*.yaml")), re.MULTILINE
        )
        for group in folder("conf").iterdir()
        if group.is_dir()
    }
    return {group: frozenset((*targets.get(group, ()), *BESIDE.get(group, ()))) for group in {*targets, *BESIDE}}


def allowed(name: str, group: str, trusted: Collection[str]) -> bool:
    """Whether the dotted `name` may be called for `group` ('model', ..., or 'loop')."""
    if not NAME.fullmatch(name) or "__" in name.replace("___", "__"):
        return False
    return (
        name in own().get(group, ())
        or bool(TORCH.fullmatch(name))
        or any(name.startswith(f"{package}.") for package in trusted)
    )


def from_elsewhere(name: str, group: str) -> bool:
    """Whether a recipe from elsewhere may name a target: in MADE_OF any, in other groups only dtrain's own words."""
    return group in MADE_OF or name in own().get(group, frozenset()) - set(BESIDE["hook"])


def refusal(key: str, name: str, needed: Collection[str] = (), source: str = "") -> str:
    """The message for a name that is not allowed; `key`: the key that has it; `needed`: all packages of the run that
    must be trusted; `source`: the file that names it, if nobody typed it.
    """
    package = name.split(".")[0]
    refused = f"{key}={name}: {package} is not trusted to run code."
    if not NAME.fullmatch(name):
        return f"{key}={name}: a class or function has a dotted name, such as mypkg.nets.Net."
    short = f"torch.{name.split('.')[1]}.{name.split('.')[-1]}"
    if package == "torch" and TORCH.fullmatch(short) and short != name:
        return (
            f"{refused} Name classes of torch by their public path: type {key}={short}, or trust=[torch] for all of "
            "torch."
        )
    if package == "dtrain":
        group = key.split(".")[0]
        return f"{refused} Targets of dtrain allowed for {group}: {', '.join(sorted(own().get(group, ())))}."
    packages = ",".join(dict.fromkeys(needed or [package]))
    if source:
        return f"{refused} {source} names it. {reading(package)}, and then type trust=[{packages}] if it may run."
    return f"{refused} Type trust=[{packages}] if you know what {'they do' if ',' in packages else 'it does'}."


def reading(package: str) -> str:
    """The advice before a package that somebody else named is trusted: its code runs with the rights of the user."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    place = f"in {Path(spec.origin).parent}" if spec and spec.origin else "(not installed)"
    return f"Read the source of {package} {place} first"
