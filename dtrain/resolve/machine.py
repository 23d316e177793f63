"""The machine a run is planned for: the one that is here, or another that `cluster` names, of which all rules then see
GPUs, cores and memory.
"""

from collections.abc import Mapping
from typing import Any

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.config.constraints import is_number
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.resolve import values

TYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


def named(config: Config, here: Cluster) -> Cluster:
    """The machine as rules see it. Figures that are none are told by numbers.judge, and no rule builds on them."""
    if config.choices["cluster"] == "auto" or not config.cluster:
        return here
    known = values.without(config, [key for key in values.judge(config) if key.startswith("cluster.")])
    there: Cluster = build(known.cluster).seen(here)
    return there


def machine(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Its figures; of `auto`, those of the word whose GPU is here, or the cores that are."""
    if config.choices["cluster"] != "auto":
        _check(config.cluster)
        return {"cluster": dict(config.cluster)}
    words = {word: part for word, part in config.options["cluster"].items() if part}
    found = next((word for word, part in words.items() if part["gpu"] and part["gpu"] in cluster.gpu), None)
    if cluster.gpus and found is None:
        draft["why"]["cluster"] = (
            f"not known (auto: {cluster.gpu or 'a GPU without a name'} is no word of this group); no times are "
            "predicted"
        )
        return {"cluster": {}}
    word = found or "laptop"
    here = {"gpus": cluster.gpus, "cpus": cluster.cpus, "memory": cluster.memory}
    draft["why"]["cluster"] = (
        f"{word} (auto: {cluster.gpus} x {cluster.gpu})"
        if found
        else f"{word} (auto: {cluster.cpus} cores and no GPU here)"
    )
    return {"cluster": {**words[word], **here}}


def _check(part: Mapping[str, Any]) -> None:
    """Raises WordsError for peaks that are none."""
    wrong = [
        f"cluster.flops.{key}={value}: "
        f"{'a number > 0, per second.' if key in TYPES else f'there is no such type.{nearest(key, TYPES)}'}"
        for key, value in part["flops"].items()
        if key not in TYPES or not (is_number(value) and value > 0)
    ]
    if wrong:
        raise WordsError(*wrong)
