"""Words -> Config. The one file that touches Hydra: it composes once, in the parent; ranks never import it.

Every word is checked before Hydra sees it, so that all mistakes are told at once, each with its source and the words to type
instead. A recipe is nothing but words written down: it is flattened into words that come before the user's own. Whoever picks
another word of a group, or another `_target_`, also drops the arguments a recipe gave to the old one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml
from hydra import compose as hydra_compose
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain.config import GROUPS, Config, Schema
from dtrain.errors import DtrainError, StoreError, WordsError, nearest

LISTS = ("logger", "hook")
"""Groups that take a list of words, each in a package of its own."""
NEVER_FROM_A_RECIPE = ("trust", "out", "hydra", "sweep", "recipe")
OF_THE_MESH = ("nodes", "devices", "mesh", "microbatch", "accumulate", "strategy", "launcher", "backend", "loop", "stop_after", "resume", "init")
"""What another verb does not take over from the run it looks at: it may look from any mesh."""


@dataclass(frozen=True)
class Word:
    """`key=value` and who said it. `text` is the value in Hydra's grammar."""

    key: str
    value: Any
    text: str
    source: str
    sweep: bool = False

    def __str__(self) -> str:
        return f"{self.key}={self.text}"


def folder(name: str) -> Path:
    """conf/ or recipes/: inside the package when installed as a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for path in (here / name, here.parent / name):
        if path.is_dir():
            return path
    raise WordsError(f"dtrain is not installed whole: there is no {name}/ inside or beside {here}.")


def compose(words: Sequence[str], *, run: str | None = None) -> Config:
    """The words, and before them those of the run at URL `run`, as one typed Config.

    Raises WordsError with every mistake found.
    """
    problems: list[str] = []
    asked = [word for word in map(_collect(_parse, problems), words) if word]
    searchpath = [path for word in asked if word.key == "hydra.searchpath" for path in word.value]
    loader = _hydra(searchpath).config_loader
    if run:
        asked = [word for word in _read_recipe(f"{run.rstrip('/')}/config.yaml") if word.key.split(".")[0] not in OF_THE_MESH] + asked
    final = _settle(_with_recipes(asked, problems))
    config = _Checker(loader, final).config(problems)
    if problems:
        raise WordsError(*problems)
    return config


def value_of(words: Sequence[str], key: str) -> str | None:
    """The last value of `key` among plain words, before anything is composed."""
    found = [word.value for word in map(_collect(_parse, []), words) if word and word.key == key]
    return None if not found or found[-1] is None else str(found[-1])


def multirun(words: Sequence[str], job: Callable[[Config], float | None]) -> list[Any]:
    """Run `job` once for every combination of the swept words, through Hydra's own sweeper and launcher. Returns the results."""
    problems: list[str] = []
    asked = [word for word in map(_collect(_parse, problems), words) if word]
    if not problems:
        for word in asked:
            if not word.sweep and word.key.split(".")[0].split("/")[0] != "hydra":
                continue
            if not word.sweep and not re.match(r"hydra[/.](launcher|sweeper)", word.key):
                problems.append(f"{word} ({word.source}): with -m only hydra/launcher, hydra/sweeper and their settings can be said to Hydra.")
    if problems:
        raise WordsError(*problems)
    plain = [word for word in asked if not word.key.startswith("hydra") and not word.sweep]
    swept = [word for word in asked if not word.key.startswith("hydra") and word.sweep]
    root = next((str(word.value) for key in ("sweep.out", "out") for word in plain if word.key == key), None)
    plain = [word for word in plain if word.key not in ("sweep.out", "out")]
    constant = [str(word) for word in plain]
    root = root or f"outputs/sweep-{_slug([f'{w.key}-{w.text}' for w in swept + plain])}"

    def task(_: Any) -> float | None:
        said = [word.removeprefix("++") for word in HydraConfig.get().overrides.task]
        return job(compose([*constant, *said, f"out={_quote(root.rstrip('/') + '/' + _slug([w.replace('=', '-') for w in said]))}"]))

    # Hydra composes every job too; `++` lets it take what only our own composition can judge
    told = [f"{'' if word.key in GROUPS else '++'}{word}" for word in swept] + [str(word) for word in asked if word.key.startswith("hydra")]
    try:
        batches = _hydra([]).multirun("config", task, [*told, "hydra/job_logging=none", "hydra/hydra_logging=none"])
    except (HydraException, OmegaConfBaseException) as error:
        raise WordsError(_first_line(error)) from error
    return [result.return_value for batch in batches for result in batch]


def to_recipe(config: Config) -> str:
    """config.yaml: what was asked, as a recipe, with the source of every value that is not a default."""
    lines = ["# @package _global_", "# what was asked; recipe=<this file> runs it again"]
    if config.trust:
        lines.append(f"# needs trust={_text(list(config.trust))}")
    lines.append("defaults:")
    lines += [f"  - override /{group}: {_flow(word)}" for group, word in config.choices.items() if word is not None]
    for field in fields(Schema):
        if field.name not in NEVER_FROM_A_RECIPE:
            value = getattr(config, field.name)
            lines += _yaml_lines(field.name, vars(value) if is_dataclass(value) else value, config.sources, "", field.name)
    return "\n".join(lines) + "\n"


# words


def _collect(parse: Callable[[str], Word], problems: list[str]) -> Callable[[str], Word | None]:
    def attempt(text: str) -> Word | None:
        try:
            return parse(text)
        except WordsError as error:
            problems.extend(error.problems)
            return None

    return attempt


def _parse(text: str) -> Word:
    if text.startswith("-"):
        name = text.lstrip("-").replace("-", "_")
        raise WordsError(f"{text} (command line): words have no dashes. Type {name if '=' in name else name + '=<value>'}.")
    if text.startswith("~"):
        raise WordsError(f"{text} (command line): nothing is taken away with ~. Type {text[1:].split('=')[0]}=<another word>.")
    if "=" not in text:
        raise WordsError(f"{text} (command line): neither a verb nor a word. Words look like key=value.{nearest(text, GROUPS)}")
    key, raw = text.lstrip("+").split("=", 1)
    try:
        override = OverridesParser.create().parse_override(f"{key}={_quote(raw) if raw != raw.strip() else raw}")
    except HydraException:
        try:
            override = OverridesParser.create().parse_override(f"{key}={_quote(raw)}")
        except HydraException as error:
            raise WordsError(f"{text} (command line): not a word. {_first_line(error)}") from error
    sweep = override.is_sweep_override()
    value = override.value() if not sweep else None
    return Word(override.key_or_group, _plain(value), override.get_value_string(), "command line", sweep)


def _plain(value: Any) -> Any:
    """Hydra's QuotedString and the like as plain Python."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return getattr(value, "text", value)


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'" if text.endswith("\\") else "'" + text.replace("'", "\\'") + "'"


def _text(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_text(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    return _quote(value) if isinstance(value, str) else str(value)


def _slug(words: Iterable[str]) -> str:
    """A folder name: no `=`, no separators; long ones end in a digest."""
    name = re.sub(r"[^\w.+-]+", "-", "_".join(words).lower()).strip("-.") or "job"
    if len(name) <= 80:
        return name
    import hashlib

    return f"{name[:64]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


# recipes


def _with_recipes(asked: list[Word], problems: list[str]) -> list[Word]:
    """Recipes first, in the order they were named, then everything else."""
    written: list[Word] = []
    for word in asked:
        if word.key == "recipe":
            for name in word.value if isinstance(word.value, list) else [word.value]:
                try:
                    written += _read_recipe(str(name))
                except DtrainError as error:
                    problems.extend(getattr(error, "problems", (str(error),)))
    return written + [word for word in asked if word.key != "recipe"]


def _read_recipe(name: str) -> list[Word]:
    known = {path.stem: path for path in folder("recipes").glob("*.yaml")}
    where = str(known.get(name, name))
    if name not in known and not re.search(r"[/.]", name):
        raise WordsError(f"recipe={name} (command line): there is no such recipe.{nearest(name, known)} Or give a path or URL.")
    from dtrain import store

    try:
        document = OmegaConf.to_container(OmegaConf.create(store.read(where).decode()), resolve=False)
    except StoreError as error:
        raise WordsError(f"recipe={name}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise WordsError(f"{place}: not YAML: {getattr(error, 'problem', None) or 'broken'}. Look at the indentation, colons and brackets there.") from error
    except (OmegaConfBaseException, UnicodeDecodeError, AttributeError) as error:
        raise WordsError(f"{where}: not a recipe: {_first_line(error)}") from error
    if not isinstance(document, dict):
        raise WordsError(f"{where}: not a recipe: a mapping of words to values is expected.")
    return list(_recipe_words(document, where))


def _recipe_words(document: dict[Any, Any], where: str) -> Iterable[Word]:
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
        yield Word(key, value, _text(value), where)


def _choice_text(word: Any) -> str:
    return "[" + ",".join(map(str, word)) + "]" if isinstance(word, list) else str(word)


def _settle(words: list[Word]) -> list[Word]:
    """The last word wins; what was said about a choice that lost is dropped with it."""
    final: list[Word] = []
    for word in words:
        group = word.key if word.key in GROUPS else word.key.removesuffix("._target_")
        replaces = word.key in GROUPS or word.key.endswith("._target_")
        same = any(old.key == word.key and old.value == word.value for old in final)
        final = [
            old
            for old in final
            if old.key != word.key and not (replaces and not same and old.source != word.source and old.key.startswith(group + "."))
        ]
        final.append(word)
    return final


# checking


class _Checker:
    """Judges settled words against conf/ and the schema, and lets Hydra compose what is left."""

    def __init__(self, loader: ConfigLoader, words: list[Word]) -> None:
        self.loader, self.words = loader, [word for word in words if word.key != "hydra.searchpath"]
        self.options = {group: sorted(loader.get_group_options(group)) for group in GROUPS}
        self.choices = self._defaults() | {word.key: word.value for word in words if word.key in GROUPS}
        self.explicit = {word.key for word in words if word.key in GROUPS}
        self.targets = [word.key.removesuffix("._target_") for word in words if word.key.endswith("._target_")]
        self.schema = _schema_keys(Schema)

    def config(self, problems: list[str]) -> Config:
        before = len(problems)
        for word in self.words:
            problems.extend(self._judge(word))
        if len(problems) > before:
            return Config()
        replaced = [group for group in GROUPS if group in self.targets]
        overrides = [f"~{group}" for group in replaced]
        for word in self.words:
            if word.key not in replaced:
                free = any(word.key.startswith(target + ".") for target in self.targets)
                overrides.append(f"{'++' if free else ''}{word}")
        try:
            composed: Any = OmegaConf.to_container(hydra_compose("config", overrides=overrides), resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            problems.append(_first_line(error))
            return Config()
        about = {group: self._node(group, self.choices[group]).get("_about_") for group in replaced if group in self.explicit}
        kinds = get_type_hints(Schema)
        config = Config(**{key: kinds[key](**value) if is_dataclass(kinds[key]) else value for key, value in composed.items()})
        for group in replaced:
            getattr(config, group)["_about_"] = about.get(group) or {}
        problems.extend(self._missing(config))
        config.choices = {group: None if group in replaced else self.choices[group] for group in GROUPS}
        config.sources = {word.key: word.source for word in self.words}
        config.options = {
            group: {name: self._node(group, name) for name in self.options[group]} for group in GROUPS if self.choices[group] == "auto"
        }
        return config

    def _judge(self, word: Word) -> Iterable[str]:
        """One sentence per mistake in `word`."""
        said = f"{word} ({word.source})"
        top, *rest = word.key.split(".")
        if top not in self.schema and top not in GROUPS:
            yield f"{said}: there is no word {word.key}.{self._near(word.key)}"
        elif word.sweep:
            yield f"{said}: several values are a sweep. Add -m, or quote: \"{word.key}='{word.text}'\"."
        elif word.key in GROUPS:
            yield from self._judge_choice(word, said)
        elif top in GROUPS:
            yield from self._judge_argument(word, said, top, rest)
        elif word.key not in self.schema:
            yield f"{said}: there is no word {word.key}.{self._near(word.key)}"
        elif isinstance(self.schema[word.key], dict):
            yield f"{said}: {word.key} holds other words. Type {', '.join(f'{word.key}.{name}=<value>' for name in self.schema[word.key])}."
        elif not _fits(word.value, self.schema[word.key]):
            yield f"{said}: {word.key} is {_kind(self.schema[word.key])}, not {word.value!r}. Type {word.key}=<{_kind(self.schema[word.key])}>."

    def _judge_choice(self, word: Word, said: str) -> Iterable[str]:
        if isinstance(word.value, list) and word.key not in LISTS:
            yield f"{said}: {word.key} takes one word."
        for name in word.value if isinstance(word.value, list) else [word.value]:
            if name not in self.options[word.key]:
                yield f"{said}: there is no {word.key} {name}.{nearest(str(name), self.options[word.key])}"

    def _judge_argument(self, word: Word, said: str, group: str, rest: list[str]) -> Iterable[str]:
        if any(word.key.startswith(target + ".") for target in self.targets):
            return
        choice: Any = self.choices[group]
        names = choice if isinstance(choice, list) else [choice]
        if any(name not in self.options[group] for name in names):
            return  # the choice itself is the mistake
        if group in LISTS:
            if rest[0] not in names:
                known = self._node(group, rest[0]) if rest[0] in self.options[group] else None
                hint = f" Type {group}=[{','.join([*(n for n in names if n != 'auto'), rest[0]])}] as well." if known else nearest(rest[0], self.options[group])
                yield f"{said}: {group} {rest[0]} is not part of this run.{hint}"
                return
            choice, rest = rest[0], rest[1:]
        node: Any = self._node(group, choice)
        for depth, name in enumerate(rest):
            if not isinstance(node, dict) or node.get(name) == "???":
                node = None
                break
            allowed = [key for key in node if key != "_about_"]
            if name not in allowed:
                full = ".".join([*word.key.split(".")[: len(word.key.split(".")) - len(rest) + depth], name])
                also = sorted(other for other in self.options[group] if name in self._node(group, other)) if group not in LISTS else []
                hint = f" {group}={also[0]} has it." if also else self._near(full, prefix=full.rsplit(".", 1)[0], allowed=allowed)
                yield f"{said}: {group}={choice} has no {name}.{hint}"
                return
            node = node[name]
        if node not in (None, "auto", "???") and not isinstance(node, dict) and not _fits(word.value, _type_of(node)):
            yield f"{said}: {word.key} is {_kind(_type_of(node))}, not {word.value!r}. Its default is {_text(node)}."

    def _near(self, key: str, prefix: str | None = None, allowed: Iterable[str] = ()) -> str:
        if prefix is not None:
            return nearest(key, [f"{prefix}.{name}" for name in allowed if not name.startswith("_")])
        arguments = [f"{group}.{name}" for group in GROUPS if group not in LISTS for name in self._node(group, self.choices[group]) if name[0] != "_"]
        by_leaf = [name for name in arguments if name.split(".")[-1] == key]
        return f" Did you mean {by_leaf[0]}?" if by_leaf else nearest(key, [*self.schema, *GROUPS, "recipe", *arguments] if "." in key else [*self.schema_top(), *GROUPS, "recipe"])

    def schema_top(self) -> list[str]:
        return [key for key in self.schema if "." not in key]

    def _missing(self, config: Config) -> Iterable[str]:
        for group in GROUPS:
            for key, value in getattr(config, group).items():
                if value == "???":
                    yield f"{group}={self.choices[group]} needs {group}.{key}. Type {group}.{key}=<value>."

    def _node(self, group: str, name: Any) -> dict[str, Any]:
        """The arguments of a word, as written in its file."""
        if not isinstance(name, str) or name not in self.options[group]:
            return {}
        loaded = self.loader.repository.load_config(f"{group}/{name}")  # type: ignore[attr-defined]
        return OmegaConf.to_container(loaded.config, resolve=False) or {} if loaded else {}

    def _defaults(self) -> dict[str, Any]:
        loaded = self.loader.repository.load_config("config")  # type: ignore[attr-defined]
        return {key: value for entry in loaded.defaults_list or [] for key, value in _entry(entry) if key in GROUPS}


def _entry(entry: Any) -> Iterable[tuple[str, Any]]:
    group = getattr(entry, "group", None)
    if group:
        value = entry.value
        yield group, list(value) if not isinstance(value, str) else value


def _hydra(searchpath: Sequence[str]) -> Hydra:
    """Hydra over conf/ and the user's own folders of words."""
    ConfigStore.instance().store("schema", Schema)
    search = create_config_search_path(f"file://{folder('conf')}")
    for path in searchpath:
        search.append("command line", path if "://" in path else f"file://{Path(path).resolve()}")
    GlobalHydra.instance().clear()
    return Hydra.create_main_hydra2("dtrain", search)


def _schema_keys(schema: Any, prefix: str = "") -> dict[str, Any]:
    """dotted key -> type, for everything outside the groups; a nested dataclass maps to its own fields."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        if prefix or name not in GROUPS:
            inner = _schema_keys(kind, f"{prefix}{name}.") if is_dataclass(kind) else {}
            keys[prefix + name] = {key.split(".")[-1]: key for key in inner} if inner else kind
            keys |= inner
    return keys


def _type_of(default: Any) -> Any:
    return Any if default is None else type(default)


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any or (isinstance(value, str) and value.startswith("${")):
        return True
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, getattr(kind, "__origin__", kind))


def _kind(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null", list: "a list"}
    if isinstance(kind, UnionType):
        return " or ".join(_kind(each) for each in get_args(kind))
    return names.get(getattr(kind, "__origin__", kind), "a value")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _yaml_lines(name: str, value: Any, sources: Mapping[str, str], indent: str, key: str) -> Iterable[str]:
    if isinstance(value, dict):
        inner = [line for part, item in value.items() if part != "_about_" for line in _yaml_lines(str(part), item, sources, indent + "  ", f"{key}.{part}")]
        if inner:
            yield f"{indent}{name}:"
            yield from inner
    else:
        source = f"  # {sources[key]}" if key in sources else ""
        yield f"{indent}{name}: {_flow(value)}{source}"

