"""Completes the sources of a mixture: each is a word of `data` with its arguments, checked as one alone would be."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.config import constraints, files
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.errors import nearest
from dtrain.planned import Part
from dtrain.resolve.own import with_stated
from dtrain.resolve.unknown import UNKNOWN
from dtrain.resolve.values import sentence

SHARED = ("sequence", "tokenizer")
"""Arguments of a mixture that are those of all its sources."""
LEAST = 1e-5
"""The smallest share of a source."""


def composed(config: Config) -> tuple[Config, list[str]]:
    """The config with the sources of a mixture as parts, and its facts; and a sentence for each mistake in them, of
    which none is left in the config: its data is then UNKNOWN.
    """
    data: Any = config.data
    if data is UNKNOWN or not about(data).get("parts"):
        return config, []
    name = about(data)["parts"]
    of, problems = data[name], list[str]()
    if not isinstance(of, Mapping) or not of:
        problems.append(
            f"data.{name} names no source. Type 'data.{name}={{a: {{data: <word>, path: <files>}}, b: ...}}'."
        )
        return replace(config, data=UNKNOWN), problems
    shared = {key: data[key] for key in SHARED if data[key] is not None}
    parts = {source: _part(f"data.{name}.{source}", given, shared, config, problems) for source, given in of.items()}
    problems += _weights(data["weights"], list(of))
    if not problems:
        data, wrong = _whole(data, name, parts)
        problems += wrong
    return replace(config, data=UNKNOWN if problems else data), problems


def _part(key: str, given: Any, shared: Mapping[str, Any], config: Config, problems: list[str]) -> Part:
    """The part of one source: the arguments of its word, or a class of the user's own."""
    facts = {word: about(files.node("data", word)) for word in files.groups()["data"]}
    words = [word for word, about_ in facts.items() if not about_.get("parts") and not about_.get("replayed")]
    if isinstance(given, Mapping) and "_target_" in given:
        stated: Part = with_stated("data", given)
        return stated
    word = given.get("data") if isinstance(given, Mapping) else None
    if word not in words:
        if word is None:
            problems.append(f"{key} does not say which data it is. Type {key}.data=<{', '.join(words)}>.")
        else:
            problems.append(f"{key}.data={word}: there is no such source for a mixture.{nearest(str(word), words)}")
        return {}
    part = files.node("data", word)
    names = [name for name in part if name[0] != "_"]
    for name in given:
        if name != "data" and name not in names:
            problems.append(f"{key}.{name}: data={word} has no {name}.{nearest(name, names)}")
    part |= {name: value for name, value in shared.items() if name in part}
    part |= {name: value for name, value in given.items() if name in names}
    for name, allowed in about(part).get("allowed", {}).items():
        if part[name] == "???" or not constraints.fits(part[name], allowed):
            problems.append(misfit(key, name, word, value=part[name], allowed=allowed, config=config))
    if part.get("pad") is not None and part.get("length") is None:
        problems.append(f"{key}.pad: rows of several sources need one length. Type {key}.length=<the longest row>.")
    for name in ("task", "inputs"):
        if part.get(name) == "auto" and (name == "task" or part["task"] != "next_token"):
            problems.append(f"{key}.{name}=auto: a source of a mixture says it. Type {key}.{name}=<another>.")
    return part


def misfit(key: str, name: str, word: str, value: Any, allowed: Any, config: Config) -> str:
    """The problem with an argument of data beside that of the run."""
    if value == "???":
        what = constraints.say(allowed).removesuffix(", not empty")
        return f"{key}: data={word} needs {name}. Type {key}.{name}=<{what}>."
    return sentence(f"{key}.{name}", value, allowed, config)


def _weights(weights: Any, names: list[str]) -> list[str]:
    """Mistakes in the weights."""
    if not isinstance(weights, Mapping):
        return []  # the constraint says so
    example = f"'data.weights={{{', '.join(f'{name}: 1' for name in names)}}}'"
    problems = [
        f"data.weights.{name}: data.of has no {name}.{nearest(str(name), names)}"
        for name in weights
        if name not in names
    ]
    if missing := [name for name in names if name not in weights]:
        return [*problems, f"data.weights gives {', '.join(missing)} no weight. Type {example}."]
    for name in names:
        weight = weights[name]
        if not constraints.is_number(weight) or weight <= 0:
            problems.append(
                f"data.weights.{name}={weight}: a weight is a number above 0. Type data.weights.{name}=<number>, or "
                f"leave {name} out of data.of."
            )
    if not problems:
        total = sum(weights.values())
        problems = [
            f"data.weights.{name}={weights[name]} is less than {LEAST:g} of all. Give {name} more, or leave it out."
            for name in names
            if weights[name] / total < LEAST
        ]
    return problems


def _whole(data: Part, name: str, parts: Mapping[str, Part]) -> tuple[Part, list[str]]:
    """The mixture with facts that all its sources share, and the problems with those that they do not."""
    problems, first = list[str](), next(iter(parts))
    gives = {source: _gives(part) for source, part in parts.items()}
    for source, kind in gives.items():
        if kind != gives[first]:
            problems.append(
                f"data.{name}: {first} gives {gives[first]}, {source} gives {kind}. A mixture has one kind."
            )
    whole = dict(data)
    for key in SHARED:
        said = {source: part[key] for source, part in parts.items() if part.get(key) is not None}
        if len({*said.values()}) > 1:
            each = ", ".join(f"{source} {value}" for source, value in said.items())
            problems.append(
                f"data.{name}: the sources have different values of {key} ({each}). "
                f"Type data.{key}=<one of them> for all, without those of the sources."
            )
        whole[key] = next(iter(said.values()), None)
    facts = {key: value for key, value in about(data).items() if key not in ("gives", "dense", "text")}
    every = [about(part) for part in parts.values()]
    facts |= {"gives": gives[first], "dense": all(each.get("dense") for each in every)}
    facts |= {"text": all(each.get("text") for each in every)}
    facts |= {"loading": max((each.get("loading", "step") for each in every), key=("thread", "block", "step").index)}
    vocabularies = {key: value for each in every for key, value in (each.get("vocab_of") or {}).items()}
    if facts["text"]:
        facts["vocab_of"] = vocabularies
    return {**whole, name: parts, "_about_": facts}, problems


def _gives(part: Part) -> str:
    gives = str(about(part).get("gives", "samples"))
    return gives if gives != "any" else {"next_token": "tokens"}.get(str(part.get("task")), "samples")
