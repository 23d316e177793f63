"""Words -> Config. The one file that touches Hydra: it composes once, in the parent; ranks never import it.

Every word is judged before Hydra sees it, so that all mistakes are told at once. Recipes are flattened into words that come before
the user's own; whoever picks another word of a group, or another `_target_`, also drops the arguments a recipe gave to the old one.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose as hydra_compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
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

from dtrain import options, recipe
from dtrain.check import Vocabulary, judge
from dtrain.config import GROUPS, LISTS, VERBS, Config, Schema
from dtrain.errors import DtrainError, WordsError, first_line, nearest
from dtrain.words import Word, quote, slug

OF_THE_MESH = (
    "nodes", "devices", "mesh", "microbatch", "accumulate", "strategy", "launcher", "backend", "loop", "stop_after", "resume", "init",
)  # fmt: skip
"""What another verb does not take over from the run it looks at: it may look from any mesh."""


def compose(words: Sequence[str], *, run: str | None = None) -> Config:
    """The words, and before them those of the run at URL `run`, as one typed Config.

    Raises WordsError with every mistake found.
    """
    asked, problems = _parse_all(words)
    loader = _hydra([path for word in asked if word.key == "hydra.searchpath" for path in word.value]).config_loader
    problems += [
        f"{word} ({word.source}): of Hydra's own words only hydra.searchpath is taken here, and with -m hydra/launcher and hydra/sweeper."
        for word in asked
        if word.key.startswith("hydra") and word.key != "hydra.searchpath"
    ]
    asked = [word for word in asked if not word.key.startswith("hydra") or word.key == "hydra.searchpath"]
    problems += options.tell(asked, next((str(word.value) for word in reversed(asked) if word.key == "out" and word.value), None))
    written = recipe.read(f"{run.rstrip('/')}/config.yaml") if run else []
    written = [word for word in written if word.key.split(".")[0] not in OF_THE_MESH]
    settled = _settle([*written, *_with_recipes(asked, problems)])
    vocabulary = _vocabulary(loader, settled)
    problems += [problem for word in settled for problem in judge(word, vocabulary)]
    if problems:
        raise WordsError(*problems)
    return _config(settled, vocabulary)


def connect(words: Sequence[str], url: str) -> None:
    """Tell the storage of `url` the out_options among the words, before anything is read there. Raises WordsError."""
    problems = options.tell(_parse_all(words)[0], url)
    if problems:
        raise WordsError(*problems)


def value_of(words: Sequence[str], key: str) -> str | None:
    """The last value of `key` among plain words, before anything is composed."""
    found = [word.value for word in _parse_all(words)[0] if word.key == key]
    return None if not found or found[-1] is None else str(found[-1])


def multirun(words: Sequence[str], job: Callable[[Sequence[str]], float | None], *, check: Callable[[Sequence[str]], object]) -> list[Any]:
    """Run `job` with the words of every combination of the swept ones, through Hydra's own sweeper and launcher. Returns what the jobs returned.

    Each job gets a folder of its own below `sweep.out` (or `out`), named after its values. `check` sees the words of every job of
    Hydra's own sweeper before the first one runs; the WordsErrors it raises are collected.
    """
    asked, problems = _parse_all(words)
    for_hydra = [word for word in asked if re.match(r"hydra[/.](launcher|sweeper)\b", word.key)]
    ours = [word for word in asked if word not in for_hydra]
    problems += [
        f"{word} ({word.source}): with -m Hydra takes hydra/launcher, hydra/sweeper and what they hold." for word in ours if word.key[:5] == "hydra"
    ]
    swept = [word for word in ours if word.sweep]
    if not swept and not problems and not for_hydra:
        problems.append("-m: no word has several values. Type optim.lr=1e-3,3e-3 for example, or leave -m out.")
    if any(options.is_one(word.key) for word in ours) and any(word.key.startswith("hydra/launcher") for word in for_hydra):
        problems.append("out_options: a launcher of Hydra's writes the words of its jobs to files. Put the credentials into the environment.")
    if problems:
        raise WordsError(*problems)
    plain = [word for word in ours if not word.sweep and word.key not in ("out", "sweep.out")]
    named = [str(word.value) for key in ("sweep.out", "out") for word in ours if word.key == key]
    root = named[0].rstrip("/") if named else f"outputs/sweep-{slug(f'{word.key}-{word.text}' for word in ours)}"

    def task(_: Any) -> float | None:
        values = [word.removeprefix("++") for word in HydraConfig.get().overrides.task]
        out = f"{root}/{slug(value.replace('=', '-') for value in values)}"
        return job([*map(str, plain), *values, f"out={quote(out)}"])

    if not any(word.key == "hydra/sweeper" for word in for_hydra):
        _check_all(plain, swept, check)
    # Hydra composes every job too; `++` lets it take what only our own composition can judge
    told = [f"{'' if word.key in GROUPS else '++'}{word}" for word in swept] + [str(word) for word in for_hydra]
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    with tempfile.TemporaryDirectory() as folder:  # Hydra leaves a file of its own, and only knows local folders
        try:
            batches = _hydra([]).multirun("config", task, [*told, *quiet, f"hydra.sweep.dir={quote(folder)}"])
        except (HydraException, OmegaConfBaseException) as error:
            raise WordsError(first_line(error)) from error
    return [result.return_value for batch in batches for result in batch]


def _check_all(plain: Sequence[Word], swept: Sequence[Word], check: Callable[[Sequence[str]], object]) -> None:
    """Raises WordsError with the mistakes of all jobs."""
    jobs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides([str(word) for word in swept]), None)
    problems: dict[str, None] = {}
    for words in (words for batch in jobs for words in batch):
        try:
            check([*map(str, plain), *words])
        except WordsError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise WordsError(*problems)


def _parse_all(words: Sequence[str]) -> tuple[list[Word], list[str]]:
    """The words that can be read, and a sentence for each that cannot."""
    read, problems = [], list[str]()
    for text in words:
        try:
            read.append(_parse(text))
        except WordsError as error:
            problems += map(options.masked, error.problems)
    return read, problems


def _parse(text: str) -> Word:
    if text in ("-m", "--multirun"):
        raise WordsError(f"{text} (command line): only train takes it.")
    if text.startswith("-"):
        name = text.lstrip("-").replace("-", "_")
        raise WordsError(f"{text} (command line): words have no dashes. Type {name if '=' in name else name + '=<value>'}.")
    if text.startswith("~"):
        raise WordsError(f"{text} (command line): nothing is taken away with ~. Type {text[1:].split('=')[0]}=<another word>.")
    if options.masked(text) != text and not options.is_one(text.split("=")[0]):
        raise WordsError(f"{text} (command line): {options.NO_PASSWORD}")
    if "=" not in text:
        known = [*VERBS, *(f"{name}=<value>" for name in (*GROUPS, *Schema.__dataclass_fields__) if name)]
        raise WordsError(f"{text} (command line): neither a verb nor a word. Words look like key=value.{nearest(text, known)}")
    key, raw = text.lstrip("+").split("=", 1)
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(f"{key}={quote(raw) if raw != raw.strip() else raw}")
    except HydraException:  # a URL with `=`, a sentence with spaces and commas: what cannot be read as more is a text
        try:
            override = parser.parse_override(f"{key}={quote(raw)}")
        except HydraException as error:
            raise WordsError(f"{text} (command line): not a word. {first_line(error)}") from error
    sweep = override.is_sweep_override()
    value = None if sweep else _plain(override.value())
    written = raw if isinstance(value, int | float) else override.get_value_string()  # 2024_01 may be meant as a name
    return Word(override.key_or_group, value, written, "command line", sweep)


def _plain(value: Any) -> Any:
    """Hydra's QuotedString and the like as plain Python."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return getattr(value, "text", value)


def _with_recipes(asked: list[Word], problems: list[str]) -> list[Word]:
    """The words of the recipes, in the order they were named, then everything else."""
    written: list[Word] = []
    for name in [name for word in asked if word.key == "recipe" for name in (word.value if isinstance(word.value, list) else [word.value])]:
        try:
            written += recipe.read(str(name))
        except DtrainError as error:
            problems += getattr(error, "problems", (str(error),))
    return written + [word for word in asked if word.key != "recipe"]


def _settle(words: list[Word]) -> list[Word]:
    """The last word wins; what was said about a choice that lost is dropped with it."""
    final: list[Word] = []
    for word in words:
        group = word.key.removesuffix("._target_")
        replaces = word.key in GROUPS or word.key.endswith("._target_")
        again = any(old.key == word.key and old.value == word.value for old in final)
        lost = [old for old in final if replaces and not again and old.source != word.source and old.key.startswith(f"{group}.")]
        final = [old for old in final if old.key != word.key and old not in lost] + [word]
    return [word for word in final if word.key != "hydra.searchpath"]


def _vocabulary(loader: ConfigLoader, words: Sequence[Word]) -> Vocabulary:
    """What can be said, given the words that were: options of every group, the choices made, targets of the user's own."""
    repository = loader.repository  # type: ignore[attr-defined]

    def node(group: str, name: str) -> dict[str, Any]:
        loaded = repository.load_config(f"{group}/{name}")
        return dict(OmegaConf.to_container(loaded.config, resolve=False) or {}) if loaded else {}  # type: ignore[arg-type]

    options = {group: sorted(loader.get_group_options(group)) for group in GROUPS}
    defaults = dict(pair for entry in repository.load_config("config").defaults_list for pair in _default(entry))
    choices = defaults | {word.key: word.value for word in words if word.key in GROUPS}
    targets = tuple(
        word.key.removesuffix("._target_") for word in words if word.key.endswith("._target_") and word.value != _own_target(word.key, choices, node)
    )
    return Vocabulary(Schema, options, choices, targets, node)


def _own_target(key: str, choices: Mapping[str, Any], node: Callable[[str, str], dict[str, Any]]) -> Any:
    """The target that the chosen word itself has: a saved run says it again."""
    group, *rest = key.split(".")
    if group in LISTS and len(rest) == 2 and rest[0] in choices[group]:
        return node(group, rest[0]).get("_target_")
    return node(group, choices[group]).get("_target_") if len(rest) == 1 and choices.get(group) else None


def _default(entry: Any) -> Iterable[tuple[str, Any]]:
    """(group, word or words) of an entry of the defaults list."""
    group = getattr(entry, "group", None)
    if group in GROUPS:
        yield group, entry.value if isinstance(entry.value, str) else list(entry.value)


def _config(words: Sequence[Word], vocabulary: Vocabulary) -> Config:
    """What Hydra makes of words that were found good."""
    replaced = [group for group in GROUPS if group in vocabulary.targets]
    overrides = [f"~{group}" for group in replaced]
    for word in words:
        if word.key not in replaced and not options.is_one(word.key):
            numeral = isinstance(word.value, int | float) and vocabulary.wants_text(word.key)
            overrides.append(f"{'++' if vocabulary.added(word.key) else ''}{word.key}={quote(word.text) if numeral else word.text}")
    try:
        composed: Any = OmegaConf.to_container(hydra_compose("config", overrides=overrides), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise WordsError(first_line(error)) from error
    kinds = get_type_hints(Schema)
    config = Config(**{key: kinds[key](**value) if is_dataclass(kinds[key]) else value for key, value in composed.items()})
    said = {word.key for word in words}
    for group in replaced:  # a target of the user's own keeps what its word says about itself, when that word was said
        about = vocabulary.node(group, vocabulary.choices[group]).get("_about_") if group in said else None
        getattr(config, group)["_about_"] = about or {}
    config.choices = {group: None if group in replaced else vocabulary.choices[group] for group in GROUPS}
    config.sources = {word.key: word.source for word in words}
    config.options = {
        group: {name: vocabulary.node(group, name) for name in vocabulary.options[group]} for group in GROUPS if vocabulary.choices[group] == "auto"
    }
    missing = [
        f"{group}={config.choices[group]} needs {group}.{key}. Type {group}.{key}=<value>."
        for group in GROUPS
        for key, value in getattr(config, group).items()
        if value == "???"
    ]
    if missing:
        raise WordsError(*missing)
    return config


def _hydra(searchpath: Sequence[str]) -> Hydra:
    """Hydra over conf/ and the user's own folders of words."""
    ConfigStore.instance().store("schema", Schema)
    search = create_config_search_path(f"file://{recipe.folder('conf')}")
    for path in searchpath:
        search.append("command line", path if "://" in path else f"file://{Path(path).resolve()}")
    GlobalHydra.instance().clear()
    return Hydra.create_main_hydra2("dtrain", search)
