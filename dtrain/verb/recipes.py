"""`dtrain recipes [folder or URL]`: the recipes at hand, each with its story, what it requires and what it gives.
Nothing of them is run.

dtrain recipes                      those that dtrain brings, and those in ./recipes
dtrain recipes s3://bucket/shared   those in a folder or bucket
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.config.files import folder, recipes
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.recipe.document import Slip, parse
from dtrain.recipe.expect import BANDS, band
from dtrain.recipe.locate import SECONDS, fetch, find, story
from dtrain.secrets import masked, screen
from dtrain.storage import store

HERE = "recipes"
MOST = 200
"""Recipes of a folder that are read."""


def run(words: Sequence[str]) -> int:
    wrong = [word for word in words if word.startswith("-") or ("=" in word and "://" not in word)]
    if wrong:
        raise WordsError(
            *(
                f"{word}: recipes takes folders and URLs. Type dtrain recipes, or dtrain recipes s3://bucket/shared."
                for word in wrong
            )
        )
    beside = Path(HERE).is_dir() and not Path(HERE).samefile(folder(HERE))
    names = [name for place in words for name in _in(place)] if words else [*recipes(), *(_in(HERE) if beside else [])]
    width = max(map(len, names))
    for name in names:
        first, *more = map(screen.on_one_line, _about(name))
        screen.say(f"{screen.on_one_line(name):<{width}}  {first}")
        for line in more:
            screen.say(f"{'':<{width}}  {line}")
    return 0


def _in(place: str) -> list[str]:
    """The names of the recipes in a folder, as `recipe=` takes them. Raises StoreError when there are none."""
    with store.patience(SECONDS):
        found = [name for name in store.children(place) if name.endswith((".yaml", ".yml"))]
    if not found:
        raise StoreError.during("find recipes in", place, "there is no .yaml file")
    return [store.join(place, name) for name in found[:MOST]]


def _about(name: str) -> Iterable[str]:
    """The story of a recipe, then what it says about itself; or why it cannot be read."""
    try:
        place = find(name)
        data = fetch(place)
        document = parse(data).plain()
    except Slip as slip:
        return [f"cannot be read: line {slip.line}: {slip}"]
    except DtrainError as error:
        return [f"cannot be read: {error}"]
    said = document if isinstance(document, dict) else {}
    told = [*_required(said.get("requires")), *_expected(said.get("expect"))]
    return [
        masked(story(data.decode(errors="replace"))) or "(says nothing about itself)",
        *([" · ".join(told)] if told else []),
    ]


def _required(said: Any) -> Iterable[str]:
    if isinstance(said, Mapping):
        needs = [*map(str, said.get("versions") or []), *(f"{said['gpus']} GPU(s)" for _ in "1" if said.get("gpus"))]
        needs += [f"{said['memory']} GiB" for _ in "1" if said.get("memory")]
        if needs:
            yield f"needs {', '.join(needs)}"


def _expected(said: Any) -> Iterable[str]:
    if isinstance(said, Mapping):
        at = f" at step {said['step']}" if said.get("step") else ""
        for name in BANDS:
            if said.get(name):
                yield f"{name} {band(said[name])}{at}"
