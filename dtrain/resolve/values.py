"""Checks every value against its allowed values: ALLOWED in dtrain/config/schema.py for plain keys, `allowed` in the
`_about_` of the word's file for arguments.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import constraints, files, meaning
from dtrain.config.facts import about, fact
from dtrain.config.grammar import Unread, texts
from dtrain.config.schema import ALLOWED, GROUPS, LISTS, NAMED, Config, defaults
from dtrain.config.word import cut, spelling
from dtrain.errors import PreflightError, WordsError
from dtrain.planned import Part
from dtrain.resolve.unknown import UNKNOWN
from dtrain.secrets import screen
from dtrain.storage import hub

SIGMA = 6.0
"""Default threshold of a spike for skip and rewind, in standard deviations above the mean."""


def judge(config: Config) -> dict[str, str]:
    """key -> problem, for every value that is not allowed."""
    wrong = (
        (key, value, allowed)
        for key, value, allowed in _values(config)
        if value is not UNKNOWN and (value == "???" or not constraints.fits(value, allowed))
    )
    return {key: sentence(key, value, allowed, config) for key, value, allowed in wrong}


def without(config: Config, wrong: Iterable[str]) -> Config:
    """Replace the values of these keys by UNKNOWN."""
    for key in wrong:
        top, *rest = key.split(".")
        config = replace(config, **{top: _set(getattr(config, top), rest)})
    return config


def plain(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the plain keys, and decide the spike threshold."""
    sigma = config.spike.sigma
    if sigma == "auto":
        sigma = None if config.on_spike == "stop" else SIGMA
        counts = (
            "nan and inf"
            if sigma is None
            else f"nan, inf, and {sigma:g} standard deviations above the mean of the last {config.spike.window} steps"
        )
        draft["why"]["spike"] = f"{config.on_spike} at {counts}"
    return {
        "loop": config.loop, "steps": config.steps, "stop_after": config.stop_after, "seed": config.seed,
        "clip": config.clip, "ema": config.ema,
        "on_spike": config.on_spike, "spike": {"sigma": None if sigma is None else float(sigma),
        "window": config.spike.window},
        "resume": config.resume, "init": config.init or _pretrained(config), "init_names": config.init_names,
        "fork": config.fork, "trust": tuple(config.trust), "log_every": config.log.every,
        "evaluate_every": config.evaluate.every, "evaluate_samples": config.evaluate.samples,
        "tasks": {
            "names": config.evaluate.tasks, "path": config.evaluate.tasks_path, "tokenizer": config.evaluate.tokenizer,
            "shots": config.evaluate.shots, "limit": config.evaluate.limit, "context": config.evaluate.context,
            "batch": config.evaluate.batch,
        },
        "generate": vars(config.generate).copy(),
    }  # fmt: skip


def _pretrained(config: Config) -> str | None:
    """The place of a model's pretrained weights, if it has them and no other run brings some."""
    name = fact(config.model, "weights_at")
    is_wanted = name and config.model.get("weights") == "pretrained" and config.fork is None
    if not is_wanted:
        return None
    try:
        return hub.place(str(config.model[name]))
    except PreflightError as error:
        raise WordsError(f"model.{name}={error}") from None


def _values(config: Config) -> Iterable[tuple[str, Any, Any]]:
    """(key, value, allowed values) for all keys of the config."""
    for key, allowed in ALLOWED.items():
        allowed = list(config.options[NAMED[key]]) or allowed if key in NAMED else allowed
        top, _, name = key.partition(".")
        yield key, getattr(getattr(config, top), name) if name else getattr(config, top), allowed
    for group in GROUPS:
        for path, part in parts_of(config, group):
            for name, allowed in about(part).get("allowed", {}).items():
                if name in part:
                    yield f"{path}.{name}", part[name], allowed


def parts_of(config: Config, group: str) -> list[tuple[str, Part]]:
    """(dotted key, part) of each part of a group, as far as it is known."""
    parts = getattr(config, group)
    if parts is UNKNOWN:
        return []
    return [(f"{group}.{word}", part) for word, part in parts.items()] if group in LISTS else [(group, parts)]


def sentence(key: str, value: Any, allowed: Any, config: Config) -> str:
    """The problem with a value that is not allowed, or with `???`, and what to type."""
    if value == "???":
        group, source = key.split(".")[0], config.sources.get(key)
        who = f"{source} leaves {key} to you" if source else f"{group}={config.choices[group]} needs {key}"
        typed = (
            f"{key}._target_=<package.Class>"
            if "part" in constraints.kinds(allowed)
            else f"{key}=<{constraints.say(allowed).removesuffix(', not empty')}>"
        )
        either = ", or epochs=<passes over the data>" if key == "steps" else ""
        return f"{who}. Type {typed}{either}."
    told = meaning.of_value(key, str(value))
    near, source = constraints.instead(value, allowed, _default(config, key)), source_of(config, key)
    if isinstance(value, int | float) and constraints.wants_text(value, allowed):
        near = config.numbers.get(key, spelling(value))
    more = " below 2^63" if isinstance(value, int) and abs(value) >= 2**63 else ""
    more += ", without control characters" if isinstance(value, str) and constraints.CONTROLS.search(value) else ""
    instead = f"{key}={'<another>' if near is constraints.NO_SUGGESTION else _spelt(near, allowed)}"
    if near is constraints.NO_SUGGESTION and "part" in constraints.kinds(allowed):
        instead = f"{key}._target_={value if isinstance(value, str) and '.' in value else '<package.Class>'}"
    return (
        f"{key}={cut(config.numbers.get(key, spelling(value)))} ({source}): {key} is "
        f"{constraints.say(allowed)}{more}.{meaning.hint(told or screen.typed(instead))}"
    )


def _spelt(value: Any, allowed: Any) -> str:
    """The value as it is typed; a text with quotes in a list of texts stands there as it is."""
    quoted = cut(spelling(value)) if isinstance(value, dict) else spelling(value)
    if "\\" in quoted and isinstance(value, list) and constraints.is_of_texts(allowed):
        plain = f"[{','.join(map(str, value))}]"
        with suppress(Unread):
            return plain if texts(plain) == value else quoted
    return quoted


def source_of(config: Config, key: str) -> str:
    """Where a value is from: of its key, or of the mapping that it is in."""
    names = key.split(".")
    above = [each for count in range(len(names) - 1, 0, -1) if (each := ".".join(names[:count])) not in GROUPS]
    return next((config.sources[each] for each in (key, *above) if each in config.sources), "default")


def _default(config: Config, key: str) -> Any:
    """The default of a key; None if it is not known."""
    group, *rest = key.split(".")
    word = str(rest[0] if group in LISTS else config.choices.get(group))
    value: Any = files.node(group, word) if word in files.groups().get(group, ()) else defaults().get(group)
    for name in rest[1:] if group in LISTS else rest:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value == "???" else value


def _set(holder: Any, path: list[str]) -> Any:
    if not path:
        return UNKNOWN
    inside = holder if isinstance(holder, dict) else vars(holder)
    changed = {**inside, path[0]: _set(inside[path[0]], path[1:])}
    return changed if isinstance(holder, dict) else replace(holder, **changed)
