"""The recipe of a project that was given away: in a folder, a zip file or an installed package. Nothing of it is run.

dtrain plan recipe=pkg://moons trust=[moons]      # after pip install git+https://host/moons
dtrain plan recipe=moons.zip trust=[moons]        # after pip install moons.zip
"""

import io
import re
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from dtrain.config import files
from dtrain.config.schema import Schema
from dtrain.config.word import cut
from dtrain.errors import StoreError, WordsError
from dtrain.recipe.document import Slip, parse
from dtrain.secrets import masked, screen
from dtrain.storage import store

PACKAGE = "pkg://"
LISTED = Path("recipes")
"""A folder of the working folder whose recipes go by their names, as `dtrain recipes` lists them."""
MEMBER = re.compile(r"(.*?\.zip(?:\?[^/]*)?)(?:/(.+))?")
LARGEST, LARGEST_ZIP = 1 << 20, 64 << 20
"""Most bytes of a recipe, and of a zip file with one."""
PACE = 1 << 18
"""Bytes a second of a zip file that arrives."""
ENDS = (".yaml", ".yml")
DEEPEST, MOST = 3, 200
"""Levels of folders with recipes, and files that are looked at."""
OURS = {"defaults", "recipe", *(field.name for field in fields(Schema))}
"""Top-level keys of a recipe."""
RUN, PLAN = "config.yaml", "plan.yaml"
"""The recipe of a run, and the file beside it that tells a run."""


def beside() -> dict[str, Path]:
    """Name -> path of each recipe in the folder `recipes` of the working folder, unless it is dtrain's own."""
    here = LISTED.is_dir() and not LISTED.samefile(files.folder("recipes"))
    return {path.stem: path for path in sorted(LISTED.iterdir()) if path.suffix in ENDS} if here else {}


def in_package(name: str) -> Path:
    """The folder or file of `pkg://<package>/<path>`, which is not imported. Raises WordsError if it is not here."""
    package, _, rest = name.removeprefix(PACKAGE).partition("/")
    folder = home_of(package)
    if folder is None:
        raise WordsError(
            f"recipe={cut(name)}: there is no package {cut(package)} here. Type pip install <its folder, zip file or "
            "git+https:// address>."
        )
    return folder / rest


def home_of(package: str) -> Path | None:
    """The folder of a package, which is not imported; None if it is not here."""
    try:
        spec = find_spec(package) if package.isidentifier() else None
    except ValueError:  # a module without a spec, such as __main__
        return None
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def in_folder(folder: Path) -> Path:
    """The recipe in a folder: config.yaml of a run, or else the only one. Raises WordsError."""
    if (folder / RUN).is_file():
        return folder / RUN
    levels = (folder.glob(f"{'*/' * depth}*.y*ml") for depth in range(DEEPEST))
    paths = [path for level in levels for path in islice(level, MOST) if not (path.parent / PLAN).exists()]
    contents = dict[str, bytes]()
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            contents[path.relative_to(folder).as_posix()] = file.read(LARGEST)
    return folder / _only(_recipes(contents), str(folder), "a folder")


def in_site(name: str) -> str | None:
    """The URL of config.yaml, if `name` is the URL of a folder of a run; a file ends in .yaml, or has none below it.
    Raises WordsError for the best job of a sweep on the web.
    """
    plain, mark, query = name.partition("?")
    plain = plain.rstrip("/")
    if plain.endswith(ENDS):
        return None
    url = f"{plain}/{RUN}{mark}{query}"
    if _is_there(url):
        return url
    root = plain.removesuffix("/best")
    if root != plain and _is_there(f"{root}/sweep.yaml{mark}{query}"):
        raise WordsError(
            f"recipe={cut(masked(name))}: the best job is found among the folders of a sweep, which the web does not "
            f"list. Type dtrain sweep best <its folder or bucket> where it lies, then recipe={cut(masked(root))}/<that "
            "job>."
        )
    return None


def _is_there(url: str) -> bool:
    """Whether a mapping in YAML can be read at a URL; some servers have a page for every address."""
    try:
        return isinstance(parse(store.small(url, LARGEST)).value, dict)
    except (StoreError, Slip):
        return False


def in_zip(name: str) -> tuple[str, str] | None:
    """(URL of the zip file, recipe in it), if `name` is a zip file or a file in one. Raises WordsError, StoreError."""
    match = MEMBER.fullmatch(name)
    if match is None or (match[2] and store.is_local(match[1]) and not store.local_path(match[1]).is_file()):
        return None
    _, contents = unpacked(match[1])
    if match[2]:
        if match[2] not in contents:
            names = ", ".join(_recipes(contents)[:MOST]) or "no recipe"
            raise WordsError(f"recipe={cut(masked(name))}: the zip file holds no {cut(match[2])}. It has {names}.")
        return match[1], match[2]
    return match[1], RUN if RUN in contents else _only(_recipes(contents), match[1], "a zip file")


@cache
def unpacked(url: str) -> tuple[str, Mapping[str, bytes]]:
    """(SHA-256, path -> bytes of each YAML file near the top) of a zip file, without the folder that holds everything
    in it. It is read once. Raises WordsError and StoreError.
    """
    data = store.small(url, LARGEST_ZIP + 1, pace=PACE)
    if len(data) > LARGEST_ZIP:
        raise WordsError(f"recipe={masked(url)}: larger than {LARGEST_ZIP >> 20} MiB, the limit for a zip file.")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
            tops = {entry.filename.partition("/")[0] for entry in entries}
            top = f"{tops.pop()}/" if len(tops) == 1 else ""
            named = {entry.filename.removeprefix(top): entry for entry in entries if entry.file_size <= LARGEST}
            near = [name for name in named if name.endswith(ENDS) and name.count("/") < DEEPEST]
            runs = {_folder(name) for name in near if name.endswith(f"/{PLAN}")}
            near.sort(key=lambda name: (_folder(name) in runs, not name.endswith(PLAN)))
            return sha256(data).hexdigest(), {name: _read(file, named[name]) for name in near[:MOST]}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:  # RuntimeError: it is encrypted
        raise WordsError(f"recipe={masked(url)}: not a zip file that can be read: {error}.") from error


def _read(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The file says its own size, and may lie."""
    with file.open(entry) as opened:
        return opened.read(LARGEST)


def _recipes(contents: Mapping[str, bytes]) -> list[str]:
    """The paths of recipes among YAML files, without those of runs: mappings whose keys are words."""
    shown = [name for name in sorted(contents) if not name.startswith(".") and "/." not in name]
    shown = [name for name in shown if f"{_folder(name)}{PLAN}" not in contents]
    return [name for name in shown if name != str(files.FILE) and _is_recipe(contents[name])]


def _folder(name: str) -> str:
    """The folder of a file, with its slash."""
    return name[: name.rfind("/") + 1]


def _is_recipe(data: bytes) -> bool:
    try:
        document = parse(data).value
    except Slip:
        return False
    return isinstance(document, dict) and bool(document) and {key.split(".")[0] for key in document} <= OURS


def _only(names: Collection[str], place: str, kind: str) -> str:
    """The only name. Raises WordsError."""
    shown = masked(place)
    if not names:
        raise WordsError(
            f"recipe={shown}: {kind} without a recipe, which is a YAML file of words such as steps: 100. Type "
            "recipe=<file>."
        )
    if len(names) > 1:
        typed = ", ".join(screen.typed(f"recipe={shown}/{name}") for name in names)
        raise WordsError(f"recipe={shown}: {kind} with several recipes. Type one of {typed}.")
    return next(iter(names))
