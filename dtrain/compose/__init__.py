"""Words -> Config: composed once, in the parent; ranks never import it.

Every word is judged before anything is composed, and what is wrong with the rest of the run is told with it. Recipes
are flattened into words that come before the user's own; whoever picks another word of a group, or another `_target_`,
also drops the arguments a recipe gave to the old one. Words of ours are composed here, as Hydra would; with folders of
the user's own, Hydra does it (dtrain/compose/hydra.py).
"""

import re
from collections.abc import Iterable, Sequence

from dtrain import recipe, secrets
from dtrain.cluster import detect
from dtrain.compose import here, provenance
from dtrain.compose.check import judge, shown
from dtrain.compose.tree import config_of, vocabulary_of
from dtrain.compose.typed import typed
from dtrain.config.schema import GROUPS, LISTS, Config, of_scope
from dtrain.config.word import Word, cut
from dtrain.errors import DtrainError, WordsError
from dtrain.recipe import policy
from dtrain.resolve import further
from dtrain.resolve.deciding import deciding
from dtrain.resolve.unknown import UNKNOWN
from dtrain.secrets import screen
from dtrain.storage import options
from dtrain.storage.store import is_local, local_path

REPEATED = ("recipe", "hydra.searchpath")
"""Words of which several stand beside each other."""


@deciding()
def compose(words: Sequence[str], *, run: str | None = None) -> Config:
    """The words, and before them those of the run at URL `run`, as one typed Config.

    Raises WordsError with every mistake found; when there is one, also with those of the rules of resolve over what is
    left.
    """
    asked, problems = typed(words)
    found = here.look()
    asked, problems = [*found.words, *asked], [*found.problems, *problems]
    problems += [
        f"{shown(word)}: of Hydra's own words only hydra.searchpath is taken here, and with -m hydra/launcher and "
        "hydra/sweeper."
        for word in asked
        if word.key.startswith("hydra") and word.key != "hydra.searchpath"
    ]
    asked = [word for word in asked if not word.key.startswith("hydra") or word.key == "hydra.searchpath"]
    problems += options.tell(
        asked, next((str(word.value) for word in reversed(asked) if word.key == "out" and word.value), None)
    )
    written = recipe.of_run(run, said={word.key for word in asked}) if run else []
    written = [word for word in written if word.key.split(".")[0] not in of_scope("mesh") and not _not_needed(word)]
    said = [*written, *_with_recipes(asked, problems)]
    settled = _settle(said)
    vocabulary = vocabulary_of(_searchpath(asked, problems), settled)
    judged = {
        word.key: [
            *provenance.untold([word]),
            *judge(word, vocabulary),
            *_from_elsewhere(word, settled, said, foreign=vocabulary.foreign),
        ]
        for word in settled
    }
    problems += [problem for found in judged.values() for problem in found]
    config = config_of([word for word in settled if not judged[word.key]], vocabulary, problems)
    problems += policy.reaches([word for word in settled if not judged[word.key]], provenance.asked(config))
    config = provenance.noted(config, said, settled)
    if problems:
        for group in GROUPS:
            if judged.get(group):
                setattr(config, group, UNKNOWN)
                config.choices[group] = UNKNOWN
        raise WordsError(*dict.fromkeys([*problems, *further(config, detect())]))
    return config


def said_again(words: Sequence[str]) -> Iterable[str]:
    """One sentence for each key of which a person says several values. The last counts, as scripts that add words to
    others need it.
    """
    said: dict[str, dict[str, None]] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and key not in REPEATED and not key.startswith("-"):
            values = said.setdefault(key.strip(), {})
            values.pop(value, None)  # the last one is to stand last
            values[value] = None
    for key, values in said.items():
        if len(values) > 1:
            *before, last = (cut(secrets.redact_arg(f"{key}={value}")) for value in values)
            yield f"{', '.join(before[:3])} (command line): said again, {last} counts."


def connect(words: Sequence[str], url: str) -> None:
    """Tell the storage of `url` the out_options among the words, before anything is read there. Raises WordsError."""
    problems = options.tell(typed(words)[0], url)
    if problems:
        raise WordsError(*problems)


def value_of(words: Sequence[str], key: str) -> str | None:
    """The last value of `key` among plain words, before anything is composed."""
    found = [word.value for word in typed(words)[0] if word.key == key]
    return None if not found or found[-1] is None else str(found[-1])


def _with_recipes(asked: list[Word], problems: list[str]) -> list[Word]:
    """The words of the recipes, in the order they were named, then everything else."""
    written: list[Word] = []
    said = {word.key for word in asked}
    for name in [
        name
        for word in asked
        if word.key == "recipe"
        for name in (word.value if isinstance(word.value, list) else [word.value])
    ]:
        try:
            written += recipe.read(str(name), said=said)
        except DtrainError as error:
            problems += getattr(error, "problems", (str(error),))
    return written + [word for word in asked if word.key != "recipe"]


def _from_elsewhere(word: Word, settled: Sequence[Word], said: Sequence[Word], *, foreign: bool) -> Iterable[str]:
    """Words that a recipe may not say from its place, those that a person chose again included, as their arguments
    stay.
    """
    if word.place is not None:
        yield from policy.refused(word, word.place)
        yield from policy.borrowed(word, settled, said, foreign=foreign)


def _settle(words: list[Word]) -> list[Word]:
    """The last word wins; what was said about a choice that lost is dropped with it."""
    final: list[Word] = []
    for word in words:
        group = word.key.removesuffix("._target_")
        replaces = word.key in GROUPS or word.key.endswith("._target_")
        again = any(old.key == word.key and old.value == word.value for old in final)
        lost = [
            old
            for old in final
            if replaces and not again and _place(old) != _place(word) and old.key.startswith(f"{group}.")
        ]
        lost = [
            old for old in lost if old.value != "???" or word.key not in GROUPS
        ]  # what a recipe leaves open stays open
        final = [
            old for old in final if old.key != word.key and old not in lost and (old.key != group or old.value != "???")
        ] + [word]
    return [word for word in final if word.key != "hydra.searchpath"]


def _place(word: Word) -> str:
    """Where it was said, without the line."""
    return re.sub(r":\d+$", "", word.source)


def _searchpath(asked: Sequence[Word], problems: list[str]) -> list[str]:
    """The user's own folders of words."""
    found: list[str] = []
    for word in asked:
        if word.key == "hydra.searchpath":
            if isinstance(word.value, list) and all(isinstance(path, str) for path in word.value):
                found += word.value
            else:
                instead = screen.typed(f"{word.key}=[{cut(word.text) or '<folder>'}]")
                problems.append(f"{shown(word)}: a list of folders. Type {instead}.")
    absent = [path for path in found if is_local(path) and not local_path(path).is_dir()]
    problems += [
        f"hydra.searchpath=[{cut(path)}]: there is no such folder." for path in absent if not path.startswith("pkg://")
    ]
    return [path for path in found if path not in absent]


def _not_needed(word: Word) -> bool:
    """The secret of a logger or hook, which a verb that looks at a run has no use for."""
    return word.key.split(".")[0] in LISTS and any(secrets.places(word.value, word.key))
