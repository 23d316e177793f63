"""Refuses values that are each allowed but conflict with each other: sizes of a model that do not divide, a model that
does not fit its data, contradictory words, and words that nothing reads.

The `_about_` of a word lists the sizes that must divide (`multiples`) or be ordered (`at_most`), and arguments that
are read `only_with` a value of another.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import ALLOWED, GROUPS, LISTS, Config
from dtrain.config.word import typed_at
from dtrain.resolve.declared import dataset
from dtrain.resolve.unknown import UNKNOWN


def sizes(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check the arguments of each word against each other."""
    for group in GROUPS:
        part = getattr(config, group)
        if group not in LISTS and part is not UNKNOWN:
            yield from _sizes_of(group, part)


def data(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check the model against the data."""
    part, source = config.model, draft["data"]
    vocab = source.get("vocab") if about(part).get("takes") == "tokens" else None
    if source.get("tokenizer") == "bytes":
        vocab = 256
    if isinstance(part.get("vocab"), int) and isinstance(vocab, int) and part["vocab"] < vocab:
        yield f"model.vocab={part['vocab']}: the data has tokens up to {vocab - 1}. Type model.vocab=auto."
    made, stated = about(source).get("gives") == "any", dataset(source.get("dataset"))
    if stated:
        yield from _stated(config, stated, alike=bool(about(draft["objective"]).get("alike")))
    if made and about(part).get("takes") in ("image", "features"):
        yield from _shapes(part, source)
    shape = part.get("inputs")
    if shape == "auto" and made:
        shape = source.get("inputs")
    elif shape == "auto" and not source.get("inputs"):
        shape = stated.get("inputs")
    if about(part).get("halves") and isinstance(shape, list) and len(shape) == 3:
        yield from _reduced(part, shape)


def contradictions(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Refuse contradictory words, and words on the command line that nothing reads."""
    typed = {key for key, source in config.sources.items() if source == typed_at()}
    if config.resume == "must" and config.init is not None:
        yield (
            f"resume=must continues with the weights of this run, but init={config.init} starts from others. "
            "Type resume=auto, or leave init out."
        )
    if config.init_names is not None and config.init is None:
        yield "init_names says what the tensors at init are called, but there is no init. Type init=<a checkpoint>."
    if config.fork is not None:
        yield from _fork(config)
    yield from _adapter(config, draft)
    if config.stop_after is not None and config.stop_after > draft["steps"] and "stop_after" in typed:
        yield (
            f"stop_after={config.stop_after} is never reached: steps={draft['steps']}. Type "
            f"stop_after={draft['steps']}, or more steps."
        )
    for name in ("warmup", "decay"):
        length: Any = config.schedule.get(name)
        if f"schedule.{name}" in typed and isinstance(length, int | float) and length > draft["steps"]:
            yield (
                f"schedule.{name}={length} is longer than steps={draft['steps']}. Type schedule.{name}=0.1 for a "
                "tenth of the run."
            )
    yield from _unread(config, typed)


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


def _adapter(config: Config, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check what an adapter is added to."""
    if about(config.adapter).get("trains") != "adapter":
        return
    word = f"adapter={config.word('adapter')}"
    if config.adapter.get("targets") == []:
        yield (
            "adapter.targets=[] selects no layer, so nothing would be trained. Type adapter.targets=null for all those "
            "of the blocks."
        )
    if config.model.get("freeze"):
        yield f"{word} trains nothing but the adapter, so model.freeze has nothing to freeze. Leave model.freeze out."
    if about(draft["precision"]).get("flops") == "fp8":
        yield f"precision=fp8 replaces the linear layers that {word} changes. Type precision=bf16."


def _sizes_of(group: str, part: Any) -> Iterable[str]:
    for name, factors in about(part).get("multiples", {}).items():
        sizes = {str(factor): part.get(factor) if isinstance(factor, str) else factor for factor in factors}
        whole = math.prod(size for size in sizes.values() if isinstance(size, int))
        size = part.get(name)
        if isinstance(size, int) and whole and size % whole:
            product = " x ".join(
                f"{group}.{factor}={size}" if not factor.isdecimal() else factor for factor, size in sizes.items()
            )
            near = max(1, round(size / whole)) * whole
            yield f"{group}.{name}={size} is no multiple of {product}. Type {group}.{name}={near}."
    for name, most in about(part).get("at_most", {}).items():
        size, limit = part.get(name), part.get(most)
        if isinstance(size, int) and isinstance(limit, int) and size > limit:
            yield f"{group}.{name}={size} is more than {group}.{most}={limit}. Type {group}.{name}={limit}."
    for name, others in about(part).get("only_with", {}).items():
        for other, wanted in others.items():
            if part.get(name) and part.get(other) != wanted:
                yield (
                    f"{group}.{name}={part[name]}: nothing reads it with {group}.{other}={part.get(other)}. Type "
                    f"{group}.{other}={wanted}, or leave {group}.{name} out."
                )


def _shapes(part: Mapping[str, Any], source: Mapping[str, Any]) -> Iterable[str]:
    """Check the model against synthetic data, whose shapes the config sets."""
    wanted, have = part.get("inputs"), source.get("inputs")
    if isinstance(have, list) and about(part).get("takes") == "image" and len(have) != 3:
        yield f"data.inputs={have}: the model takes images. Type data.inputs=[1,8,8]."
    elif isinstance(have, list) and wanted not in (None, "auto"):
        numbers = math.prod(wanted) if isinstance(wanted, list) else wanted
        if math.prod(have) != numbers:
            yield f"model.inputs={wanted}: a sample of the data has the shape {have}. Type model.inputs=auto."
    outputs, classes = part.get("outputs"), source.get("outputs")
    if not isinstance(outputs, int) or not isinstance(classes, int):
        return
    if outputs < classes or (source["task"] == "regression" and outputs != classes):
        yield f"model.outputs={outputs}: the data has {classes}. Type model.outputs=auto."


def _stated(config: Config, stated: Mapping[str, Any], *, alike: bool) -> Iterable[str]:
    """Check the model against a dataset whose class states its number of classes or its shapes. `alike`: outputs and
    targets must have the same shape.
    """
    part, takes, asked = config.model, about(config.model).get("takes"), config.data.get("outputs")
    classes = 0 if alike else stated.get("outputs", 0)
    have = None if config.data.get("inputs") else stated.get("inputs")
    if isinstance(asked, int) and 1 < asked < classes:
        yield f"data.outputs={asked}: the dataset has {classes} classes. Type data.outputs={classes}, or leave it out."
        return
    for name in ("outputs", "vocab"):
        if takes and isinstance(part.get(name), int) and part[name] < (asked or classes):
            yield f"model.{name}={part[name]}: the data has {asked or classes}. Type model.{name}=auto."
    gives = part["outputs"] if isinstance(part.get("outputs"), int) else asked or classes
    count = math.prod(stated.get("targets", ()))
    known = "targets" in stated and config.data.get("targets") in (None, 1)
    if alike and takes and gives and known and gives != count:
        yield (
            f"objective={config.word('objective')}: the model outputs {gives} numbers, but a target of the data "
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
            instead = f"model.stages={stage}, or model.width={8 * part['width']}."
            if not stage:
                instead = f"model.width={16 * part['width']}, or larger images."
            yield (
                f"model.stages={part['stages']} model.width={part['width']}: stage {stage + 1} has one number "
                f"per group of channels of an image {shape}, which group norm makes zero. Type {instead}"
            )
            return


def _unread(config: Config, typed: set[str]) -> Iterable[str]:
    spikes = config.on_spike != "stop" or config.spike.sigma not in ("auto", None)
    hints = dict.fromkeys((key for key in ALLOWED if key.startswith("sweep.")), "Type -m for a sweep")
    hints["sweep.out"] += ", out=<folder> for a run"
    if not spikes:
        hints["spike.window"] = "Type on_spike=skip or spike.sigma=6 as well"
    if config.stop.metric is None:
        hints |= dict.fromkeys(("stop.patience", "stop.least", "stop.best_is"), "Type stop.metric=eval_loss as well")
    if not about(config.data).get("text"):
        hints |= {key: "Type data=text" for key in ALLOWED if key.startswith("generate.")}
    elif not about(config.data).get("chat") and config.generate.chat is True:
        hints["generate.chat"] = "Type data=chat"
    for key, hint in hints.items():
        if key in typed:
            yield f"{key}: nothing in this run reads it. {hint}, or leave {key} out."
