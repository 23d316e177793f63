"""Asks once whether the Hugging Face hub answers, before trusted code first imports its client: offline, that client
would retry for a minute or more.

    HF_HUB_OFFLINE=1 dtrain plan model._target_=transformers.AutoModel.from_pretrained ...  # only use the cache
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from dtrain.errors import PreflightError, first_line
from dtrain.secrets import screen

CLIENT, HUB, SCHEME = "huggingface_hub", "https://huggingface.co", "hf://"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Variables with which the user chooses; the client reads them at import."""
NAME, REPOSITORY = "pretrained_model_name_or_path", re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
OF_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
ORGANISATIONS = {
    "bert": "google-bert", "gpt2": "openai-community", "distilbert": "distilbert", "distilgpt2": "distilbert",
    "roberta": "FacebookAI", "xlm": "FacebookAI", "t5": "google-t5", "albert": "albert", "xlnet": "xlnet",
}  # fmt: skip
"""How the names of models begin that are known without an organisation -> theirs."""


class _Asking:
    """An import finder for the client of the hub, which checks the hub before the client is executed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == CLIENT else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def ask_first(module: ModuleType) -> None:
            note = _ask()
            execute(module)
            if note:
                _tell_when_needed(note)

        vars(spec.loader)["exec_module"] = ask_first
        return spec


def watch() -> None:
    """From now on, check the hub before its client is imported, unless the user has chosen. If it does not answer, this
    process and its children work offline.
    """
    if CLIENT not in sys.modules and not any(isinstance(each, _Asking) for each in sys.meta_path):
        sys.meta_path.insert(0, _Asking())


def is_offline() -> bool:
    """Whether this process works offline, by its user's choice or because the hub did not answer."""
    return os.environ.get(OFFLINE[0], "0") == "1"


def stay_offline() -> None:
    """Work offline, as a child of this process does, which has told why."""
    os.environ.setdefault(OFFLINE[0], "1")


def named(part: Any, key: str) -> Iterator[tuple[str, str]]:
    """(key, name) of the hub models and tokenizers that a part of the plan loads, as far as the config shows."""
    if isinstance(part, Mapping):
        name = part.get(NAME)
        loads = str(part.get("_target_")).endswith(".from_pretrained") and "cache_dir" not in part
        if loads and isinstance(name, str) and REPOSITORY.fullmatch(name) and not Path(name).exists():
            yield f"{key}.{NAME}", name
        for below, value in part.items():
            yield from named(value, f"{key}.{below}")
    elif isinstance(part, list | tuple):
        for below, value in enumerate(part):
            yield from named(value, f"{key}.{below}")


def place(name: str) -> str:
    """The URL of a model: hf://<organisation>/<name>[@revision] for one of the hub; a folder or URL as it is. Raises
    PreflightError for a link to nothing, which is not meant as a name of the hub.
    """
    if "://" not in name and (lost := broken_link(name)):
        raise PreflightError(f"{name}: {lost}")
    is_of_the_hub = "://" not in name and not Path(name).exists() and OF_THE_HUB.fullmatch(name)
    return f"{SCHEME}{name}" if is_of_the_hub else name


def longer(name: str) -> str:
    """A sentence with the name that the hub has for a model that is known by a short one; empty for others."""
    begin = re.split("[-_]", name)[0]
    return f" On the hub it is {ORGANISATIONS[begin]}/{name}." if begin in ORGANISATIONS and "/" not in name else ""


def broken_link(name: str) -> str:
    """A sentence about the link in a path that leads to nothing, or to itself; empty if there is none."""
    for path in (Path(name), *Path(name).parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, where nothing is. Make the link again, or name the folder."
    return ""


def read(url: str, file: str) -> bytes:
    """A small file of a repository at hf://<organisation>/<name>[@revision], kept in the client's cache, which is all
    that is read offline. Raises PreflightError.
    """
    name, _, revision = url.removeprefix(SCHEME).partition("@")
    try:
        return Path(client(url).hf_hub_download(name, file, revision=revision or None)).read_bytes()
    except (OSError, ValueError) as error:  # its own are of both classes
        reason = absent(name) or first_line(error).rstrip(".")
        here = _not_here(name)
        raise PreflightError(f"{url}: {file} cannot be read from the Hugging Face hub: {reason}{here}.") from error


def files(url: str, names: Sequence[str]) -> dict[str, bytes]:
    """Name -> bytes of those of these files that a repository has. Raises PreflightError as `read`."""
    name, _, revision = url.removeprefix(SCHEME).partition("@")
    try:
        place = Path(client(url).snapshot_download(name, revision=revision or None, allow_patterns=[*names]))
    except (OSError, ValueError) as error:
        reason = absent(name) or first_line(error).rstrip(".")
        raise PreflightError(f"{url} cannot be read from the Hugging Face hub: {reason}{_not_here(name)}.") from error
    return {each: (place / each).read_bytes() for each in names if (place / each).is_file()}


def _not_here(name: str) -> str:
    """The end of a sentence for a name that may be meant as a folder here, with the nearest one."""
    folder, last = Path(name).parent, Path(name).name
    if not folder.is_dir():
        there = {path.name for path in Path().iterdir() if (path / last).is_dir()}
        near = [f"{each}/{last}" for each in get_close_matches(str(folder), there, n=1, cutoff=0.5)]
    else:
        there = {path.name for path in folder.iterdir() if path.is_dir()}
        near = [f"{folder}/{each}" for each in get_close_matches(last, there, n=1, cutoff=0.5)]
    if not near:
        return f"; and there is no folder {name}" if folder.is_dir() else ""
    return f"; and there is no folder {name}, but {near[0]}"


def client(url: str) -> Any:
    """The client of the hub, for a repository at `url`. Raises PreflightError without its package."""
    watch()
    try:
        import huggingface_hub
    except ImportError as error:
        raise PreflightError(f"{url}: huggingface_hub is not installed. Type pip install 'dtrain[hf]'.") from error
    return huggingface_hub


def absent(name: str) -> str:
    """Why no file of a hub model can be loaded here; empty if one may be."""
    watch()
    try:
        from huggingface_hub import constants
    except ImportError:
        return ""
    if not constants.HF_HUB_OFFLINE or Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").exists():
        return ""
    return f"offline, and {constants.HF_HUB_CACHE} has nothing of it"


def look_for(url: str) -> None:
    """Raises PreflightError for a repository of which no file can be read here."""
    name = url.removeprefix(SCHEME).partition("@")[0]
    if reason := absent(name):
        raise PreflightError(f"{url} cannot be read from the Hugging Face hub: {reason}{_not_here(name)}.")


def _ask() -> str:
    """Work offline if the hub does not answer and the user has not chosen. Returns a note about that, else an empty
    text.
    """
    from dtrain.storage.answering import silence  # the modules of TLS and HTTP

    url = os.environ.get("HF_ENDPOINT", HUB)
    if any(name in os.environ for name in OFFLINE) or not (why := silence(url)):
        return ""
    os.environ[OFFLINE[0]] = "1"
    return (
        f"{url} does not answer ({why}), so only what is in the cache of this machine is loaded. To let the client of "
        f"the hub try and wait, set {OFFLINE[0]}=0."
    )


def _tell_when_needed(note: str) -> None:
    """Print the note when the client first lacks a file for want of a network: many packages import it and use none."""
    from huggingface_hub import errors

    told = list[str]()
    kind = errors.LocalEntryNotFoundError  # OfflineModeIsEnabled is raised, and caught, for files of the cache too
    vars(errors)[kind.__name__].__init__ = _telling(kind.__init__, note, told)


def _telling(begin: Callable[..., None], note: str, told: list[str]) -> Callable[..., None]:
    def tell(error: Exception, *arguments: Any, **named: Any) -> None:
        if not told and os.environ.get("RANK", "0") == "0":
            told.append(note)
            screen.complain(note, begin="note: ")
        begin(error, *arguments, **named)

    return tell
