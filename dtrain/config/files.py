"""The words at hand: what the YAML files of conf/ and recipes/ say, each read once. Without Hydra, OmegaConf and torch.

`python -m dtrain --help` shows them, `python -m dtrain optim --help` what the words of a group take.
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


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain YAML in which 1e-3 is a number, as in OmegaConf."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.[\d_]*(?:e[-+]?\d+)?|\d[\d_]*e[-+]?\d+|\.\d[\d_]*(?:e[-+]?\d+)?)", re.IGNORECASE),
    list("-+0123456789."),
)


def folder(name: str) -> Path:
    """conf/, recipes/ or project/: inside the package when installed as a wheel, beside it in a checkout."""
    here = Path(dtrain.__file__).resolve().parent
    for path in (here / name, here.parent / name):
        if path.is_dir():
            return path
    raise WordsError(f"dtrain is not installed whole: there is no {name}/ inside or beside {here}.")


_beside: list[Path] = []


@contextmanager
def beside(folders: Sequence[Path]) -> Iterator[None]:
    """Inside, the words of these folders are at hand as well, behind ours."""
    before = [*_beside]
    try:
        _set_beside(folders)
        yield
    finally:
        _set_beside(before)


def _set_beside(folders: Sequence[Path]) -> None:
    _beside[:] = folders
    groups.cache_clear()
    _node.cache_clear()


def path(group: str, word: str) -> Path:
    """The file of a word; ours comes before another of its name."""
    places = [place / group / f"{word}.yaml" for place in (folder("conf"), *_beside)]
    return next((place for place in places if place.is_file()), places[0])


@cache
def groups() -> Mapping[str, list[str]]:
    """group -> its words."""
    ours = [path.name for path in folder("conf").iterdir() if path.is_dir()]
    found = {
        name: sorted({file.stem for place in (folder("conf"), *_beside) for file in (place / name).glob("*.yaml")})
        for name in ours
    }
    return {group: words for group, words in found.items() if words and not group.startswith("_")}


@cache
def recipes() -> Mapping[str, Path]:
    return {path.stem: path for path in sorted(folder("recipes").glob("*.yaml"))}


def node(group: str, word: str) -> Node:
    """The arguments of a word as its file has them: a copy."""
    made: Node = copied(_node(group, word))
    return made


@cache
def _node(group: str, word: str) -> Node:
    return _read(path(group, word))


def _read(path: Path) -> Node:
    try:
        written: Any = yaml.load(path.read_text("utf-8"), Loader)
        return dict(written or {})
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:
        raise WordsError(f"{path}: a word is a mapping of its arguments in YAML: {first_line(error)}") from error


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def sentences(path: Path) -> dict[str, str]:
    """dotted key -> the comment behind it; under the empty key, the comment that the file begins with."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in path.read_text("utf-8").splitlines():
        key = re.match(r"( *)([\w]+):", line)
        _, _, comment = line.partition(" # ")
        if line.startswith("# ") and not line.startswith("# @package"):
            found.setdefault("", line[2:])
        elif key:
            above = [entry for entry in above if entry[0] < len(key[1])] + [(len(key[1]), key[2])]
            found[".".join(name for _, name in above)] = comment
    return found
