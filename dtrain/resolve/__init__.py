"""resolve(config, cluster) -> Plan: a pure function, without torch, network or process group.

Every rule that spans fields is one small function of the tuple RULES. A rule gets the config, the cluster and the draft of what
earlier rules decided, returns the fields it decides and raises WordsError for what cannot be. Rules that build on a field whose
rule failed are skipped, so the user sees every mistake that can be known, and no echo of one.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import Plan
from dtrain.resolve import auto, batch, divide, fit, mesh, numbers, out, pipeline, ranks, trust

Rule = Callable[[Config, Cluster, "Draft"], Mapping[str, Any]]


class Undecided(Exception):  # noqa: N818 - a signal between rules, not an error
    """A rule asked for a field whose own rule failed."""


class Draft(dict[str, Any]):
    """Fields of the Plan decided so far."""

    def __missing__(self, field: str) -> Any:
        raise Undecided(field)


RULES: tuple[Rule, ...] = (
    numbers.positive,
    ranks.devices,
    ranks.world,
    ranks.backend,
    ranks.compiled,
    ranks.launcher,
    ranks.threads,
    auto.strategy,
    mesh.degrees,
    pipeline.shape,
    batch.arithmetic,
    divide.model,
    divide.options,
    fit.objective,
    fit.synthetic,
    fit.hooks,
    fit.precision,
    fit.parts,
    trust.targets,
    out.where,
)


def resolve(config: Config, cluster: Cluster) -> Plan:
    """What was asked, decided. Raises WordsError with every problem that can be known before launch."""
    draft, problems = Draft(why={}), list[str]()
    for rule in RULES:
        try:
            draft.update(rule(config, cluster, draft))
        except WordsError as error:
            problems.extend(error.problems)
        except Undecided:
            continue
    if problems:
        raise WordsError(*problems)
    draft.pop("microbatch", None)
    return Plan(**draft)
