"""strategy=auto: the words of the fastest layout that fits into memory, by prediction."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.config.facts import about, fact
from dtrain.config.schema import Config
from dtrain.config.sections import Mesh, Pipeline, Tensor
from dtrain.config.word import cut, spelling
from dtrain.errors import DtrainError, WordsError
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.advice import STRENGTH
from dtrain.predict.budget import budget_of
from dtrain.predict.reference import is_teacher
from dtrain.predict.report import count, size
from dtrain.predict.shapes import Shapes
from dtrain.resolve import trust
from dtrain.resolve.chunk import machine_of
from dtrain.resolve.search import Found, Layout, Model, Search
from dtrain.resolve.space import Words, applied, part_of
from dtrain.resolve.unknown import Undecided

VOCABULARY = 50257
"""Assumed vocabulary of a tokenizer that is not loaded: that of GPT-2."""
Decide = Callable[[Config, Cluster], Plan]
"""(config, cluster) -> the plan on one node."""
Trace = Callable[[Plan], Shapes]
"""The shapes of a model that has no formula. Raises WordsError if it cannot be built."""


def chosen(config: Config, cluster: Cluster, draft: dict[str, Any], decide: Decide, trace: Trace | None) -> Config:
    """The config with the words that strategy=auto means, and the reason in `why` of the draft."""
    if config.choices["strategy"] != "auto":
        return config
    ranks = draft["nodes"] * draft["devices"]
    try:
        found = searched(
            config, cluster, draft, decide, trace if ranks > 1 and _may_trace(config, cluster, draft) else None
        )
    except Undecided:  # because of words that later rules refuse
        found = None
    words, reason = _decided(found, ranks)
    draft["why"]["strategy"] = f"{words['strategy']} (auto: {reason})"
    if "remat" in words:
        draft["why"]["remat"] = f"{words['remat']} (auto: strategy)"
    return applied(config, words)


def _may_trace(config: Config, cluster: Cluster, draft: dict[str, Any]) -> bool:
    """Not for a run that is refused, as a trace runs the same code; nor where another launcher has started processes:
    each decides for itself, and a trace might fail in one of them alone.
    """
    around = fact(draft.get("launcher") or {}, "where") == "around"
    return not around and not any(trust.targets(config, cluster, draft))


def strategy(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    if config.choices["strategy"] == "auto":
        raise Undecided("strategy")
    return {"strategy": dict(config.strategy)}


def searched(
    config: Config, cluster: Cluster, draft: Mapping[str, Any], decide: Decide, trace: Trace | None, keep: int = 1
) -> Found:
    """The search for the `keep` best layouts; without any, and with the reason, if the model's size cannot be known
    here. Where one is wanted, and the model is traced, that is ddp if it fits: no rule, but the model itself would say
    whether it can be split.
    """
    machine = machine_of(draft["cluster"], cluster)
    models, unknown = _models(config, cluster, draft, decide, trace)
    if not models:
        return Found(unknown=unknown or UNBUILT)
    models = [
        replace(model, plan=replace(model.plan, **{name: draft[name] for name in PLACE}, cluster=machine))
        for model in models
    ]
    budget = budget_of(models[0].plan, build(machine))
    search = Search(
        config=config, cluster=cluster, draft=draft, models=models, machine=build(machine), budget=budget, keep=keep
    )
    plain = search.tried({"strategy": "ddp"}) if keep == 1 and models[0].traced else None
    return plain or search.run()


UNBUILT = "the model's size is not known before it is built; dtrain plan best builds it and finds what fits"
PLACE = "nodes", "devices", "device", "threads"


def _models(
    config: Config, cluster: Cluster, draft: Mapping[str, Any], decide: Decide, trace: Trace | None
) -> tuple[list[Model], str]:
    """(the model as strategies hold it that copy it, and as those do that shard it, whose types differ; why it is not
    known or an empty text).
    """
    alone = "single" if draft["nodes"] * draft["devices"] == 1 else ""
    asked = config.choices["strategy"]
    parts = {word: part for word, part in config.options.get("strategy", {}).items() if about(part).get("try")}
    strategies = sorted(parts, key=lambda word: STRENGTH["strategy"](parts[word])) if asked == "auto" else [asked]
    strategies = [alone] if alone and asked == "auto" else strategies
    models, unknown = list[Model](), ""
    for holds in ("copies", "shards"):
        alike = [word for word in strategies if fact(part_of(config, "strategy", word), "holds") == holds]
        if not alike:
            continue
        reason = ""
        try:
            plan = _on_one_rank(config, cluster, "single" if holds == "copies" else "fsdp", decide)
            shapes = formula = formulas.shapes(plan)
        except (WordsError, TypeError, KeyError, ValueError, ZeroDivisionError):  # later rules report wrong words
            break
        try:
            if trace and (formula is None or is_teacher(plan)):
                shapes = trace(plan)
                reason = shapes.unknown
        except DtrainError as error:
            reason = str(error)
        if shapes and shapes.blocks and not shapes.unknown:
            models.append(Model(plan, shapes, alike, traced=formula is None))
        elif reason:
            unknown = cut(" ".join(reason.split()), 300)
    return models, unknown


def _on_one_rank(config: Config, cluster: Cluster, strategy: str, decide: Decide) -> Plan:
    """The run on one rank, with everything that no mesh decides."""
    split = "mesh", "pipeline", "tensor", "context", "microbatch", "accumulate", "nodes", "devices", "launcher"
    sources = {key: source for key, source in config.sources.items() if key.partition(".")[0] not in split}
    one = applied(
        replace(config, pipeline=Pipeline()),
        {"strategy": strategy, "launcher": "inline", "pipeline.schedule": Pipeline().schedule},
    )
    one = replace(
        one, nodes=1, devices=1, sources=sources,
        microbatch=None, accumulate=None, mesh=Mesh(), tensor=Tensor(),
    )  # fmt: skip
    plan = decide(one, replace(cluster, external=None))
    if plan.model.get("vocab") == "auto" and formulas.facts_of(plan.data).get("vocab") is None:
        plan = replace(plan, model={**plan.model, "vocab": VOCABULARY})
    return plan


def _decided(found: Found | None, ranks: int) -> tuple[Words, str]:
    """The words that the search found, and the reason."""
    simplest = {"strategy": "single" if ranks == 1 else "ddp"}
    alone = "one rank" if ranks == 1 else f"{ranks} ranks"
    if found is None or found.unknown:
        unknown = found.unknown if found else UNBUILT
        reason = unknown if unknown == UNBUILT else f"its layouts cannot be compared: {unknown}"
        return simplest, f"{alone}, and {reason}" if ranks > 1 else alone
    best = found.layouts[0] if found.layouts else found.least
    if not best:  # other words are wrong, which later rules report
        return simplest, alone
    if ranks == 1 and found.layouts and best.words == {"strategy": "single", "microbatch": best.plan.batch.size}:
        return simplest, alone
    return best.words, _reason(best, found)


def _reason(best: Layout, found: Found) -> str:
    """Explain the choice of `best`."""
    shapes, budget = best.prediction.shapes, best.prediction.budget
    need = f"{count(shapes.parameters)} parameters need about {size(best.peak)} of {size(budget)} on each rank"
    if not found.layouts:
        return (
            f"{spelled(best.words)} needs the least memory, {need}, which is more than there is. Type a smaller "
            f"{best.smaller} or more devices"
        )
    if len(found.layouts) == 1:
        return f"{spelled(best.words)}, {need}"
    other = found.layouts[1]
    worse = other.worse(best)
    times = f"{other.seconds / best.seconds:.2f}x the time" + f", but it {worse}" * bool(worse)
    return f"{spelled(best.words)}, {need}; next is {spelled(other.words)}, {times}"


def spelled(words: Words) -> str:
    """The words as they are typed."""
    return " ".join(f"{key}={spelling(value)}" for key, value in words.items())
