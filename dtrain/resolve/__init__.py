"""resolve(config, cluster) -> Plan: a pure function, without torch, network or process group.

Every rule that spans fields is one small function in the tuple RULES. A rule takes the config, the cluster and the
draft of earlier decisions. It returns the fields it decides, or raises WordsError; a rule that only checks yields a
sentence for each problem. A rule that reads a field whose own rule failed is skipped, so the user sees every mistake
once, without its consequences.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.config.word import spelling
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.resolve import (
    auto,
    batch,
    chunk,
    comparing,
    conflicts,
    counting,
    declared,
    epochs,
    fit,
    heads,
    lightning,
    loggers,
    loop,
    machine,
    mesh,
    metrics,
    mixture,
    model_axes,
    out,
    own,
    pipeline,
    ranks,
    reduction,
    rowtext,
    sets,
    small,
    stopping,
    targets,
    time_limit,
    trust,
    values,
)
from dtrain.resolve.deciding import deciding
from dtrain.resolve.search import Found
from dtrain.resolve.space import Words, applied, is_free, part_of
from dtrain.resolve.unknown import UNKNOWN, Undecided

Rule = Callable[[Config, Cluster, "Draft"], Mapping[str, Any] | Iterable[str]]


class Draft(dict[str, Any]):
    """Fields of the Plan decided so far."""

    def __missing__(self, field: str) -> Any:
        raise Undecided(field)


KEY = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)*)=")

PLACE: tuple[Rule, ...] = (
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
    out.where,
)
"""Rules that decide where a run is, before strategy=auto looks for the layout."""
RULES: tuple[Rule, ...] = (
    auto.strategy,
    mesh.degrees,
    pipeline.shape,
    batch.arithmetic,
    reduction.reduced,
    model_axes.model,
    model_axes.rows,
    declared.model,
    model_axes.options,
    lightning.chosen,
    lightning.datamodules,
    lightning.scheduled,
    fit.objective,
    fit.tokens,
    rowtext.model,
    metrics.named,
    fit.together,
    comparing.pairs,
    comparing.teacher,
    comparing.masks,
    fit.synthetic,
    fit.hooks,
    sets.measured,
    sets.predicted,
    conflicts.sizes,
    conflicts.data,
    fit.checkpoint,
    stopping.early,
    fit.optim,
    fit.parts,
    trust.targets,
    targets.arguments,
    loggers.methods,
    loop.words,
)
LENGTH: tuple[Rule, ...] = (epochs.steps, epochs.periods, conflicts.contradictions)
"""Rules of the length of the run, and of its epochs, which may have to open the data: then when nothing else is wrong.
"""


@deciding()
def resolve(config: Config, cluster: Cluster, trace: auto.Trace | None = None) -> Plan:
    """Decide every field of the plan, for each allowed number of nodes; `trace` gives strategy=auto the shapes of a
    model that has no formula. Raises WordsError with all problems that can be known before launch.
    """
    counting.forget()
    return _resolve(config, cluster, trace)


def _resolve(config: Config, cluster: Cluster, trace: auto.Trace | None = None) -> Plan:
    config, cluster = own.stated(config), machine.named(config, cluster)
    config, wrong = mixture.composed(config)
    if wrong:
        raise WordsError(*wrong, *further(config, cluster))
    config, wrong = rowtext.padded(config)
    if wrong:
        raise WordsError(*wrong, *further(replace(config, data=UNKNOWN), cluster))
    config, wrong = heads.told(config)
    if wrong:
        raise WordsError(*wrong, *further(replace(config, model=UNKNOWN), cluster))
    config, cluster = ranks.placed(config, cluster)
    most, *fewer = ranks.counts(config, cluster)
    first = chunk.decided(_plan_on(most, config, cluster, trace), cluster)
    fit.rates(first)
    others = list[Plan]()
    for nodes in fewer:
        try:
            plan = _plan_on_fewer(nodes, first, config, cluster, trace)
        except WordsError as error:  # report the first count that fails: a bad range of nodes is one mistake
            raise WordsError(*(f"with nodes={nodes}: {problem}" for problem in error.problems)) from error
        plan = chunk.decided(plan, cluster)
        others.append(replace(plan, out=first.out, launcher=first.launcher, threads=first.threads))
    return replace(first, others=tuple(others))


def _plan_on_fewer(nodes: int, first: Plan, config: Config, cluster: Cluster, trace: auto.Trace | None) -> Plan:
    """Plan the same batch on fewer nodes, with a microbatch no larger than that of `first`."""
    same = replace(config, batch=first.batch.size, microbatch=None, accumulate=None)
    plan = _plan_on(nodes, same, cluster, trace)
    if plan.batch.microbatch <= first.batch.microbatch:
        return plan
    micro = max(size for size in mesh.divisors(plan.batch.local) if size <= first.batch.microbatch)
    return _plan_on(nodes, replace(same, microbatch=micro), cluster, trace)


def further(config: Config, cluster: Cluster) -> tuple[str, ...]:
    """Problems of a config in which invalid values are UNKNOWN."""
    try:
        _resolve(config, cluster)
    except WordsError as error:
        return error.problems
    except Undecided:
        pass
    return ()


@deciding()
def best(config: Config, cluster: Cluster, trace: auto.Trace, keep: int) -> Found:
    """The `keep` best kinds of layouts of what the words leave open, each judged by every rule; where none fits, those
    with weights and optimizer in the memory of the host between uses. Raises WordsError as `resolve`, or if the model's
    size cannot be known.
    """
    found = _best(config, cluster, trace, keep)
    resting = _resting(config) if not found.layouts else {}
    on_host = _best(applied(config, resting), cluster, trace, keep) if resting else found
    if not on_host.layouts:
        return found
    on_host.layouts = [replace(layout, words={**layout.words, **resting}) for layout in on_host.layouts]
    return on_host


def _resting(config: Config) -> Words:
    """The words for weights and optimizer that rest in the memory of the host; empty where others were typed."""
    word = "fsdp" if is_free(config, "strategy") else str(config.choices["strategy"])
    offers = "offload" in part_of(config, "strategy", word) and is_free(config, "strategy.offload")
    return {"strategy": word, "strategy.offload": "cpu"} if offers else {}


def _best(config: Config, cluster: Cluster, trace: auto.Trace, keep: int) -> Found:
    first = resolve(config, cluster, trace)
    config, cluster = own.stated(config), machine.named(config, cluster)
    config, cluster = ranks.placed(mixture.composed(config)[0], cluster)
    config = replace(config, nodes=first.nodes)
    draft = Draft(why={}, elastic="")
    _follow(PLACE, config, cluster, draft)
    found = auto.searched(
        config, cluster, draft, decide=lambda one, alone: _plan_on(1, one, alone, trace), trace=trace, keep=keep
    )
    if found.unknown:
        raise WordsError(
            f"plan best: no layout can be predicted: what this model holds and computes is not known: {found.unknown}"
        )
    runs = (layout for layout in found.layouts if _runs(applied(config, layout.words), cluster, trace, found))
    found.layouts = [*itertools.islice(runs, keep)]
    if not found.layouts and not found.least:
        raise WordsError(f"plan best: no layout is left. {found.refused}")
    return found


def _runs(config: Config, cluster: Cluster, trace: auto.Trace, found: Found) -> bool:
    """Whether every rule, and the model itself, takes these words; why not is noted in `found`."""
    try:
        trace(_resolve(config, cluster))
    except WordsError as error:
        found.refused = error.problems[0]
        return False
    return True


def _plan_on(nodes: Any, config: Config, cluster: Cluster, trace: auto.Trace | None) -> Plan:
    plan = _decided(nodes, config, cluster, trace)
    words = small.words(config, plan)
    if not words:
        return plan
    again = _decided(nodes, applied(config, words), cluster, trace)
    return replace(again, why={**again.why, **{name: small.reason(word, plan) for name, word in words.items()}})


def _decided(nodes: Any, config: Config, cluster: Cluster, trace: auto.Trace | None) -> Plan:
    draft = Draft(why={}, elastic="" if nodes == config.nodes else config.nodes)
    config = replace(config, nodes=nodes)
    wrong = values.judge(config)
    known = values.without(config, wrong)
    problems, undecided = _follow(PLACE, known, cluster, draft)
    trace = None if wrong or problems else trace
    try:
        known = auto.chosen(known, cluster, draft, lambda one, alone: _plan_on(1, one, alone, trace), trace)
    except Undecided:
        undecided = True
    more, also = _follow(RULES, known, cluster, draft)
    if not epochs.counts(known) or not (wrong or problems or more or undecided or also):
        longer, unknown = _follow(LENGTH, known, cluster, draft)
        more, also = more + longer, also or unknown
    if wrong or problems or more:
        raise WordsError(*wrong.values(), *(_with_sources(problem, config) for problem in problems + more))
    if undecided or also:
        raise Undecided
    del draft["elastic"]
    return Plan(**draft)


def _follow(rules: Iterable[Rule], config: Config, cluster: Cluster, draft: Draft) -> tuple[list[str], bool]:
    """Add to the draft what rules decide; (problems, whether one of them lacked a field)."""
    problems, undecided = list[str](), False
    for rule in rules:
        try:
            outcome = rule(config, cluster, draft)
            if isinstance(outcome, Mapping):
                draft.update(outcome)
            else:
                problems += list(outcome)  # all or none, should the rule need a field that was not decided
        except WordsError as error:
            problems.extend(error.problems)
        except Undecided:
            undecided = True
    return problems, undecided


def _with_sources(problem: str, config: Config) -> str:
    """Append to a problem the source of each `key=value` in it that has this value in the config, if it lacks it."""
    facts, sources = problem.partition(" Type ")[0], {}
    for match in KEY.finditer(facts):
        value = _value(config, match[1])
        if value is not UNKNOWN and facts.startswith((spelling(value), str(value)), match.end()):
            sources[match[1]] = values.source_of(config, match[1])
    sources = {key: source for key, source in sources.items() if f"({source})" not in facts}
    return problem + f" ({', '.join(f'{key}: {source}' for key, source in sources.items())})" * bool(sources)


def _value(config: Config, key: str) -> Any:
    """The config's value of a dotted key; UNKNOWN if it has none."""
    if key in config.choices:
        return config.choices[key]
    value: Any = config
    for name in key.split("."):
        if value is UNKNOWN:
            return UNKNOWN
        value = value.get(name, UNKNOWN) if isinstance(value, dict) else getattr(value, name, UNKNOWN)
    return value
