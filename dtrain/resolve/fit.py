"""Checks that data, model and objective fit together, and fills in values that depend on several groups."""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import constraints
from dtrain.config.facts import about, fact
from dtrain.config.patterns import RATES, select
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.planned import Part, Plan
from dtrain.predict import formulas
from dtrain.predict.shapes import trained_names
from dtrain.resolve.declared import figures, may_have
from dtrain.resolve.ranks import choose
from dtrain.resolve.sets import is_of_a_set, measured_on

DECODED = "decoder_input_ids"
PARTS = ("remat", "model", "adapter", "schedule")
NATURAL = {"tokens": "next_token", "image": "classification", "features": "regression"}
"""Kind of the model's input (or of the data) -> the objective that `auto` means."""


def objective(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose next_token for tokens, classification for images and labelled samples, regression for features."""
    gives, takes = about(config.data).get("gives", "samples"), about(config.model).get("takes")
    takes = takes or (_reads(config) if gives == "any" else None)
    word = NATURAL.get(takes or "features", "regression")
    if gives == "tokens":
        word = "next_token"
    elif gives == "samples" and takes != "tokens":
        word = "classification"
    reason = f"the data gives {gives}, the model takes {takes or 'anything'}"
    part = choose(config, "objective", word, draft["why"], reason)
    needs, whole = about(part).get("needs"), about(part).get("whole")
    if gives == "any" and "reads" in about(config.model) and not whole:
        _check_made(config, part)
    model, data, chosen = map(config.word, ("model", "data", "objective"))
    if gives == "tokens" and takes not in (None, "tokens"):
        raise WordsError(
            f"model={model} takes {takes}, data={data} gives tokens. Type model=gpt, or data=synthetic or data=dataset."
        )
    if gives == "any" and takes == "tokens" and needs != "tokens" and not (whole and "reads" in about(config.model)):
        raise WordsError(
            f"model={model} gives one answer per token, objective={chosen} wants one per sample. "
            "Type objective=next_token."
        )
    if gives == "tokens" and whole and part.get("over") == "next_tokens":
        raise WordsError(
            f"objective.over=next_tokens: the model shifts its labels, and data={data} gives the next token. Type "
            "objective=next_token."
        )
    if gives == "tokens" and needs != "tokens" and not whole:
        raise WordsError(
            f"objective={chosen} wants one answer per sample, data={data} gives tokens. Type objective=next_token."
        )
    if needs == "tokens" and takes not in (None, "tokens"):
        raise WordsError(
            f"objective={chosen} needs a model of tokens, model={model} takes {takes}. Type model=gpt, or "
            "objective=classification."
        )
    return {"objective": _with_figures(part, eval_loss="lowest")}


def tokens(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check what an objective of tokens, or of none, gets from the data."""
    part, data = draft["objective"], config.data
    needs = about(part).get("needs") == "tokens"
    chosen = about(part).get("task") if config.choices["objective"] == "auto" else config.word("objective")
    is_known = "figures" in about(part) and not about(part).get("whole")
    if data.get("shift") is True and is_known and not needs:
        yield (
            f"data.shift=true makes the next token the target, but objective={chosen} predicts none. Type "
            "objective=next_token."
        )
    inputs = data.get("inputs")
    named = [inputs] if isinstance(inputs, str) else inputs
    has_none = about(data).get("gives") == "tokens" or (isinstance(named, list | tuple) and DECODED not in named)
    if config.model.get("task") == "seq2seq" and is_known and needs and has_none:
        yield (
            f"model.task=seq2seq objective={chosen}: nothing in the data is the input of the decoder. Type "
            "objective=own, with which the model makes it of its labels"
            + ("" if named is None else f", or data.inputs=[{','.join(map(str, named))},{DECODED}]")
            + "."
        )


def _reads(config: Config) -> str | None:
    """The kind of input of the model, which may depend on its task; None if it is not known."""
    stated = about(config.model)
    kind: str | None = stated.get("takes") or stated.get("reads", {}).get(config.model.get("task"))
    return kind


def _check_made(config: Config, part: Part) -> None:
    """Raises WordsError if synthetic data has nothing for the task of a model of several."""
    model, reads, auto = config.model, _reads(config), config.choices["objective"] == "auto"
    subject = f"model={config.word('model')} model.task={model.get('task')}"
    if reads == "tokens" and (model["task"] != "causal_lm" if auto else about(part).get("needs") != "tokens"):
        raise WordsError(
            f"{subject}: data={config.word('data')} makes no text with such targets. Type data=jsonl "
            "data.path=<rows with tokens>, or for masked_lm objective=masked data=text data.tokenizer=<its tokenizer>."
        )
    if reads == "image" and config.data.get("inputs") == "auto":
        raise WordsError(
            f"{subject}: the size of its images is in its config.json. Type data.inputs=[3,224,224], with that size, "
            "and data.outputs=<classes>."
        )


def together(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check the layout for a loss that is no sum over targets: it needs whole samples, and the same number of them on
    every mesh.
    """
    part, mesh, batch = draft["objective"], draft["mesh"], draft["batch"]
    weights = [f"objective.losses.{name}={weight}" for name, weight in (part.get("losses") or {}).items() if weight]
    if not about(part).get("whole") and not weights:
        if part.get("together") is not None:
            yield (
                f"objective.together={part['together']}: nothing in this run reads it. Leave it out, or type "
                "microbatch."
            )
        return
    subject = weights[0] if weights else f"objective={config.word('objective')}"
    size, pad = part.get("together") or batch.size, config.data.get("pad")
    for axis in ("pp", "cp"):
        if getattr(mesh, axis) > 1:
            yield (
                f"{subject}: the model computes it from whole samples, and mesh.{axis}={getattr(mesh, axis)} splits "
                f"them. Leave mesh.{axis} out."
            )
    if not weights and config.tensor.loss == "split":
        yield (
            f"{subject}: with tensor.loss=split no rank has the full logits that the model's own loss needs. Leave "
            "tensor.loss out."
        )
    if batch.microbatch != size:
        count = f"{batch.microbatch} samples together, not {size}"
        if part.get("together") is None:
            count = f"{batch.microbatch} of {size} samples together"
        yield (
            f"{subject}: such a loss may depend on which samples a forward sees together, and here it sees {count}. "
            f"Type objective.together={batch.microbatch}: the same numbers on every mesh with that microbatch."
        )
    elif pad is not None and config.data.get("length") is None and (size < batch.size or config.data.get("workers")):
        yield (
            f"data.pad={pad}: rows are filled up to the longest of those that a rank reads at once, "
            f"which differs from mesh to mesh, and {subject} may depend on it. Type data.length=<the longest row>."
        )


def synthetic(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Set the task and input shape of synthetic data to what this run needs."""
    data = dict(config.data)
    if about(data).get("gives") == "any":
        task = fact(draft["objective"], "task")
        if data.get("task") == "auto":
            data["task"] = task if task else NATURAL.get(_reads(config) or "features", "regression")
        if data.get("inputs") == "auto":
            data["inputs"] = [1, 8, 8] if about(config.model).get("takes") == "image" else [64]
        if task and data["task"] != task:
            raise WordsError(
                f"data.task={data['task']}: the objective of this run is {task}. Type objective={data['task']}, or "
                "leave data.task out."
            )
    return {"data": _seeded(data, config.seed)}


def _seeded(data: Part, seed: int) -> Part:
    """The data, in which a seed that is `auto` is that of the run, also in the sources of a mixture."""
    name = about(data).get("parts")
    if name:
        data = {**data, name: {source: _seeded(part, seed) for source, part in data[name].items()}}
    return {**data, "seed": seed} if data.get("seed") == "auto" else data


def _with_figures(part: Part, **known: str) -> Part:
    """Add to a part the figures that its class states and the `known` ones, so that the plan holds them."""
    stated = {**known, **figures(part)}
    return {**part, "_about_": {**about(part), "figures": stated}} if stated else part


def hooks(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Choose `sample` for text data when `hook` is auto; refuse a hook that needs text if the data has none."""
    text = bool(about(config.data).get("text"))
    chosen = {name: dict(part) for name, part in config.hook.items()}
    if config.choices["hook"] == "auto":
        chosen = {name: {**config.options["hook"].get(name, {}), **part} for name, part in chosen.items()}
        writes = not about(config.objective).get("masks")  # else the model reads both directions and continues nothing
        if text and writes and not about(config.data).get("chat"):  # its prompt is no message of a user
            chosen.setdefault("sample", dict(config.options["hook"]["sample"]))
            draft["why"]["hook"] = f"{', '.join(chosen)} (auto: the data is text)"
    refused = [name for name, part in chosen.items() if about(part).get("needs") == "text" and not text]
    if refused:
        raise WordsError(f"hook={refused[0]} needs text, data={config.word('data')} has none. Type hook=[].")
    if about(config.objective).get("masks") and any(about(part).get("needs") == "text" for part in chosen.values()):
        raise WordsError(
            f"hook={', '.join(chosen)}: objective={config.word('objective')} trains a model that reads both "
            "directions, and continues no text. Type hook=[]."
        )
    return {"hooks": {name: _with_figures(part) for name, part in chosen.items()}}


def checkpoint(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Decide whether the lowest or highest value of `checkpoint.best` is the best: its objective or hook states it, or
    the user must.
    """
    part = dict(config.checkpoint)
    best, best_is = part.get("best"), None if part.get("best_is") == "auto" else part.get("best_is")
    measured, hooks = figures(draft["objective"]), draft["hooks"].values()
    averaged = {name.replace("eval_", "eval_ema_", 1): which for name, which in measured.items()} if config.ema else {}
    known = {**{name: which for hook in hooks for name, which in figures(hook).items()}, **measured, **averaged}
    if best is None and best_is is not None:
        raise WordsError(
            f"checkpoint.best_is={best_is}: nothing in this run reads it. Type checkpoint.best=<a figure> too, or "
            "leave it out."
        )
    if best is not None and best not in known and not may_have(best, config.objective, *config.hook.values()):
        raise WordsError(
            f"checkpoint.best={best}: the evaluation of this run has no such figure.{nearest(best, known)}"
        )
    holdouts = {name: value for name, value in config.data.items() if name.startswith("holdout")}
    if best is not None and is_of_a_set(best, draft["evaluate_sets"]):
        holdouts = {}
    if best in {**measured, **averaged} and holdouts and not any(holdouts.values()):
        typed = measured_on("checkpoint.best", str(best), draft["evaluate_sets"], holdouts)
        raise WordsError(f"checkpoint.best={best}: nothing is held out to measure it on. Type {typed}.")
    if best is not None and best_is is None and best not in known:
        raise WordsError(
            f"checkpoint.best={best}: neither the objective nor a hook says whether its lowest or highest value is the "
            "best. Type checkpoint.best_is=lowest or highest."
        )
    if best is not None and best in known and best_is not in (None, known[best]):
        raise WordsError(
            f"checkpoint.best_is={best_is}: of {best} the {known[best]} is the best. Leave checkpoint.best_is out."
        )
    if "best_is" in part:
        part["best_is"] = best_is or known.get(best or "", "lowest")
    return {"checkpoint": part}


def optim(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Check the learning rates by pattern. Choose the type of an optimizer's matrix products: on a GPU that of the
    model; on the CPU fp32, as 16-bit types are slower there and their results depend on the mesh.
    """
    part = dict(config.optim)
    for pattern, rate in (part.get("lr_of") or {}).items() if about(part).get("allowed", {}).get("lr_of") else ():
        if not constraints.fits(rate, "number >= 0"):
            raise WordsError(
                f"optim.lr_of: the lr of {pattern} is {rate}, not a number >= 0. Type optim.lr_of={{{pattern}: 1e-4}}."
            )
    if part.get("products") == "auto":
        word, reason = "fp32", "on the CPU"
        if draft["device"] == "cuda":
            reason = "as the precision, on a GPU"
            if about(draft["precision"]).get("compute") == "bf16":
                word = "bf16"
        part["products"], draft["why"]["optim.products"] = word, f"{word} (auto: {reason})"
    return {"optim": part}


def rates(plan: Plan) -> None:
    """Raises WordsError for a pattern of optim.lr_of that fits no parameter, where a formula has their names."""
    patterns = plan.optim.get("lr_of") if about(plan.optim).get("allowed", {}).get("lr_of") else None
    shapes = formulas.shapes(plan) if patterns else None
    if patterns and shapes:
        select(trained_names(shapes), [*patterns], *RATES)


def parts(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the parts that no rule changes."""
    return {group: dict(getattr(config, group)) for group in PARTS} | {
        "loggers": {name: dict(part) for name, part in config.logger.items()}
    }
