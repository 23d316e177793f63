"""Refuses values that are each allowed but conflict with each other: sizes of a model that do not divide, a model that
does not fit its data, contradictory words, and words that nothing reads.

The `_about_` of a word lists the sizes that must divide (`multiples`) or be ordered (`at_most`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import ALLOWED, GROUPS, LISTS, Config
from dtrain.errors import WordsError
from dtrain.resolve.declared import dataset
from dtrain.resolve.unknown import UNKNOWN


def sizes(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments of each word against each other."""
    problems = [
        problem for group in GROUPS if group not in LISTS for problem in _divided(group, getattr(config, group))
    ]
    if problems:
        raise WordsError(*problems)
    return {}


def data(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Check the model against the data."""
    part, given = config.model, draft["data"]
    vocab = given.get("vocab") if about(part).get("takes") == "tokens" else None
    if given.get("tokenizer") == "bytes":
        vocab = 256
    problems = []
    if isinstance(part.get("vocab"), int) and isinstance(vocab, int) and part["vocab"] < vocab:
        problems.append(f"model.vocab={part['vocab']}: the data has tokens up to {vocab - 1}. Type model.vocab=auto.")
    made, stated = about(given).get("gives") == "any", dataset(given.get("dataset"))
    if stated:
        problems += _stated(config, stated, alike=bool(about(draft["objective"]).get("alike")))
    if made and about(part).get("takes") in ("image", "features"):
        problems += _shapes(part, given)
    whole = given.get("inputs") if made else None
    if not made and not given.get("inputs"):
        whole = stated.get("inputs")
    shape = whole if part.get("inputs") == "auto" else part.get("inputs")
    if about(part).get("halves") and isinstance(shape, list) and len(shape) == 3:
        problems += _reduced(part, shape)
    if problems:
        raise WordsError(*problems)
    return {}


def contradictions(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse contradictory words, and words on the command line that nothing reads."""
    typed = {key for key, source in config.sources.items() if source == "command line"}
    problems = []
    if config.resume == "must" and config.init is not None:
        problems.append(
            f"resume=must continues with the weights of this run, but init={config.init} starts from others. "
            "Type resume=auto, or leave init out."
        )
    if config.fork is not None:
        problems += _fork(config)
    if config.stop_after is not None and config.stop_after > draft["steps"] and "stop_after" in typed:
        problems.append(
            f"stop_after={config.stop_after} is never reached: steps={draft['steps']}. Type "
            f"stop_after={draft['steps']}, or more steps."
        )
    for name in ("warmup", "decay"):
        length: Any = config.schedule.get(name)
        if f"schedule.{name}" in typed and isinstance(length, int | float) and length > draft["steps"]:
            problems.append(
                f"schedule.{name}={length} is longer than steps={draft['steps']}. Type schedule.{name}=0.1 for a "
                "tenth of the run."
            )
    problems += _unread(config, typed)
    if problems:
        raise WordsError(*problems)
    return {}


def _fork(config: Config) -> Iterable[str]:
    """Check the run that training goes on from against where its own weights come from."""
    fork = f"fork={config.fork}"
    if config.resume == "must":
        yield f"resume=must continues this run, but {fork} continues another. Type resume=auto, or leave fork out."
    if config.init is not None:
        yield f"{fork} brings the weights of that run, but so does init={config.init}. Leave one of them out."
    if config.out is not None and str(config.fork).split("/checkpoints/")[0].rstrip("/") == config.out.rstrip("/"):
        yield (
            f"{fork} is this run: out={config.out}. Leave fork out to continue it, or type out=<another place> to "
            "fork it."
        )


def _divided(group: str, part: Any) -> Iterable[str]:
    if part is UNKNOWN:
        return
    for name, factors in about(part).get("multiples", {}).items():
        sizes = {str(factor): part.get(factor) if isinstance(factor, str) else factor for factor in factors}
        whole = math.prod(size for size in sizes.values() if isinstance(size, int))
        size = part.get(name)
        if isinstance(size, int) and whole and size % whole:
            product = " x ".join(
                f"{group}.{factor}={size}" if not factor.isdecimal() else factor for factor, size in sizes.items()
            )
            yield (
                f"{group}.{name}={size} is no multiple of {product}. Type "
                f"{group}.{name}={max(1, round(size / whole)) * whole}."
            )
    for name, most in about(part).get("at_most", {}).items():
        size, limit = part.get(name), part.get(most)
        if isinstance(size, int) and isinstance(limit, int) and size > limit:
            yield f"{group}.{name}={size} is more than {group}.{most}={limit}. Type {group}.{name}={limit}."


def _shapes(part: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[str]:
    """Check the model against synthetic data, whose shapes the config sets."""
    wanted, have = part.get("inputs"), given.get("inputs")
    if isinstance(have, list) and about(part).get("takes") == "image" and len(have) != 3:
        yield f"data.inputs={have}: the model takes images. Type data.inputs=[1,8,8]."
    elif isinstance(have, list) and wanted not in (None, "auto"):
        numbers = math.prod(wanted) if isinstance(wanted, list) else wanted
        if math.prod(have) != numbers:
            yield f"model.inputs={wanted}: a sample of the data has the shape {have}. Type model.inputs=auto."
    outputs, classes = part.get("outputs"), given.get("outputs")
    few = (
        isinstance(outputs, int)
        and isinstance(classes, int)
        and (outputs < classes or (given["task"] == "regression" and outputs != classes))
    )
    if few:
        yield f"model.outputs={outputs}: the data has {classes}. Type model.outputs=auto."


def _stated(config: Config, stated: Mapping[str, Any], *, alike: bool) -> Iterable[str]:
    """Check the model against a dataset whose class states its number of classes or its shapes. `alike`: outputs and
    targets must have the same shape.
    """
    part, takes, asked = config.model, about(config.model).get("takes"), config.data.get("outputs")
    classes, have = stated.get("outputs", 0), None if config.data.get("inputs") else stated.get("inputs")
    if isinstance(asked, int) and 1 < asked < classes:
        yield f"data.outputs={asked}: the dataset has {classes} classes. Type data.outputs={classes}, or leave it out."
        return
    for name in ("outputs", "vocab"):
        if takes and isinstance(part.get(name), int) and part[name] < (asked or classes):
            yield f"model.{name}={part[name]}: the data has {asked or classes}. Type model.{name}=auto."
    gives = part["outputs"] if isinstance(part.get("outputs"), int) else asked or classes
    if (
        alike
        and takes
        and gives
        and "targets" in stated
        and config.data.get("targets") in (None, 1)
        and gives != math.prod(stated["targets"])
    ):
        count = math.prod(stated["targets"])
        yield (
            f"objective={config.choices['objective']}: the model outputs {gives} numbers, but a target of the data "
            f"has {count}. Type data.outputs={count}, or objective=classification."
        )
    wanted = part.get("inputs")
    if have is not None and takes in ("image", "features") and wanted not in (None, "auto"):
        sizes = wanted if isinstance(wanted, list) else [wanted]
        if sizes != have if takes == "image" else math.prod(sizes) != math.prod(have):
            yield f"model.inputs={wanted}: a sample of the data has the shape {have}. Type model.inputs=auto."


def _reduced(part: Mapping[str, Any], shape: list[int]) -> Iterable[str]:
    """Check the image that reaches each stage, as every stage after the first halves it: group norm of a group of one
    number is zero and has no gradient.
    """
    for stage in range(part["stages"]):
        channels, sides = part["width"] * 2**stage, [-(-side // 2**stage) for side in shape[1:]]
        if channels // math.gcd(channels, 8) * math.prod(sides) < 2:
            yield (
                f"model.stages={part['stages']} model.width={part['width']}: stage {stage + 1} has one number "
                f"per group of channels of an image {shape}, which group norm makes zero. Type "
                + (
                    f"model.stages={stage}, or model.width={8 * part['width']}."
                    if stage
                    else f"model.width={16 * part['width']}, or larger images."
                )
            )
            return


def _unread(config: Config, typed: set[str]) -> Iterable[str]:
    spikes = config.on_spike != "stop" or config.spike.sigma not in ("auto", None)
    text = bool(about(config.data).get("text"))
    for key, read, hint in (
        *(
            (key, False, "Type -m for a sweep" + ", out=<folder> for a run" * (key == "sweep.out"))
            for key in ALLOWED
            if key.startswith("sweep.")
        ),
        ("spike.window", spikes, "Type on_spike=skip or spike.sigma=6 as well"),
        *((f"generate.{name}", text, "Type data=text") for name in ("prompt", "tokens", "temperature")),
    ):
        if key in typed and not read:
            yield f"{key}: nothing in this run reads it. {hint}, or leave {key} out."
