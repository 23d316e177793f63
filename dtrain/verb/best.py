"""`dtrain plan best <words>`: the fastest layouts that fit, of all that the words leave open.

dtrain plan best cluster=h100x8 nodes=16 model=gpt model.layers=32 batch=256       the ten best, and their words
dtrain plan best target=cost cluster=h100x8 cluster.price=2.5 nodes=16 batch=256   the cheapest ones, on up to 16 nodes
dtrain plan best json <words>                                                      the same for tools
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.predict import price, report
from dtrain.resolve import best, ranks
from dtrain.resolve.auto import spelled
from dtrain.resolve.search import ALIKE, Found, Layout
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.verb.shapes import shapes_of

MOST = 10
KINDS = 2 * MOST
"""Kinds of layouts that are looked for: some of them take one row."""
TARGETS = "time", "cost"
"""The best layout has least of it: seconds of a step, or the price of the run."""


def run(words: Sequence[str]) -> int:
    for_tools = list(words[:1]) == ["json"]
    words, target = _targeted(words[for_tools:])
    config = compose(words)
    if config.choices["strategy"] is None:
        raise WordsError("plan best: a strategy of your own is one layout. Leave strategy out to search.")
    found = _cheapest(config) if target == "cost" else best(config, detect(), shapes_of, KINDS)
    found.layouts = _different(found.layouts)[:MOST]
    if for_tools:
        screen.say(json.dumps(clean([_facts(layout) for layout in found.layouts]), indent=1))
        return 0
    screen.say(_counted(found))
    if found.layouts:
        unit, _ = report.speed(found.layouts[0].plan, found.layouts[0].prediction)
        rows = [("a step", unit, "MFU", "peak", "headroom", "words"), *map(_row, found.layouts)]
        if config.cluster.get("price") is not None:
            prices = ("price", *(price.amount(price_of(layout)) for layout in found.layouts))
            rows = [(*row[:-1], each, row[-1]) for row, each in zip(rows, prices, strict=True)]
        screen.say(screen.figures(rows), *(_preferred(found.layouts) if target == "time" else ()))
    elif found.least:
        least = found.least
        screen.say(
            f"none fits. The least memory has {spelled(least.words)}: {report.size(least.peak)} of "
            f"{report.size(least.prediction.budget)}. Type more nodes or devices, or a smaller {least.smaller}."
        )
    return 0


def _preferred(layouts: Sequence[Layout]) -> Iterator[str]:
    """Why the first layout is not the fastest, if it is not."""
    first, fastest = layouts[0], min(layouts, key=lambda layout: layout.seconds)
    if worse := fastest.worse(first):
        more = first.seconds / fastest.seconds - 1
        yield f"The first is preferred, although it takes {more:.1%} longer than the fastest, which {worse}."


def _different(layouts: Sequence[Layout]) -> list[Layout]:
    """One layout of those on the same mesh that take as long: the first of all as it is, of others the one that needs
    the least memory.
    """
    shown = list[list[Layout]]()
    for layout in layouts:
        alike = (group for group in shown if _are_alike(group[0], layout))
        if group := next(alike, None):
            group.append(layout)
        else:
            shown.append([layout])
    others = (min(group, key=lambda one: one.peak) for group in shown[1:])
    return [*layouts[:1], *sorted(others, key=lambda one: one.seconds)]


def _are_alike(one: Layout, other: Layout) -> bool:
    same = one.kind[1:] == other.kind[1:] and one.plan.world == other.plan.world
    return same and max(one.seconds, other.seconds) <= ALIKE * min(one.seconds, other.seconds)


def _targeted(words: Sequence[str]) -> tuple[list[str], str]:
    """The words of the run, and the target among them."""
    others = [word for word in words if not word.startswith("target=")]
    *_, target = "time", *(word.partition("=")[2] for word in words if word.startswith("target="))
    if target not in TARGETS:
        raise WordsError(f"target={target}: {' or '.join(TARGETS)}.{nearest(target, TARGETS)}")
    return others, target


def _cheapest(config: Config) -> Found:
    """The layouts with the cheapest runs, on numbers of nodes up to that of the words. Raises WordsError without a
    price.
    """
    if config.cluster.get("price") is None:
        cluster = "" if config.cluster else "cluster=<word> "
        rented = {None: "GPU, or of a node without GPUs,", 0: "node"}.get(config.cluster.get("gpus"), "GPU")
        raise WordsError(
            f"target=cost: the price of a {rented} is not known. Type {cluster}cluster.price=2.5, for an hour of one, "
            "in any currency."
        )
    found = Found()
    for each in _on_fewer(config):
        found.layouts += each.layouts
        for count in ("looked", "predicted", "fit", "small"):
            setattr(found, count, getattr(found, count) + getattr(each, count))
        found.least = min(filter(None, [found.least, each.least]), key=lambda layout: layout.peak, default=None)
    found.layouts = sorted(found.layouts, key=price_of)
    return found


def _on_fewer(config: Config) -> list[Found]:
    """The search on all nodes, and on 1, 2, 4 and so on, without numbers that the words do not allow, which a note
    names. Raises the WordsError of the first number if all are left out.
    """
    cluster, found, refused = detect(), list[Found](), dict[Any, WordsError]()
    most, *_ = ranks.counts(*ranks.placed(config, cluster))
    fewer = [1 << power for power in range((most - 1).bit_length())] if isinstance(most, int) else []
    for nodes in (config.nodes, *fewer):
        try:
            found.append(_with_nodes(best(replace(config, nodes=nodes), cluster, shapes_of, KINDS)))
        except WordsError as error:
            refused[nodes] = error
    if not found:
        raise next(iter(refused.values()))
    if refused:
        first, numbers = next(iter(refused)), ", ".join(map(str, refused))
        reason = screen.on_one_line(refused[first].problems[0])
        screen.complain(f"left out: nodes={numbers}. With nodes={first}: {reason}", begin="note: ")
    return found


def _with_nodes(found: Found) -> Found:
    def named(layout: Layout) -> Layout:
        return replace(layout, words={"nodes": layout.plan.nodes, **layout.words})

    return replace(found, layouts=[*map(named, found.layouts)], least=found.least and named(found.least))


def price_of(layout: Layout) -> float:
    """Price of all steps, in the currency of `cluster.price`; 0 if that is not known."""
    return price.price_of(layout.plan, layout.seconds * layout.plan.steps) or 0.0


def _counted(found: Found) -> str:
    ruled = f"bounds rule out {found.looked - found.predicted:,}; " if found.looked > found.predicted else ""
    refused = found.predicted - found.fit - found.small
    counts = f"{found.fit:,} fit, {found.small:,} are too large" + f", {refused:,} break a rule" * bool(refused)
    return f"{found.looked:,} layouts: {ruled}of {found.predicted:,} predicted {counts}"


def _facts(layout: Layout) -> dict[str, object]:
    words, prediction = [f"{key}={value}" for key, value in layout.words.items()], layout.prediction
    return {"words": words, **price.stated(layout.plan, prediction), **prediction.to_dict()}


def _row(layout: Layout) -> tuple[str, ...]:
    prediction, time = layout.prediction, layout.prediction.time
    assert time
    return (
        report.duration(time.seconds), report.count(report.speed(layout.plan, prediction)[1]), f"{time.mfu:.0%}",
        report.size(layout.peak), report.size(prediction.budget - layout.peak) + " tight" * report.is_tight(prediction),
        spelled(layout.words),
    )  # fmt: skip
