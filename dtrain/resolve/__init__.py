"""resolve(config, cluster) -> Plan: a pure function, without torch, network or process group.

Every rule that spans fields is one small function of the tuple RULES. A rule gets the config, the cluster and the draft
of what earlier rules decided, returns the fields it decides and raises WordsError for what cannot be. Rules that build
on a field whose rule failed are skipped, so the user sees every mistake that can be known, and no echo of one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.config.word import said
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.resolve import (
    auto,
    batch,
    conflicts,
    declared,
    epochs,
    fit,
    machine,
    mesh,
    model_axes,
    out,
    own,
    pipeline,
    ranks,
    targets,
    time_limit,
    trust,
    values,
)
from dtrain.resolve.deciding import deciding
from dtrain.resolve.unknown import UNKNOWN, Undecided

Rule = Callable[[Config, Cluster, "Draft"], Mapping[str, Any]]


class Draft(dict[str, Any]):
    """Fields of the Plan decided so far."""

    def __missing__(self, field: str) -> Any:
        raise Undecided(field)


KEY = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)*)=")

RULES: tuple[Rule, ...] = (
    values.plain,
    time_limit.clock,
    machine.machine,
    ranks.devices,
    ranks.world,
    ranks.backend,
    ranks.compiled,
    ranks.precision,
    ranks.launcher,
    ranks.threads,
    auto.strategy,
    mesh.degrees,
    pipeline.shape,
    batch.arithmetic,
    epochs.steps,
    model_axes.model,
    model_axes.rows,
    declared.model,
    model_axes.options,
    fit.objective,
    fit.together,
    fit.synthetic,
    fit.hooks,
    conflicts.sizes,
    conflicts.data,
    conflicts.contradictions,
    fit.checkpoint,
    fit.optim,
    fit.parts,
    trust.targets,
    targets.arguments,
    out.where,
)


@deciding()
def resolve(config: Config, cluster: Cluster) -> Plan:
    """The decisions, for every number of nodes that is allowed. Raises WordsError with every problem that can
    be known before launch.
    """
    return _all(config, cluster)


def _all(config: Config, cluster: Cluster) -> Plan:
    config, cluster = own.stated(config), machine.named(config, cluster)
    most, *fewer = ranks.counts(config, cluster)
    first = _on(most, config, cluster)
    plans = []
    for nodes in fewer:
        try:
            plans.append(
                replace(
                    _fewer(nodes, first, config, cluster), out=first.out, launcher=first.launcher, threads=first.threads
                )
            )
        except WordsError as error:  # the rest would fail alike: a range of nodes is one mistake
            raise WordsError(*(f"with nodes={nodes}: {problem}" for problem in error.problems)) from error
    return replace(first, others=tuple(plans))


def _fewer(nodes: int, first: Plan, config: Config, cluster: Cluster) -> Plan:
    """The same batch on fewer nodes, and no more of it at once on one rank than `first` has."""
    same = replace(config, batch=first.batch.size, microbatch=None, accumulate=None)
    plan = _on(nodes, same, cluster)
    if plan.batch.microbatch <= first.batch.microbatch:
        return plan
    micro = max(size for size in mesh.divisors(plan.batch.local) if size <= first.batch.microbatch)
    return _on(nodes, replace(same, microbatch=micro), cluster)


def further(config: Config, cluster: Cluster) -> tuple[str, ...]:
    """The problems of a config of which something is not known, because it was asked for wrongly."""
    try:
        _all(config, cluster)
    except WordsError as error:
        return error.problems
    except Undecided:
        pass
    return ()


def _on(nodes: Any, config: Config, cluster: Cluster) -> Plan:
    draft = Draft(why={}, elastic="" if nodes == config.nodes else config.nodes)
    config, undecided = replace(config, nodes=nodes), False
    wrong = values.judge(config)
    known, problems = values.without(config, wrong), list[str]()
    for rule in RULES:
        try:
            draft.update(rule(known, cluster, draft))
        except WordsError as error:
            problems.extend(error.problems)
        except Undecided:
            undecided = True
    if wrong or problems:
        raise WordsError(*wrong.values(), *(_with_sources(problem, config) for problem in problems))
    if undecided:
        raise Undecided
    del draft["elastic"]
    draft.pop("microbatch", None)
    return Plan(**draft)


def _with_sources(problem: str, config: Config) -> str:
    """The sentence and, behind it, who said each `key=value` that it blames and that is so in this run."""
    facts, told = problem.partition(" Type ")[0], {}
    for found in KEY.finditer(facts):
        value = _value(config, found[1])
        if value is not UNKNOWN and facts.startswith((said(value), str(value)), found.end()):
            told[found[1]] = config.sources.get(found[1], "default")
    return problem + f" ({', '.join(f'{key}: {source}' for key, source in told.items())})" * bool(told)


def _value(config: Config, key: str) -> Any:
    """The config's value of a dotted key; UNKNOWN where there is none."""
    if key in config.choices:
        return config.choices[key]
    value: Any = config
    for name in key.split("."):
        if value is UNKNOWN:
            return UNKNOWN
        value = value.get(name, UNKNOWN) if isinstance(value, dict) else getattr(value, name, UNKNOWN)
    return value
