"""`dtrain recipes [folder or URL]`: lists recipes, each with its description, requirements and expected figures. No
code of a recipe is run.

dtrain recipes                      the recipes of dtrain, and those in ./recipes
dtrain recipes s3://bucket/shared   the recipes in a folder or bucket
dtrain recipes check mine.yaml      whether its words are right, and what of it would be run
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.compose.provenance import asked
from dtrain.config.files import folder, recipes
from dtrain.config.schema import Config
from dtrain.config.trust import allowed
from dtrain.config.word import quote
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.recipe.document import Slip, parse
from dtrain.recipe.expect import BANDS, band
from dtrain.recipe.locate import SECONDS, fetch, find, story
from dtrain.resolve import further
from dtrain.resolve.unknown import UNKNOWN
from dtrain.secrets import masked, screen
from dtrain.storage import store
from dtrain.verb.plan import commands_in

HERE = "recipes"
MOST = 200
"""Most recipes that are read from one folder."""


def run(words: Sequence[str]) -> int:
    if words[:1] == ["check"]:
        return _check(words[1:])
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


def _check(names: Sequence[str]) -> int:
    """Judge each recipe, and say what of it is code. The exit code is that of the worst."""
    if not names or any("=" in name and "://" not in name for name in names):
        raise WordsError("recipes check takes recipes. Type dtrain recipes check <path, URL or name>.")
    code = 0
    for name in names:
        try:
            lines = list(_judged(compose([f"recipe={quote(name)}"])))
        except DtrainError as error:
            code = max(code, error.exit_code)
            for problem in getattr(error, "problems", (str(error),)):
                screen.complain(problem)
            continue
        screen.say(f"{screen.on_one_line(name)}: its words are right", *(f"  {line}" for line in lines))
    return code


def _judged(config: Config) -> Iterator[str]:
    """Words that must be typed beside a recipe, and words of it that are code. Raises WordsError with its mistakes."""
    values = asked(config)
    targets = {key: str(value) for key, value in values.items() if key.endswith("._target_")}
    strange = {key: name for key, name in targets.items() if not allowed(name, key.split(".")[0], ())}
    missing = [key for key, value in values.items() if value == "???"]
    for key in (*strange, *missing):
        setattr(config, key.split(".")[0], UNKNOWN)
    if problems := further(config, detect()):
        raise WordsError(*problems)
    yield from (f"{key}=<value> must be typed" for key in missing)
    yield from (f"code: {sentence}" for sentence in commands_in(config))
    for key, name in strange.items():
        package = name.partition(".")[0]
        yield f"code: {key}={screen.on_one_line(name)}, for which trust=[{package}] must be typed"


def _in(place: str) -> list[str]:
    """The recipes in a folder, as values of `recipe=`. Raises StoreError if there are none."""
    with store.patience(SECONDS):
        names = [name for name in store.children(place) if name.endswith((".yaml", ".yml"))]
    if not names:
        raise StoreError.during("find recipes in", place, "there is no .yaml file")
    return [store.join(place, name) for name in names[:MOST]]


def _about(name: str) -> Iterable[str]:
    """The description of a recipe, then its requirements and expected figures; or why it cannot be read."""
    try:
        place = find(name)
        data = fetch(place)
        document = parse(data).plain()
    except Slip as slip:
        return [f"cannot be read: line {slip.line}: {slip}"]
    except DtrainError as error:
        return [f"cannot be read: {error}"]
    keys = document if isinstance(document, dict) else {}
    facts = [*_required(keys.get("requires")), *_expected(keys.get("expect"))]
    return [
        masked(story(data.decode(errors="replace"))) or "(no description)",
        *([" · ".join(facts)] if facts else []),
    ]


def _required(requires: Any) -> Iterable[str]:
    if isinstance(requires, Mapping):
        needs = [
            *map(str, requires.get("versions") or []),
            *(f"{requires['gpus']} GPU(s)" for _ in "1" if requires.get("gpus")),
        ]
        needs += [f"{requires['memory']} GiB" for _ in "1" if requires.get("memory")]
        if needs:
            yield f"needs {', '.join(needs)}"


def _expected(expect: Any) -> Iterable[str]:
    if isinstance(expect, Mapping):
        at = f" at step {expect['step']}" if expect.get("step") else ""
        for name in BANDS:
            if expect.get(name):
                yield f"{name} {band(expect[name])}{at}"
