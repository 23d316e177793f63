"""Trackers of a plan that cannot work on this machine: their package or a key is not here."""

import importlib.util
from collections.abc import Iterable

from dtrain.build import build
from dtrain.config.facts import about
from dtrain.errors import DtrainError
from dtrain.logger.tracker import Tracker
from dtrain.planned import Plan


def problems(plan: Plan) -> Iterable[str]:
    """A sentence for each tracker that cannot work."""
    for name, part in plan.loggers.items():
        package = about(part).get("package")
        if package is None:
            continue
        word = str(part["_target_"]).split(".")[-2]
        if importlib.util.find_spec(package) is None:
            yield f"logger={name}: the package {package} is not installed. Type: pip install 'dtrain[{word}]'"
            continue
        try:
            made = build(part, Tracker, out=plan.out, steps=plan.steps)
        except DtrainError:  # a secret that this process does not have
            continue
        if lacking := made.lacks():
            yield f"logger={name}: {lacking}"
