"""The machine that a run is planned for: this one, or the one that `cluster` names, whose GPUs, cores and memory all
rules then see.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.config.constraints import is_number
from dtrain.config.facts import about, fact
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.resolve import values

TYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
SLOWEST, FASTEST = 1e6, 1e21
"""Operations per second of a GPU or a core: beyond any machine."""


def named(config: Config, here: Cluster) -> Cluster:
    """The cluster that rules see. Invalid figures are UNKNOWN in it; `values.judge` reports them."""
    if config.choices["cluster"] == "auto" or not config.cluster:
        return here
    known = values.without(config, [key for key in values.judge(config) if key.startswith("cluster.")])
    there: Cluster = build(known.cluster).seen(here)
    return there


def machine(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Figures of the machine; for `auto`, those of the word for the local GPU, or of this CPU."""
    if config.choices["cluster"] != "auto":
        _check(config.cluster)
        return {"cluster": dict(config.cluster)}
    words = {word: part for word, part in config.options["cluster"].items() if part}
    word = next((word for word, part in words.items() if part["gpu"] and part["gpu"] in cluster.gpu), "laptop")
    reason = f"{cluster.gpus} x {cluster.gpu}" if word != "laptop" else f"{cluster.cpus} cores and no GPU here"
    if fact(config.launcher, "where") == "elsewhere":
        reason += ", and nodes are taken to be like this host: else type cluster=<word>"
    draft["why"]["cluster"] = f"{word} (auto: {reason})"
    if cluster.gpus and word == "laptop":
        draft["why"]["cluster"] = (
            f"not known (auto: {cluster.gpu or 'a GPU without a name'} is not listed in this group); no times are "
            "predicted"
        )
        return {"cluster": {}}
    here = {**words[word], "gpus": cluster.gpus, "cpus": cluster.cpus, "memory": cluster.memory}
    if cluster.gpus:
        return {"cluster": here}
    # facts, and so no part of the plan's digest: what is measured changes no run
    facts = {**about(here), "figures": cluster.figures, "unmeasured": cluster.unmeasured}
    return {"cluster": {**here, "_about_": facts}}


def _check(part: Mapping[str, Any]) -> None:
    """Raises WordsError for invalid FLOP rates."""
    wrong = list[str]()
    for key, value in part["flops"].items():
        if key not in TYPES:
            wrong.append(f"cluster.flops.{key}={value}: there is no such type.{nearest(key, TYPES)}")
        elif not (is_number(value) and SLOWEST <= value <= FASTEST):
            wrong.append(f"cluster.flops.{key}={value}: a number from {SLOWEST:g} to {FASTEST:g}, per second.")
    if wrong:
        raise WordsError(*wrong)
