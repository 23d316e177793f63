"""Which code may run: dtrain's own words, each in its group, the classes of torch.nn and torch.optim, and packages the
user names.

Here names are judged, without importing anything; `dtrain.build` looks at the object behind a name once more. See what
is refused with `dtrain plan model._target_=os.system`.
"""

import re
from collections.abc import Collection, Mapping
from functools import cache

from dtrain.config.files import folder

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
TORCH = re.compile(r"torch\.(nn|optim|optim\.lr_scheduler)\.[A-Z]\w*", re.ASCII)
BESIDE: Mapping[str, tuple[str, ...]] = {
    "model": ("dtrain.build.given",),
    "data": ("dtrain.data.digits.Digits", "dtrain.build.given"),
    "objective": ("dtrain.build.given",),
    "loop": ("dtrain.train.train",),
    "hook": ("dtrain.testing.faults.AtStep",),
}
"""Targets of ours that are no words of conf/. The fault is for the command line: a recipe from elsewhere may not name
it.
"""
MADE_OF = ("model", "data", "objective", "optim", "schedule")
"""Groups in which a recipe from elsewhere may name code of a package that the user trusts; what the other groups name
acts on the machine.
"""


@cache
def own() -> Mapping[str, frozenset[str]]:
    """Group -> what its words name, read off conf/."""
    found = {
        group.name: re.findall(
            r"^_target_: (\S+)", "\n".join(path.read_text() for path in group.glob("*.yaml")), re.MULTILINE
        )
        for group in folder("conf").iterdir()
        if group.is_dir()
    }
    return {group: frozenset((*found.get(group, ()), *BESIDE.get(group, ()))) for group in {*found, *BESIDE}}


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
    """Whether a recipe that is not of this machine may name it: outside of what a model learns from, only dtrain's own
    words.
    """
    return group in MADE_OF or name in own().get(group, frozenset()) - set(BESIDE["hook"])


def refusal(key: str, name: str) -> str:
    """The sentence for a name that is not allowed. `key` is where it stands."""
    package = name.split(".")[0]
    said = f"{key}={name}: {package} is not trusted to run code."
    if not NAME.fullmatch(name):
        return f"{key}={name}: a class or function has a dotted name, such as mypkg.nets.Net."
    short = f"torch.{name.split('.')[1]}.{name.split('.')[-1]}"
    if package == "torch" and TORCH.fullmatch(short) and short != name:
        return (
            f"{said} Of torch, classes are taken from where it shows them: type {key}={short}, or trust=[torch] "
            "for all of it."
        )
    if package == "dtrain":
        return f"{said} Of dtrain, {key.split('.')[0]} takes: {', '.join(sorted(own().get(key.split('.')[0], ())))}."
    return f"{said} Type trust=[{package}] if you know what it does."
