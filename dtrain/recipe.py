"""A recipe: nothing but words written down in YAML. Reading one gives words, every run writes one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from dtrain import store
from dtrain.conf import folder
from dtrain.config import Config, Schema
from dtrain.errors import StoreError, WordsError, first_line, nearest
from dtrain.words import Word, text

NEVER_FROM_A_RECIPE = ("trust", "out", "out_options", "hydra", "sweep", "recipe")


def read(name: str) -> list[Word]:
    """The words of a recipe: one of ours by its name, or a path or URL. Raises WordsError."""
    from omegaconf import OmegaConf  # not at the top: `dtrain plan` answers in half a second
    from omegaconf.errors import OmegaConfBaseException

    known = {path.stem: path for path in folder("recipes").glob("*.yaml")}
    where = str(known.get(name, name))
    if name not in known and not re.search(r"[/.]", name):
        raise WordsError(f"recipe={name} (command line): there is no such recipe.{nearest(name, known)} Or give a path or URL.")
    try:
        written = store.read(where).decode()
        if not store.is_local(where) and "${oc.env" in written:
            raise WordsError(f"recipe={name}: a recipe from elsewhere may not read the environment. Copy it to a local file if you trust it.")
        document = OmegaConf.to_container(OmegaConf.create(written), resolve=False)
    except StoreError as error:
        raise WordsError(f"recipe={name}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise WordsError(
            f"{place}: not YAML: {getattr(error, 'problem', None) or 'broken'}. Look at the indentation, colons and brackets there."
        ) from error
    except (OmegaConfBaseException, UnicodeDecodeError, AttributeError, RecursionError) as error:
        raise WordsError(f"{where}: not a recipe: {first_line(error)}") from error
    if not isinstance(document, dict):
        raise WordsError(f"{where}: not a recipe: a mapping of words to values is expected.")
    return list(_words(document, where))


def _words(document: dict[Any, Any], where: str) -> Iterable[Word]:
    problems = []
    for entry in document.pop("defaults", None) or []:
        if entry == "_self_":
            continue
        if not (isinstance(entry, dict) and len(entry) == 1 and str(next(iter(entry))).startswith(("override /", "/"))):
            problems.append(f"{where}: defaults: {entry!r} is not understood. Write `- override /model: gpt`.")
            continue
        (group, word), *_ = entry.items()
        yield Word(str(group).removeprefix("override ").lstrip("/"), word, _choice_text(word), where)
    for key, value in document.items():
        if key in NEVER_FROM_A_RECIPE:
            problems.append(f"{where}: {key} cannot come from a recipe. Say it on the command line.")
        else:
            yield from _leaves(str(key), value, where)
    if problems:
        raise WordsError(*problems)


def _leaves(key: str, value: Any, where: str) -> Iterable[Word]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item, where)
    else:
        yield Word(key, value, text(value), where)


def _choice_text(word: Any) -> str:
    return "[" + ",".join(map(str, word)) + "]" if isinstance(word, list) else str(word)


def write(config: Config) -> str:
    """config.yaml: what was asked, as a recipe, with the source of every value that is not a default."""
    lines = ["# @package _global_", "# what was asked; recipe=<this file> runs it again"]
    if config.trust:
        lines.append(f"# needs trust={text(list(config.trust))}")
    told = [key for key in config.sources if key.split(".")[0] == "out_options"]
    if told:
        lines.append(f"# needs {' '.join(f'{key}=<not written>' for key in told)}")
    lines.append("defaults:")
    lines += [f"  - override /{group}: {_flow(word)}" for group, word in config.choices.items() if word is not None]
    for field in fields(Schema):
        if field.name not in NEVER_FROM_A_RECIPE:
            value = getattr(config, field.name)
            lines += _yaml_lines(field.name, vars(value) if is_dataclass(value) else value, config.sources, "", field.name)
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _yaml_lines(name: str, value: Any, sources: Mapping[str, str], indent: str, key: str) -> Iterable[str]:
    if isinstance(value, dict):
        inner = [
            line
            for part, item in value.items()
            if part != "_about_"
            for line in _yaml_lines(str(part), item, sources, indent + "  ", f"{key}.{part}")
        ]
        if inner:
            yield f"{indent}{name}:"
            yield from inner
    else:
        source = f"  # {sources[key]}" if key in sources else ""
        yield f"{indent}{name}: {_flow(value)}{source}"
