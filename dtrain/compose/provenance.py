"""Who set each value of a run, and what it overrode: the command line, a recipe, a default with its line, or a rule of
resolve.

See it with `dtrain plan why strategy=fsdp devices=2`, or for some keys alone with `dtrain plan why optim mesh
strategy=fsdp devices=2`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from dtrain import recipe, secrets
from dtrain.compose import layers
from dtrain.config import files
from dtrain.config.schema import GROUPS, LISTS, Config, Schema
from dtrain.config.word import Word, text
from dtrain.planned import Plan
from dtrain.secrets import patterns, screen

RULES = {
    "mesh": "resolve: the axes share out the ranks",
    "microbatch": "resolve: batch = microbatch x data ranks x accumulate",
    "accumulate": "resolve: batch = microbatch x data ranks x accumulate",
    "out": "resolve: named after the words",
    "device": "resolve: what is here",
    "threads": "resolve: cores for each rank",
}
"""The source of decisions for which `auto` gave no reason."""
MOST_NAMED = 5
"""Most arguments that one note names."""
LINE = re.compile(r"(.+\.ya?ml):\d+")
"""Source of a value in a recipe, with its line."""
LONGEST = 48
"""Length at which a shown value is cut, in characters."""


@dataclass(frozen=True)
class Row:
    """One value of a run. `overrode` holds the (value, source) pairs that it replaced, newest first."""

    key: str
    value: Any
    source: str
    overrode: tuple[tuple[str, str], ...] = ()


# while composing


def untold(words: Iterable[Word]) -> Iterator[str]:
    """One sentence for each secret of a saved run that must be given again, or for a placeholder that stands under
    another secret's key.
    """
    for word in words:
        for key, owner in secrets.places(word.value, word.key):
            if owner == key:
                yield f"{key} ({word.source}): {secrets.ASK.format(key=word.key)}"
            else:
                yield (
                    f"{word.key} ({word.source}): ${{secret:{owner}}} is the secret of {owner} and of no other "
                    f"key. Type {word.key}=<value>."
                )


def noted(config: Config, given: Sequence[Word], settled: Sequence[Word]) -> Config:
    """`config`, with the values that its words overrode, with references to the environment as they were written, and
    without secrets, which are kept in memory.
    """
    stands = {word.key: word for word in settled}
    for word in given:
        for key in layers.PATTERNS:
            for name, each in layers.entries([word], key).items():
                if config.sources.get(f"{key}.{name}", each.source) != each.source:
                    config.history.setdefault(f"{key}.{name}", []).append((shown(name, each.value), each.source))
        if stands.get(word.key) != word and not word.key.startswith("hydra"):
            config.history.setdefault(word.key, []).append((shown(word.key, word.value), word.source))
    raw = config.unresolved | {
        key: value for word in settled for key, value in leaves(word.value, word.key) if "${oc.env" in str(value)
    }
    config.unresolved = {key: value for key, value in raw.items() if secrets.masked(str(value)) == value}
    read = [key for key, value in raw.items() if patterns.secret_variable(str(value))]
    for _ in range(2):  # one value may contain another
        for group in GROUPS:
            setattr(config, group, secrets.seal(getattr(config, group), group, read=read))
    return config


def spilt(config: Config, words: Iterable[Word]) -> Iterator[str]:
    """One sentence for each word outside the parts that looks up a secret, and would be saved with it."""
    values = asked(config)
    for word in words:
        if "${" in word.text and word.key.split(".")[0] not in GROUPS:
            texts = [value for _, value in leaves(values.get(word.key)) if isinstance(value, str | list)]
            if secrets.redact_tree(texts) != texts:
                yield f"{word.key}={shown(word.key, word.value)} ({word.source}): {secrets.REFUSED}"


# afterwards


def left_out(config: Config) -> Iterator[str]:
    """A note for each part that another word or `_target_` replaced, with the arguments that were dropped with it."""
    dropped: dict[str, list[str]] = {}
    for key, values in config.history.items():
        above = [key.rsplit(".", count)[0] for count in range(1, key.count(".") + 1)]
        by = next((name for part in above for name in (f"{part}._target_", part) if name in config.sources), "")
        if by.split(".")[0] in GROUPS and by not in LISTS and key not in config.sources and values[-1][0] != "???":
            dropped.setdefault(by, []).append(key)
    given = asked(config)
    for by, keys in dropped.items():
        arguments = [f"{key}={config.history[key][-1][0]} ({config.history[key][-1][1]})" for key in keys]
        more = f" and {len(arguments) - MOST_NAMED} more" if len(arguments) > MOST_NAMED else ""
        yield (
            f"{', '.join(arguments[:MOST_NAMED])}{more}: not used, because {by}={shown(by, given[by])} "
            f"({config.sources[by]}) replaces that part. Type what you want to keep"
            f"{_kept_by_a_file(config, by, keys)}."
        )


def _kept_by_a_file(config: Config, by: str, keys: Sequence[str]) -> str:
    """How the first file whose arguments were dropped keeps them, if the part that replaced theirs takes them all."""
    names = {key.removeprefix(f"{by}.").partition(".")[0] for key in keys}
    source = config.history[keys[0]][-1][1]
    if by not in GROUPS or not names <= {*getattr(config, by)}:
        return ""
    told = choosing(by, str(config.choices[by]), source)
    return f", or {told[0].lower()}{told[1:].rstrip('.')}" if told else ""


def choosing(group: str, word: str, source: str) -> str:
    """The sentence that has a recipe choose the word whose arguments it gives; empty if `source` is no local file."""
    file = LINE.fullmatch(source)
    return f"Write `defaults: [override /{group}: {word}]` into {file[1]}." if file and "://" not in source else ""


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything below a mapping; a list is one value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            if name != "_about_":
                yield from leaves(item, f"{key}.{name}".removeprefix("."))
    elif not isinstance(value, Mapping):
        yield key, value


def asked(config: Config) -> dict[str, Any]:
    """Dotted key -> value as composed; a group's own key has its word."""
    values: dict[str, Any] = {}
    for field in fields(Schema):
        value = getattr(config, field.name)
        if field.name in GROUPS:
            values[field.name] = config.choices.get(field.name) or value.get("_target_")
        values |= leaves(vars(value) if is_dataclass(value) else value, field.name)
    return values


def decided(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan (`Plan.decided`, or a plan.yaml) with the keys of a Config, plus the values that only a plan has. Accepts
    plans of other versions.
    """
    batch, values = plan.get("batch") or {}, {}
    for name, value in plan.items():
        if name in GROUPS:
            values[name] = _word(value, name)
            values |= leaves(value, name)
        elif name in ("loggers", "hooks"):
            values[name[:-1]] = list(value)
            values |= leaves(value, name[:-1])
        elif name in ("log_every", "evaluate_every", "evaluate_samples"):
            values[name.replace("_", ".")] = value
        elif name == "evaluate_metrics":
            values["evaluate.metrics"] = list(value)
        elif name == "tasks":
            named = {"names": "tasks", "path": "tasks_path"}
            values |= {f"evaluate.{named.get(row, row)}": each for row, each in value.items()}
        elif name not in ("batch", "why", "others"):
            values |= leaves(value, name)
    return values | {
        "batch": batch.get("size"),
        "microbatch": batch.get("microbatch"),
        "accumulate": batch.get("accumulate"),
    }


def rows(config: Config, plan: Plan) -> list[Row]:
    """Every value of the run, in the order of the schema, then the values that only the plan has."""
    before, after = asked(config), decided(plan.decided())
    table = []
    order = [field.name for field in fields(Schema)]
    keys = sorted(
        dict.fromkeys([*before, *after]),
        key=lambda key: order.index(top) if (top := key.split(".")[0]) in order else len(order),
    )
    for key in keys:
        if str(after.get(key)).startswith("dtrain.") and key.endswith("._target_"):
            continue  # its word is a row already
        chosen = config.choices.get(key) if key not in LISTS else None
        value = chosen if isinstance(chosen, str) and chosen != "auto" else after.get(key, before.get(key))
        default = _default(key, after if key not in before else config.choices)
        own = key in GROUPS and key not in LISTS and config.choices.get(key) is None
        source = origin(config, f"{key}._target_" if own else key, default)
        overrode = [*reversed(config.history.get(key, []))]
        if (key in config.sources or own) and default is not None:
            overrode.append((shown(key, default[0]), default[1]))
        if (
            key in before
            and key in after
            and _plain(before[key]) != _plain(value)
            and not (key in LISTS and before[key] != "auto")
        ):
            overrode.insert(0, (shown(key, before[key]), source.removeprefix("default ")))
            source = _reason(plan, key)
        elif key not in before and (default is None or key in plan.why):
            overrode += [(shown(key, default[0]), default[1])] if default else []
            source = _reason(plan, key)
        others = [one for one in overrode if one[0] != shown(key, value) or len(overrode) > 1]
        table.append(Row(key, value, source, tuple(dict.fromkeys(others))))
    return table


def origin(config: Config, key: str, default: tuple[Any, str] | None) -> str:
    """The source of a value in the config: the word that gave it or a mapping around it, or the default with its
    line.
    """
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        above = ".".join(parts[:end])
        if above in config.sources and (end == len(parts) or above not in GROUPS):
            return secrets.masked(config.sources[above])
    choice = config.choices.get(parts[0])
    if default:
        return f"default {default[1]}"
    return f"default of {parts[0]}={choice}" if isinstance(choice, str) and len(parts) > 1 else "default"


def table(rows: Sequence[Row]) -> str:
    """An aligned table: key, value, who set it, what it overrode."""
    cells = [("key", "value", "set by", "overrode")]
    for row in rows:
        before = "; ".join(f"{value} ({source})" for value, source in row.overrode)
        cells.append((row.key, shown(row.key, row.value), row.source, before))
    return screen.table(cells)


def shown(key: str, value: Any) -> str:
    """A value for a person: on one line, shortened, without secrets."""
    line = value if isinstance(value, str) else text(value)
    line = secrets.HERE.sub(secrets.MASK, secrets.redact_arg(f"{key}={line}").partition("=")[2]).replace("\n", " ")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def _word(part: Any, group: str) -> Any:
    """The word that a part was made from, or its target if it is the user's own."""
    target = str(part.get("_target_")) if isinstance(part, Mapping) else ""
    own, word = files.own_word(target)
    return word if own == group and target.count(".") > 2 else target


def _reason(plan: Plan, key: str) -> str:
    top = key.split(".")[0]
    why = plan.why.get(key) or plan.why.get(top) or plan.why.get("microbatch" if key == "accumulate" else key)
    if why and "(auto: " in why:
        return "auto: " + why.split("(auto: ", 1)[1].removesuffix(")")
    return RULES.get(top, "resolve")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _default(key: str, choices: Mapping[str, Any]) -> tuple[Any, str] | None:
    """The default of a key in conf/, and its file and line; None if it has none. `choices`: group -> word."""
    group, *rest = key.split(".")
    if group not in GROUPS or not rest:
        return _lines("config").get(key)
    choice = choices.get(group)
    if group in LISTS:
        choice, rest = rest[0], rest[1:]
    return _lines(f"{group}/{choice}").get(".".join(rest)) if isinstance(choice, str) and rest else None


@cache
def _lines(name: str) -> dict[str, tuple[Any, str]]:
    """dotted key -> (value, `conf/optim/adamw.yaml:4`) of a file of conf/."""
    path = recipe.folder("conf") / f"{name}.yaml"
    values = marked(path.read_text("utf-8")) if path.is_file() else {}
    return {key: (value, f"conf/{name}.yaml:{line}") for key, (value, line) in values.items()}


def marked(document: str) -> dict[str, tuple[Any, int]]:
    """dotted key -> (value, line number) of a YAML mapping; choices in its defaults list stand under the names of their
    groups.
    """
    import yaml

    values: dict[str, tuple[Any, int]] = {}

    def walk(node: Any, key: str) -> None:
        for name, item in node.value:
            where = f"{key}.{name.value.removeprefix('override ').lstrip('/')}".removeprefix(".")
            if isinstance(item, yaml.MappingNode) and item.value:
                walk(item, where)
            elif where == "defaults":
                for entry in item.value:
                    if isinstance(entry, yaml.MappingNode):
                        walk(entry, "")
            else:
                values[where] = (yaml.safe_load(yaml.serialize(item)), name.start_mark.line + 1)

    root = yaml.compose(document, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        walk(root, "")
    return values
