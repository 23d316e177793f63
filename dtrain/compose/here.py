"""Settings of the working folder: its words in ./conf, and in ./dtrain.yaml the packages whose code may run, and more
folders of words.

    trust: [mypkg]                  # dtrain.yaml
    searchpath: [more/words]

They are shown in one line before anything runs. The command line comes after them and wins: trust=[] switches the first
one off.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dtrain.config import files
from dtrain.config.schema import GROUPS, NAMED
from dtrain.config.word import Word, cut, spelling, text
from dtrain.recipe.document import Slip, parse
from dtrain.storage.store import is_local, local_path

FILE, FOLDER = Path("dtrain.yaml"), Path("conf")
SAYS = {"trust": "trust", "searchpath": "hydra.searchpath"}
"""Key of the file -> its word."""


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
    own = own_words(FOLDER) if FOLDER.is_dir() and not FOLDER.samefile(files.folder("conf")) else []
    if own:
        words.append(Word("hydra.searchpath", [str(FOLDER)], f"[{FOLDER}]", f"./{FOLDER}"))
        notes.append(f"./{FOLDER}: {cut(' '.join(own))}")
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


def own_words(folder: Path) -> list[str]:
    """`model=mine` for each word in a folder of words."""
    keys = {group: group for group in GROUPS} | {group: key for key, group in NAMED.items()}
    return [f"{key}={path.stem}" for group, key in keys.items() for path in sorted((folder / group).glob("*.yaml"))]


def folders(words: Sequence[Word]) -> list[Path]:
    """The local folders on the searchpath among some words."""
    named = [
        path
        for word in words
        if word.key == "hydra.searchpath" and isinstance(word.value, list)
        for path in map(str, word.value)
    ]
    return [local_path(path) for path in named if is_local(path) and "://" not in path]
