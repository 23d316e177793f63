"""`dtrain new <name>`: a small project of your own in a new folder: a model, a dataset, words, a recipe, a test.

dtrain new mypkg
cd mypkg
python -m dtrain recipe=mypkg/train.yaml
python -m pytest
"""

import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from dtrain.config import files
from dtrain.config.word import cut
from dtrain.errors import PreflightError, WordsError, why
from dtrain.secrets import screen

TEMPLATE = "mypkg"
"""Name of the project that is copied."""


def run(words: Sequence[str]) -> int:
    """Copy the project. Raises WordsError for a name that is taken or cannot be imported, PreflightError if the folder
    cannot be written.
    """
    if len(words) != 1:
        raise WordsError("new takes one name. Type dtrain new mypkg.")
    name, target = words[0], Path(words[0])
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise WordsError(f"new {cut(name)}: a package name consists of letters, digits and _, such as mypkg.")
    if name in sys.stdlib_module_names or name in ("dtrain", "torch", "numpy", "tests"):
        raise WordsError(f"new {name}: import {name} would find another package. Type another name.")
    if target.exists():
        raise WordsError(f"new {name}: there is a {name} in this folder already. Type another name.")
    source = files.folder("project")
    try:
        for path in sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            place = target / str(path.relative_to(source)).replace(TEMPLATE, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(path.read_text("utf-8").replace(TEMPLATE, name), "utf-8")
    except OSError as error:
        raise PreflightError(f"new {name}: cannot be written here: {why(error)}.") from error
    screen.say(f"{name}/ is a project of your own; its README.md has the commands. Type cd {name}, then")
    screen.say(f"python -m dtrain recipe={name}/train.yaml")
    return 0
