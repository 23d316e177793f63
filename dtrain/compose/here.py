"""Settings of the working folder: its words in ./conf, and in ./dtrain.yaml the packages whose code may run, and more
folders of words.

    trust: [mypkg]                  # dtrain.yaml
    searchpath: [more/words]

They are shown in one line before anything runs. The command line comes after them and wins: trust=[] switches the first
one off.
"""

import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

import yaml

from dtrain.config import files
from dtrain.config.facts import wrong
from dtrain.config.files import FILE, FOLDER
from dtrain.config.schema import GROUPS, NAMED
from dtrain.config.word import Word, cut, spelling, text
from dtrain.recipe.document import Node, Slip, parse
from dtrain.recipe.project import home_of
from dtrain.secrets import screen
from dtrain.storage.store import is_local, local_path

SAYS = {"trust": "trust", "searchpath": "hydra.searchpath"}
"""Key of the file -> its word."""
PACKAGE = "pkg://"


class Own(NamedTuple):
    """Words of the user's own as (group, word): the files of those that can be used, and why the others cannot."""

    files: dict[tuple[str, str], Path]
    refused: dict[tuple[str, str], str]

    @property
    def complaints(self) -> list[str]:
        """A sentence for each file that cannot be used; one for all that have the name of a word of dtrain."""
        named = [sentence for (group, word), sentence in self.refused.items() if word in files.own(group)]
        more = [f"{len(named) - 1} other file(s) have the name of a word of dtrain too."] if len(named) > 1 else []
        return [*(sentence for sentence in self.refused.values() if sentence not in named), *named[:1], *more]


class Here(NamedTuple):
    """The settings found. `note`: one line for the user; empty if there are none."""

    words: Sequence[Word] = ()
    problems: Sequence[str] = ()
    note: str = ""


def look() -> Here:
    """The words of the working folder. A file that another user owns or may write is not read: its author could choose
    what code runs.
    """
    words, problems, notes = list[Word](), list[str](), list[str]()
    if FILE.is_file():
        if FILE.stat().st_uid not in (os.getuid(), 0) or FILE.stat().st_mode & 0o002:
            notes.append(
                f"{FILE} is not read: another user owns it, or may write it. chown or chmod it, or type its words"
            )
        else:
            for word, problem in _read():
                words += [word] if word else []
                problems += [problem] if problem else []
            if words:
                notes.append(f"{FILE}: {' '.join(cut(f'{word.key}={spelling(word.value)}') for word in words)}")
    own = own_words([FOLDER]) if FOLDER.is_dir() and not FOLDER.samefile(files.folder("conf")) else Own({}, {})
    if own.files or own.refused:
        words.append(Word("hydra.searchpath", [str(FOLDER)], f"[{FOLDER}]", f"./{FOLDER}"))
    if own.files:
        keys = {group: key for key, group in NAMED.items()}
        notes.append(f"./{FOLDER}: {cut(' '.join(f'{keys.get(group, group)}={word}' for group, word in own.files))}")
    if own.refused:
        notes.append(f"not used: {' '.join(own.complaints).removesuffix('.')}")
    return Here(words, problems, f"of this folder: {'; '.join(notes)}" if notes else "")


def _read() -> Iterator[tuple[Word | None, str]]:
    """A word, or a mistake, for each key of the file."""
    try:
        document = parse(FILE.read_bytes()).value
    except Slip as slip:
        yield None, f"{FILE}:{slip.line}: {slip}"
        return
    for key, node in document.items() if isinstance(document, dict) else ():
        value, source = node.plain(), f"{FILE}:{node.line}"
        if key not in SAYS:
            only = "only trust and searchpath stand here. Words of a run are a recipe: type recipe=<file>."
            yield None, f"{source}: {cut(key)}: {only}"
        elif not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            example = "mypkg" if key == "trust" else "my/words"
            yield None, f"{source}: {key}: it is a list of names. Write {key}: [{example}]."
        else:
            yield Word(SAYS[key], value, text(value), source), ""


def own_words(folders: Sequence[Path]) -> Own:
    """The words in some folders; of two with the same name that in the first folder counts."""
    own = Own({}, {})
    for folder in folders:
        for group in (*GROUPS, *NAMED.values()):
            for path in sorted((folder / group).glob("*.yaml")):
                word = group, path.stem
                if word in own.files or word in own.refused:
                    continue
                if problem := _unreadable(path, *word):
                    own.refused[word] = problem
                else:
                    own.files[word] = path
    return own


def _unreadable(path: Path, group: str, word: str) -> str:
    """Why the file of a word cannot be used, with its line; empty if it can."""
    if word in files.own(group):
        return f"{path}: dtrain's own {group}={word} is used. Rename the file to use yours."
    if not path.is_file():
        return f"{path}: neither a file nor a link to one."
    try:
        document = parse(path.read_bytes())
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}."
    except Slip as slip:
        return f"{path}:{slip.line}: {slip}"
    if not isinstance(document.value, dict):
        return f"{path}:1: a word is a mapping of its arguments."
    return next((f"{path}:{line}: {sentence}" for line, sentence in _mistakes(path, document, group)), "")


def _mistakes(path: Path, document: Node, group: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) for each mistake in the file of a word: its names, its references and its facts."""
    word, tree = document.value, cast("yaml.MappingNode", yaml.compose(path.read_bytes(), files.Loader))
    for key, _ in tree.value:
        if (kind := key.tag.rpartition(":")[2]) != "str":
            yield key.start_mark.line + 1, f"{key.value}: YAML reads it as {kind}, and the name of an argument is text."
    for name, node in word.items():
        if "${" in str(node.plain()):
            from dtrain.compose.hydra import broken

            if why := broken(node.plain()):
                yield node.line, f"{name}: {why}."
    arguments = None if "defaults" in word else [name for name in word if name[0] != "_"]
    for names, sentence in wrong(group, word["_about_"].plain() if "_about_" in word else None, arguments):
        yield _line(word["_about_"], names), f"_about_ {sentence}"


def place(path: Path, names: Sequence[str]) -> str:
    """Where a word's file has the value that some names lead to."""
    return f"{path}:{_line(parse(path.read_bytes()), names)}"


def _line(node: Node, names: Sequence[str]) -> int:
    """The line of the value that names lead to, as far as they do."""
    for name in names:
        if not isinstance(node.value, dict) or name not in node.value:
            break
        node = node.value[name]
    return node.line


def above(url: str, group: str, word: str) -> Path | None:
    """The folder of words beside a recipe of this machine, or beside a folder above it, that has a word."""
    places = [folder / FOLDER for folder in local_path(url).resolve().parents] if word.isidentifier() else []
    return next((place for place in places if (place / group / f"{word}.yaml").is_file()), None)


def searchpath(words: Sequence[Word], problems: list[str]) -> list[str]:
    """The folders and packages of the user's own words that some words name, and the folder `conf` of each package that
    they trust; mistakes are added to `problems`.
    """
    paths = list[str]()
    for word in words:
        if word.key != "hydra.searchpath":
            continue
        if isinstance(word.value, list):
            paths += map(str, word.value)
        else:
            instead = screen.typed(f"{word.key}=[{cut(word.text) or '<folder>'}]")
            problems.append(f"{cut(str(word))} ({word.source}): a list of folders. Type {instead}.")
    mistakes = {path: mistake for path in paths if (mistake := _mistake(path))}
    problems += [f"hydra.searchpath=[{cut(path)}]: {mistake}" for path, mistake in mistakes.items()]
    homes = filter(None, map(home_of, trusted(words)))
    brought = [str(home / FOLDER) for home in homes if (home / FOLDER).is_dir()]
    return [*(path for path in paths if path not in mistakes), *brought]


def trusted(words: Sequence[Word]) -> list[str]:
    """The packages that the words trust."""
    last = next((word.value for word in reversed(words) if word.key == "trust"), None)
    return [str(package) for package in last] if isinstance(last, list) else []


def strangers(words: Sequence[Word]) -> list[str]:
    """The packages that the words of a run name, and of which no words are known: they are not trusted, or not here."""
    values = [str(word.value) for word in words if word.key.endswith("._target_")]
    named = dict.fromkeys(value.partition(".")[0] for value in values if "." in value)
    known = {"dtrain", "torch", *(package for package in trusted(words) if home_of(package))}
    return [name for name in named if name not in known and name.isidentifier()]


def _mistake(path: str) -> str:
    """Why words cannot be read from a folder or package; empty if they can."""
    if path.startswith(PACKAGE):
        name = re.split(r"[./]", path.removeprefix(PACKAGE))[0]
        return "" if name and find_spec(name) else "there is no such package."
    if not is_local(path):
        return "words come from a folder of this machine or from a package. Type hydra.searchpath=[<folder>]."
    try:
        folder = local_path(path)
    except ValueError as error:
        return f"{error}."
    if folder.is_dir():
        return ""
    return "a file, not a folder." if folder.exists() else "there is no such folder."


def folders(searchpath: Sequence[str]) -> list[Path]:
    """The folders on a searchpath, without its packages."""
    return [local_path(path) for path in searchpath if not path.startswith(PACKAGE)]
