"""resolve(config, cluster) -> Plan: a pure function, without torch, network or process group.

Every rule that spans fields is one small function of the tuple RULES. A rule gets the config, the cluster and the draft of what
earlier rules decided, returns the fields it decides and raises WordsError for what cannot be. Rules that build on a field whose
rule failed are skipped, so the user sees every mistake that can be known, and no echo of one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import Plan
from dtrain.resolve import auto, batch, divide, fit, limits, machine, mesh, numbers, out, pipeline, ranks, trust

Rule = Callable[[Config, Cluster, "Draft"], Mapping[str, Any]]


class Undecided(Exception):  # noqa: N818 - a signal between rules, not an error
    """A rule asked for a field whose own rule failed."""


class Draft(dict[str, Any]):
    """Fields of the Plan decided so far."""

    def __missing__(self, field: str) -> Any:
        raise Undecided(field)


RULES: tuple[Rule, ...] = (
    numbers.positive,
    limits.clock,
    machine.machine,
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
    """What was asked, decided for every number of nodes that is allowed. Raises WordsError with every problem that can be known before launch."""
    cluster = machine.named(config, cluster)
    most, *fewer = ranks.counts(config, cluster)
    first = _on(most, config, cluster)
    plans, problems = [], []
    for nodes in fewer:
        try:
            plans.append(replace(_fewer(nodes, first, config, cluster), out=first.out, launcher=first.launcher, threads=first.threads))
        except WordsError as error:
            problems += [f"with nodes={nodes}: {problem}" for problem in error.problems]
    if problems:
        raise WordsError(*problems)
    return replace(first, others=tuple(plans))


def _fewer(nodes: int, first: Plan, config: Config, cluster: Cluster) -> Plan:
    """The same batch on fewer nodes, and no more of it at once on one rank than `first` has."""
    same = replace(config, batch=first.batch.size, microbatch=None, accumulate=None)
    plan = _on(nodes, same, cluster)
    if plan.batch.microbatch <= first.batch.microbatch:
        return plan
    micro = max(size for size in range(1, first.batch.microbatch + 1) if plan.batch.local % size == 0)
    return _on(nodes, replace(same, microbatch=micro), cluster)


def _on(nodes: Any, config: Config, cluster: Cluster) -> Plan:
    draft, problems = Draft(why={}, elastic="" if nodes == config.nodes else config.nodes), list[str]()
    for rule in RULES:
        try:
            draft.update(rule(replace(config, nodes=nodes), cluster, draft))
        except WordsError as error:
            problems.extend(error.problems)
        except Undecided:
            continue
    if problems:
        raise WordsError(*problems)
    del draft["elastic"]
    draft.pop("microbatch", None)
    return Plan(**draft)
