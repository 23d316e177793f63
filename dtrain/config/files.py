"""Reads the available words from the YAML files of conf/ and recipes/, each once, without Hydra, OmegaConf and torch.

`python -m dtrain --help` lists them, `python -m dtrain optim --help` shows the arguments of the words of a group.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import dtrain
from dtrain.errors import WordsError, first_line

Node = dict[str, Any]
FILE, FOLDER = Path("dtrain.yaml"), Path("conf")
"""Settings and words that a working folder may bring."""


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain YAML in which 1e-3 is a number, as in OmegaConf."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.[\d_]*(?:e[-+]?\d+)?|\d[\d_]*e[-+]?\d+|\.\d[\d_]*(?:e[-+]?\d+)?)", re.IGNORECASE),
    list("-+0123456789."),
)


def folder(name: str) -> Path:
    """Path of conf/, recipes/ or project/: inside the package if installed as a wheel, next to it in a checkout."""
    here = Path(dtrain.__file__).resolve().parent
    for path in (here / name, here.parent / name):
        if path.is_dir():
            return path
    raise WordsError(f"the installation of dtrain is incomplete: no {name}/ inside or next to {here}.")


def may_be_beside(words: Sequence[str]) -> bool:
    """Whether a command with these words may have words of the user's own. That is known without reading them."""
    has_folder = FOLDER.is_dir() and not FOLDER.samefile(folder("conf"))
    return has_folder or FILE.exists() or any(word.startswith(("hydra.searchpath=", "trust=")) for word in words)


_beside: dict[tuple[str, str], Path] = {}
"""(group, word) -> the file of a word of the user's own."""


@contextmanager
def beside(words: Mapping[tuple[str, str], Path]) -> Iterator[None]:
    """Make words of the user's own available inside the context."""
    before = {**_beside}
    try:
        _set_beside(words)
        yield
    finally:
        _set_beside(before)


def _set_beside(words: Mapping[tuple[str, str], Path]) -> None:
    _beside.clear()
    _beside.update(words)
    groups.cache_clear()
    _node.cache_clear()


def path(group: str, word: str) -> Path:
    """The file of a word."""
    return _beside.get((group, word)) or folder("conf") / group / f"{word}.yaml"


@cache
def groups() -> Mapping[str, list[str]]:
    """group -> its words."""
    ours = [path.name for path in folder("conf").iterdir() if path.is_dir() and path.name[0] != "_"]
    words = {group: sorted({*own(group), *(word for of, word in _beside if of == group)}) for group in ours}
    return {group: names for group, names in words.items() if names}


def own(group: str) -> list[str]:
    """dtrain's own words of a group."""
    return [path.stem for path in (folder("conf") / group).glob("*.yaml")]


@cache
def recipes() -> Mapping[str, Path]:
    return {path.stem: path for path in sorted(folder("recipes").glob("*.yaml"))}


def node(group: str, word: str) -> Node:
    """A copy of the arguments in the file of a word."""
    arguments: Node = copied(_node(group, word))
    return arguments


@cache
def _node(group: str, word: str) -> Node:
    return _read(path(group, word))


def _read(path: Path) -> Node:
    try:
        written: Any = yaml.load(path.read_text("utf-8"), Loader)
        return dict(written or {})
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:
        raise WordsError(f"{path}: a word is a mapping of its arguments in YAML: {first_line(error)}") from error


def own_word(target: str) -> tuple[str, str]:
    """(group, word) of a target of dtrain's own, as dtrain.launcher.ssh.Ssh, dtrain.integrations.ray.launcher.Ray;
    empty texts for another.
    """
    top, first, second, third, *_ = (*target.split("."), "", "", "")
    if top != "dtrain":
        return "", ""
    return (third, second) if first == "integrations" else (first, second)


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def sentences(path: Path) -> dict[str, str]:
    """dotted key -> the comment after it; the empty key has the first comment of the file."""
    comments: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in path.read_text("utf-8").splitlines():
        key = re.match(r"( *)([\w]+):", line)
        _, _, comment = line.partition(" # ")
        if line.startswith("# ") and not line.startswith("# @package"):
            comments.setdefault("", line[2:])
        elif key:
            above = [entry for entry in above if entry[0] < len(key[1])] + [(len(key[1]), key[2])]
            comments[".".join(name for _, name in above)] = comment
    return comments
