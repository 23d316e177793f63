"""The only file that uses Hydra: for values beyond the plain grammar, folders of words on hydra.searchpath, and sweeps.
Imported only for these.
"""

import importlib
import math
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from hydra import compose as hydra_compose
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathElement
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser import overrides_parser, overrides_visitor
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dtrain.config import files
from dtrain.config.constraints import fits, kinds, wants_text
from dtrain.config.facts import wrong
from dtrain.config.grammar import Unread, typed
from dtrain.config.schema import GROUPS, LISTS, NAMED, Schema
from dtrain.config.word import Word, cut, quote
from dtrain.errors import WordsError, first_line
from dtrain.resolve.unknown import UNKNOWN
from dtrain.storage.store import local_path

REFERENCE = re.compile(r"(?<!\\)\$\{\s*(\w+(?:\.\w+)*)\s*\}", re.ASCII)
"""${model.width}: another key."""

if not __debug__:  # this file of Hydra moves on inside of assert statements, which python -O leaves out
    _source = Path(overrides_visitor.__file__).read_text("utf-8")
    exec(compile(_source, overrides_visitor.__file__, "exec", optimize=0), vars(overrides_visitor))
    vars(overrides_parser).update(vars(overrides_visitor))


def read(raw: str) -> list[Any]:
    """The values of `raw`, in the form of dtrain.config.grammar.read. Raises Unread."""
    try:
        override = OverridesParser.create().parse_override(f"key={raw}")
        if not override.is_sweep_override():
            return [_plain(override.value())]
    except (HydraException, RecursionError) as error:
        raise Unread(raw) from error
    return [None, None]  # a sweep: Hydra makes its values later


@dataclass(frozen=True)
class Bounds:
    """`interval(low,high)`; `whole`: of integers."""

    low: float
    high: float
    whole: bool
    tags: frozenset[str]


def sweep_of(raw: str, names: Sequence[str], most: int) -> Bounds | tuple[list[Any], bool]:
    """An interval, or the values of a function such as range(0,4) and whether they are to be shuffled. `names`: those
    that a glob may match.

    Raises ValueError with a sentence if there is no value, or more than `most`.
    """
    try:
        sweep: Any = OverridesParser.create().parse_override(f"key={raw}").value()
    except HydraException as error:
        raise ValueError(f"it cannot be read: {first_line(error)}") from error
    if isinstance(sweep, IntervalSweep):
        return _bounds(sweep)
    if isinstance(sweep, Glob):
        matches = sweep.filter([*names])
        if not matches:
            raise ValueError(f"no name matches. There are: {', '.join(names) or 'none, because it is no group'}.")
        return list(matches), False
    if isinstance(sweep, ChoiceSweep):
        return [_plain(value) for value in sweep.list or ()], sweep.shuffle
    count = math.ceil((sweep.stop - sweep.start) / sweep.step) if sweep.step else math.inf
    if count > most:
        raise ValueError(f"{count:,} values. A sweep has at most {most:,} jobs.")
    if count <= 0:
        raise ValueError("an empty range. Its end is left out: range(0,3) is 0, 1, 2.")
    return list(sweep.range()), sweep.shuffle


def _bounds(sweep: IntervalSweep) -> Bounds:
    low, high = float(sweep.start or 0), float(sweep.end or 0)
    tags = frozenset(map(str, sweep.tags))
    if unknown := tags - {"log", "int"}:
        raise ValueError(f"an interval may have the tags log and int, not {', '.join(sorted(unknown))}.")
    whole = "int" in tags or isinstance(sweep.start, int)
    if not low < high:
        swapped = f" Type interval({high:g},{low:g})." if low > high else ""
        raise ValueError(f"the interval from {low:g} to {high:g} is empty.{swapped}")
    if whole and math.ceil(low) > math.floor(high):
        raise ValueError(f"there is no integer from {low:g} to {high:g}.")
    if "log" in tags and low <= 0:
        raise ValueError("the logarithm of an interval needs a lower bound above 0.")
    if whole:
        low, high = float(math.ceil(low)), float(math.floor(high))
    return Bounds(low, high, whole, tags)


def _plain(value: Any) -> Any:
    """Hydra's QuotedString and similar types as plain Python."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return getattr(value, "text", value)


class Shelf:
    """The words of conf/ and of the user's own folders on hydra.searchpath."""

    def __init__(self, searchpath: Sequence[str]) -> None:
        self._repository = _hydra(searchpath).config_loader.repository  # type: ignore[attr-defined]
        self.words = {group: sorted(self._repository.get_group_options(group)) for group in (*GROUPS, *NAMED.values())}

    def node(self, group: str, word: str) -> files.Node:
        """The arguments of a word as in its file. Raises WordsError if the file is no YAML."""
        if (files.folder("conf") / group / f"{word}.yaml").is_file():  # first on the search path too
            return files.node(group, word)
        try:
            loaded = self._repository.load_config(f"{group}/{word}")
            plain: Any = OmegaConf.to_container(loaded.config, resolve=False) if loaded else {}
            node: files.Node = dict(plain or {})
        except Exception as error:  # YAML loaders raise many exceptions
            raise WordsError(f"{group}={word}: its file cannot be read: {first_line(error)}") from error
        if problems := [f"{group}={word}: _about_ {sentence}" for _, sentence in wrong(group, node.get("_about_"))]:
            raise WordsError(*problems)
        return node


def composed(words: Sequence[Word], replaced: Sequence[str], paths: Mapping[tuple[str, str], Path]) -> files.Node:
    """Hydra's composition of the words chosen for groups, over the folders of the last Shelf; without the groups
    `replaced` by targets of the user's own. `paths`: the files of words of the user's own.
    """
    overrides = [f"~{group}" for group in replaced]
    overrides += [str(word) for word in words if word.key not in replaced]
    try:
        composed = hydra_compose("config", overrides=overrides)
        return OmegaConf.to_container(composed, resolve=False)  # type: ignore[return-value]
    except Exception as error:  # from Hydra, OmegaConf or the YAML loader
        names = ((word.key, name) for word in words for name in ([*word.value] if word.key in LISTS else [word.value]))
        own = " ".join(str(paths[name]) for name in names if name in paths) or " ".join(map(str, words))
        reason = str(error).partition("Config search path")[0] or str(error.__cause__).partition("\n")[0]
        raise WordsError(f"{own}: cannot be composed: {cut(' '.join(reason.split()), 300).rstrip('.')}.") from error


def resolved(
    tree: Mapping[str, Any], words: Sequence[Word], allowed: Callable[[str], Any], choices: Mapping[str, Any]
) -> list[str]:
    """Resolve the references `${...}` in the values of `words` and put the results into `tree`. In a text, a group
    stands for its word in `choices`. One sentence for each that cannot be resolved.
    """
    for word in words:
        _put(tree, word.key, _with_words(word.value, allowed(word.key), choices))
    broken_words = {
        word.key: f"{cut(str(word))} ({word.source}): {why}." for word in words if (why := broken(word.value))
    }
    problems = list(broken_words.values())
    for key in broken_words:
        _put(tree, key, None)  # a value that OmegaConf can hold
    whole = OmegaConf.create(dict(tree))
    for key in broken_words:
        _put(tree, key, UNKNOWN)
    for word in [word for word in words if word.key not in broken_words]:
        *path, name = word.key.split(".")
        if part := _part_in_text(tree, word.key):
            problems.append(
                f"{cut(str(word))} ({word.source}): {part} holds several values, not a text. Type ${{{part}.<a name>}} "
                "for one of them."
            )
            _put(tree, word.key, UNKNOWN)
            continue
        try:
            holder: Any = whole
            for part in path:
                holder = holder[part]
            value = holder[name]
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            if isinstance(value, str) and not fits(value, allowed(word.key) or "any"):  # environment variables are text
                value = typed(value)
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and wants_text(value, allowed(word.key) or "any")
            ):
                value = str(value)
        except (OmegaConfBaseException, RecursionError, TypeError, KeyError, ValueError) as error:
            problems.append(f"{word} ({word.source}): {_unresolved(error)}.")
            value = UNKNOWN
        _put(tree, word.key, value)
    return problems


def _with_words(value: Any, allowed: Any, choices: Mapping[str, Any]) -> Any:
    """`value`; if it is a text, with the words of the groups that it refers to."""
    takes_text = any(kind in ("text", "some text") for kind in kinds(allowed or "any"))
    if not isinstance(value, str) or (REFERENCE.fullmatch(value) and not takes_text):
        return value
    return REFERENCE.sub(lambda found: choices[found[1]] if isinstance(choices.get(found[1]), str) else found[0], value)


def _part_in_text(tree: Mapping[str, Any], key: str) -> str:
    """The first key that the text at `key` refers to and that holds several values; empty if there is none."""
    text = _at(tree, key)
    if not isinstance(text, str) or REFERENCE.fullmatch(text):
        return ""
    return next((found[1] for found in REFERENCE.finditer(text) if isinstance(_at(tree, found[1]), dict | list)), "")


def _at(tree: Any, key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


UNSET = re.compile(r"Environment variable '(.*?)' not found")
NO_RESOLVER = re.compile(r"Unsupported interpolation type (\w+)|HydraConfig was not set")
"""The error of OmegaConf, and of Hydra once that is imported."""
NO_KEY = re.compile(r"Interpolation key '(.*?)' not found")


def _unresolved(error: Exception) -> str:
    """Why a reference has no value, and what to type."""
    unset = UNSET.search(str(error))
    if unset:
        name = unset[1]
        typed_first = f"Type export {name}=<value> first, or ${{oc.env:{name},<value>}}"
        return f"the environment variable {name} is not set. {typed_first}"
    if no_key := NO_KEY.search(str(error)):
        return f"there is no key {no_key[1]} to refer to. Type ${{<a key of the run>}}, or the value itself"
    if kind := NO_RESOLVER.search(str(error)):
        hint = "a day by $(date +%F) of the shell" if kind[1] == "now" else "the value itself"
        return (
            f"${{{kind[1] or 'hydra'}:...}} has no meaning here. There are ${{<a key of the run>}} and "
            f"${{oc.env:<a variable>}}; type {hint}"
        )
    return "it refers to itself" if "Recursive" in str(error) else first_line(error).rstrip(".")


def broken(value: Any) -> str:
    """The mistake in a value with references; empty if there is none."""
    try:
        OmegaConf.create({"value": value})
    except (OmegaConfBaseException, RecursionError):
        return "${ begins a reference, which cannot be read. Type ${<another key>}, or \\${ for the plain text"
    return ""


def _put(tree: Any, key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        tree = tree[part]
    tree[name] = value


def jobs(swept: Sequence[Word]) -> list[Sequence[str]]:
    """The words of every combination of a sweep. Raises WordsError if Hydra's own sweeper cannot read it."""
    try:
        batches = BasicSweeper.split_arguments(
            OverridesParser.create().parse_overrides([str(word) for word in swept]), None
        )
    except HydraException as error:
        raise WordsError(
            f"{' '.join(map(str, swept))} (command line): {cut(first_line(error))}. Type the values: seed=0,1,2."
        ) from error
    return [words for batch in batches for words in batch]


QUIET = ("hydra/job_logging=none", "hydra/hydra_logging=none")


def launched(
    words: Sequence[str], work: Callable[[Any], Any], number: int | None, searchpath: Sequence[str]
) -> list[Any]:
    """Start workers by the launcher that the words choose, and return what `work` returned in each. `number`: of the
    workers; None: as many as the launcher's n_jobs, or one. Raises WordsError.
    """
    hydra, config = configured(words, searchpath)
    settings = config.hydra.launcher
    number = number or max(1, int(settings.get("n_jobs") or 1))
    if "n_jobs" in settings:
        settings.n_jobs = number
    try:
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(context, work, config)
        return [job.return_value for job in launcher.launch([[]] * number, 0)]
    except (HydraException, OmegaConfBaseException, ImportError) as error:
        raise WordsError(f"hydra/launcher: {first_line(error)}") from error


def configured(words: Sequence[str], searchpath: Sequence[str]) -> tuple[Hydra, Any]:
    """Hydra, and its config with the words of a launcher. Raises WordsError, also for one that is not installed."""
    hydra = _hydra(searchpath)
    try:
        return hydra, hydra.compose_config("config", [*words, *QUIET], RunMode.MULTIRUN, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise WordsError(f"hydra/launcher: {cut(' '.join(str(error).split()), 300)}") from error


class Batches(Launcher):
    """Stands for the launcher of a sweeper: gives its proposals to `run`, and returns the figures of the jobs."""

    run: Callable[[Sequence[Sequence[str]]], Sequence[Any]]

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: Any) -> None:
        """It needs nothing of these."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        figures = Batches.run(job_overrides)
        return [
            JobReturn(
                overrides=list(words),
                status=JobStatus.FAILED if isinstance(figure, Exception) else JobStatus.COMPLETED,
                _return_value=figure,
            )
            for words, figure in zip(job_overrides, figures, strict=True)
        ]


def proposed(
    words: Sequence[str], run: Callable[[Sequence[Sequence[str]]], Sequence[Any]], searchpath: Sequence[str]
) -> None:
    """Have the sweeper that the words choose propose the words of jobs, in batches. `run` returns the figure of each
    job, or the exception that it failed of. Raises WordsError.
    """
    hydra = _hydra(searchpath)
    _register(Batches)
    Batches.run = staticmethod(run)
    with tempfile.TemporaryDirectory() as folder:  # Hydra writes a file there, and only to local folders
        try:
            hydra.multirun(
                "config", lambda _: None, [*words, *QUIET, "hydra/launcher=dtrain", f"hydra.sweep.dir={quote(folder)}"]
            )
        except (HydraException, OmegaConfBaseException, ImportError) as error:
            raise WordsError(f"hydra/sweeper: {cut(' '.join(str(error).split()), 300)}") from error


def _register(launcher: type[Launcher]) -> None:
    """Name a launcher `dtrain`. Hydra takes plugins of the package hydra_plugins alone, which need not be there."""
    name = "hydra_plugins.dtrain"
    parent = sys.modules.get("hydra_plugins")
    try:
        parent = parent or importlib.import_module("hydra_plugins")
    except ImportError:
        parent = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        parent.__path__ = []
    module = ModuleType(name)
    module.__path__ = []
    vars(module)[launcher.__name__] = launcher
    launcher.__module__ = name
    sys.modules[name] = vars(parent)["dtrain"] = module
    Plugins.instance().register(launcher)
    ConfigStore.instance().store(
        group="hydra/launcher", name="dtrain", node={"_target_": f"{name}.{launcher.__name__}"}, provider="dtrain"
    )


def _hydra(searchpath: Sequence[str]) -> Hydra:
    """Hydra over conf/ and the user's own folders of words. Raises WordsError if a plugin of Hydra's, all of which it
    imports, cannot be.
    """
    try:
        Plugins.instance()
    except Exception as error:
        plugins = [frame.filename for frame in extract_tb(error.__traceback__) if "hydra_plugins" in frame.filename]
        raise WordsError(
            f"Hydra imports every plugin that is installed, and {['one', *plugins][-1]} cannot be: "
            f"{type(error).__name__}: {cut(first_line(error))}. Update it, or uninstall it."
        ) from error
    ConfigStore.instance().store("schema", Schema)
    search = create_config_search_path(f"file://{files.folder('conf')}")
    for path in searchpath:
        url = path if path.startswith("pkg://") else f"file://{local_path(path).resolve()}"
        search.get_path().insert(-1, SearchPathElement("command line", url))  # the schema has to stay last
    GlobalHydra.instance().clear()
    return Hydra.create_main_hydra2("dtrain", search)
