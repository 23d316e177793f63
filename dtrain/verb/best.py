"""`dtrain plan best <words>`: the fastest layouts that fit, of all that the words leave open.

dtrain plan best cluster=h100x8 nodes=16 model=gpt model.layers=32 batch=256       the ten best, and their words
dtrain plan best json <words>                                                      the same for tools
"""

import json
from collections.abc import Sequence

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.predict import report
from dtrain.resolve import best
from dtrain.resolve.auto import spelled
from dtrain.resolve.search import Found, Layout
from dtrain.secrets import screen
from dtrain.tracing import shapes_of

MOST = 10
HEADS = ("a step", "tokens/s/GPU", "MFU", "peak", "headroom", "words")


def run(words: Sequence[str]) -> int:
    for_tools = list(words[:1]) == ["json"]
    words = words[for_tools:]
    config = compose(words)
    if config.choices["strategy"] is None:
        raise WordsError("plan best: a strategy of your own is one layout. Leave strategy out to search.")
    found = best(config, detect(), shapes_of, MOST)
    if for_tools:
        screen.say(json.dumps([_facts(layout) for layout in found.layouts], indent=1))
        return 0
    screen.say(_counted(found))
    if found.layouts:
        screen.say(screen.figures([HEADS, *map(_row, found.layouts)]))
    elif found.least:
        least = found.least
        screen.say(
            f"none fits. The least memory has {spelled(least.words)}: {report.size(least.peak)} of "
            f"{report.size(least.prediction.budget)}. Type more nodes or devices, or a smaller batch."
        )
    return 0


def _counted(found: Found) -> str:
    return (
        f"{found.looked:,} layouts looked at: {found.small:,} need too much memory, {found.predicted:,} were "
        "predicted, the others take longer."
    )


def _facts(layout: Layout) -> dict[str, object]:
    return {"words": [f"{key}={value}" for key, value in layout.words.items()], **layout.prediction.to_dict()}


def _row(layout: Layout) -> tuple[str, ...]:
    prediction, time = layout.prediction, layout.prediction.time
    assert time
    return (
        report.duration(time.seconds), report.count(time.tokens_per_second / layout.plan.world), f"{time.mfu:.0%}",
        report.size(layout.peak), report.size(prediction.budget - layout.peak), spelled(layout.words),
    )  # fmt: skip
