"""Words -> Config: composed once, in the parent; ranks never import it.

All words are checked before anything is composed, and their mistakes are reported together with those of the rest of
the run. Recipes become words that come before the user's own; choosing another word of a group, or another `_target_`,
also drops the arguments that a recipe gave to the old one. Words of conf/ are composed here, as Hydra would; with
folders of the user's own, Hydra composes them (dtrain/compose/hydra.py).
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import yaml

from dtrain import recipe, secrets
from dtrain.build import GIVEN
from dtrain.cluster import detect
from dtrain.compose import here, layers, provenance
from dtrain.compose.check import Vocabulary, is_moot, judge, shown
from dtrain.compose.tree import config_of, vocabulary_of
from dtrain.compose.typed import typed, unlisted
from dtrain.config import meaning
from dtrain.config.period import COUNTED, EPOCH
from dtrain.config.schema import GROUPS, LISTS, WORDS, Config, of_scope
from dtrain.config.word import Word, cut, spelling, text
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.recipe import policy
from dtrain.recipe.locate import of_best
from dtrain.resolve import further
from dtrain.resolve.deciding import deciding
from dtrain.resolve.unknown import UNKNOWN
from dtrain.storage import options, store

LENGTHS = {"steps": "epochs", "epochs": "steps"}
"""Key -> the one that says the same in another unit."""
HOLDOUT = "data.holdout"
"""The part that is held out, unless data.holdout_dataset or data.holdout_path has the held-out data."""
REPEATED = ("recipe", "hydra.searchpath")
"""Words that may be given several times and all count."""


@deciding()
def compose(words: Sequence[str], *, run: str | None = None, brought: Collection[str] = ()) -> Config:
    """The words as one typed Config; the words of the run at URL `run` come before them. `brought`: keys whose
    `_target_` names the same part as that of the run, which keeps its arguments.

    Raises WordsError with every mistake; if there is one, also with the mistakes that the rules of resolve find in the
    rest.
    """
    asked, problems = typed(words)
    local = here.look()
    asked, problems = [*local.words, *asked], [*local.problems, *problems]
    problems += [
        f"{shown(word)}: of Hydra's own words, only hydra.searchpath is allowed; with -m also hydra/launcher and "
        f"hydra/sweeper.{meaning.hint(meaning.meant(word.key, word.text))}"
        for word in asked
        if word.key.startswith("hydra") and word.key != "hydra.searchpath"
    ]
    asked = [word for word in asked if not word.key.startswith("hydra") or word.key == "hydra.searchpath"]
    problems += options.tell(
        asked, next((str(word.value) for word in reversed(asked) if word.key == "out" and word.value), None)
    )
    written = recipe.of_run(run, overridden={word.key for word in asked}) if run else []
    written = [word for word in written if word.key.split(".")[0] not in of_scope("mesh") and not _not_needed(word)]
    written = _with_steps(written, run)
    written = _renamed(written, [word for word in asked if word.key in [f"{key}._target_" for key in brought]])
    given = _with_one_space([*written, *_with_recipes(asked, problems)])
    settled = _settle(given)
    vocabulary = vocabulary_of(here.searchpath(asked, problems), settled)
    settled = [word for word in settled if not is_moot(word, vocabulary)]
    judged = dict[str, list[str]]()
    for word in settled:
        judged.setdefault(word.key, []).extend(
            [
                *provenance.untold([word]),
                *judge(word, vocabulary),
                *_into_a_list(word, settled),
                *_from_elsewhere(word, settled, given, foreign=vocabulary.foreign),
            ]
        )
    problems += [problem for reasons in judged.values() for problem in reasons]
    config = config_of([word for word in settled if not judged[word.key]], vocabulary, problems)
    problems += policy.reaches([word for word in settled if not judged[word.key]], provenance.asked(config))
    config = provenance.noted(config, given, settled)
    problems += provenance.spilt(config, settled)
    if problems:
        for group in GROUPS:
            if judged.get(group):
                setattr(config, group, UNKNOWN)
                config.choices[group] = UNKNOWN
        raise WordsError(*dict.fromkeys([*problems, *further(config, detect())]))
    return config


def with_spaces(asked: Sequence[Word]) -> list[Word]:
    """The typed words of a sweep, before them what its recipes say under `sweep`: a word of several values for each key
    of a space that no later word sets. Raises WordsError.
    """
    problems = list[str]()
    single = [word for word in asked if not (word.key == "recipe" and word.sweep)]
    given = [
        _axis(word, problems) if word.key.startswith(policy.SPACE) else word for word in _with_recipes(single, problems)
    ]
    if problems:
        raise WordsError(*problems)
    settled = [word for word in _settle(given) if word.place and (word.sweep or word.key.startswith("sweep."))]
    return [*settled, *asked]


def _with_steps(written: list[Word], run: str | None) -> list[Word]:
    """The words of a run, whose epochs were steps of data that need not be here; it is read, so no period counts."""
    if run is None:
        return written
    written = [word for word in written if not (word.key in COUNTED and word.value == EPOCH)]
    if all(word.key != "epochs" or word.value is None for word in written):
        return written
    try:
        known = yaml.safe_load(store.read(store.join(run, "plan.yaml")))["steps"]
    except (StoreError, yaml.YAMLError, TypeError, KeyError):
        return written
    others = [word for word in written if word.key not in ("epochs", "steps")]
    return [*others, *(replace(word, key="steps", value=known) for word in written if word.key == "epochs")]


def _renamed(written: list[Word], targets: Sequence[Word]) -> list[Word]:
    """The words of a run whose parts have other names here: an object of a script has a label, `of`, instead."""
    keys = {word.key for word in targets}
    labelled = [word.key for word in written if word.key in keys and word.value == GIVEN]
    labels = [key.replace("_target_", "of") for key in labelled]
    return [*targets, *(word for word in written if word.key not in (*keys, *labels))]


def _axis(word: Word, problems: list[str]) -> Word:
    """A key of a recipe's space as a word of several values: `value` is their list, or None where `text` says them. A
    mistake in it is added to `problems`.
    """
    key, values = word.key.removeprefix(policy.SPACE), word.value
    if not isinstance(values, list):
        read = typed([f"{key}={values}"])[0] if isinstance(values, str) else []
        if read and read[0].sweep:
            return replace(read[0], source=word.source, place=word.place)
        problems += unlisted(replace(word, key=key), str(values))
        values = [read[0].value if read else values]
    return replace(word, key=key, value=values, text=",".join(map(spelling, values)) or "[]", sweep=True)


def _with_one_space(words: Sequence[Word]) -> list[Word]:
    """The words, with the keys of a space as one word: only a sweep reads them."""
    axes = [word for word in words if word.key.startswith(policy.SPACE)]
    space = {word.key.removeprefix(policy.SPACE): word.value for word in axes}
    others = [word for word in words if word not in axes]
    return [*others, replace(axes[0], key="sweep.space", value=space, text=text(space))] if axes else others


def said_again(words: Sequence[str]) -> Iterable[str]:
    """A note for each key given several times with different values. The last one counts, as in scripts that append
    words.
    """
    given: dict[str, dict[str, None]] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and key not in REPEATED and not key.startswith("-"):
            values = given.setdefault(key.strip(), {})
            values.pop(value, None)  # so that the last one comes last
            values[value] = None
    for key, values in given.items():
        if len(values) > 1:
            *before, last = (cut(secrets.redact_arg(f"{key}={value}")) for value in values)
            yield f"{', '.join(before[:3])} (command line): given more than once, {last} counts."


def connect(words: Sequence[str], url: str) -> None:
    """Pass the out_options among the words to the storage of `url`, before anything is read there. Raises
    WordsError.
    """
    problems = options.tell(typed(words)[0], url)
    if problems:
        raise WordsError(*problems)


def run_at(words: Sequence[str], url: str) -> str:
    """The URL of the run or checkpoint that `url` means: of `<sweep>/best`, that of the job, of `<run>/best`, that of
    its best checkpoint. The out_options among the words are passed on. Raises WordsError and StoreError.
    """
    connect(words, url)
    return _named(url)


def _named(url: str) -> str:
    plain = url.rstrip("/")
    if not plain.endswith("/best"):
        return url
    from dtrain.storage.attempts import BEST, best_at

    job = of_best(plain).removesuffix("/config.yaml")
    best = best_at(f"{_named(plain.removesuffix(BEST))}{BEST}") if job == plain else None
    return best.url if best else job


def own_words(words: Sequence[str], problems: list[str]) -> here.Own:
    """The words of the user's own that a run with these words can be given; mistakes in the names of their folders are
    added to `problems`.
    """
    named = [word for word in words if word.startswith(("hydra.searchpath=", "trust="))]
    given = [*here.look().words, *typed(named)[0]]
    return here.own_words(here.folders(here.searchpath(given, problems)))


def vocabulary(words: Sequence[str]) -> Vocabulary:
    """The vocabulary of a run with these words, without its recipes: of conf/, and of the folders of its own."""
    given = [*here.look().words, *typed(words)[0]]
    return vocabulary_of(here.searchpath(given, []), given)


def value_of(words: Sequence[str], key: str) -> str | None:
    """The last value of `key` among the words, before anything is composed; a mapping as JSON."""
    value = next((word.value for word in reversed(typed(words)[0]) if word.key == key), None)
    if isinstance(value, Mapping):
        return json.dumps(value)
    return None if value is None else str(value)


def _with_recipes(asked: list[Word], problems: list[str]) -> list[Word]:
    """The words of the recipes, in the order in which they were named, then all other words."""
    written: list[Word] = []
    given = {word.key for word in asked} - {"recipe"}
    for name in [
        name
        for word in asked
        if word.key == "recipe"
        for name in (word.value if isinstance(word.value, list) else [word.value])
    ]:
        try:
            written += recipe.read(str(name), overridden=given)
        except DtrainError as error:
            problems += getattr(error, "problems", (str(error),))
    return written + [word for word in asked if word.key != "recipe"]


def _from_elsewhere(word: Word, settled: Sequence[Word], given: Sequence[Word], *, foreign: bool) -> Iterable[str]:
    """Why a recipe from its place may not give this word, even if the user chose the same part again, since the
    arguments stay.
    """
    if word.place is not None:
        yield from policy.refused(word, word.place)
        yield from policy.borrowed(word, settled, given, foreign=foreign)


def _into_a_list(word: Word, settled: Sequence[Word]) -> Iterable[str]:
    """Why a word may not set an item of a list that another word gives: it would take the place of the whole list."""
    for other in settled:
        rest = word.key.removeprefix(f"{other.key}.")
        if isinstance(other.value, list) and other.key not in GROUPS and rest != word.key and rest[0].isdecimal():
            yield f"{shown(word)}: {other.key} ({other.source}) is a list, which is typed whole: {other.key}=[...]."


def _settle(words: list[Word]) -> list[Word]:
    """The last word for each key; the arguments of a replaced choice are dropped."""
    final: list[Word] = []
    for word in words:
        group = word.key.removesuffix("._target_")
        replaces = not word.sweep and (word.key in GROUPS or word.key.endswith("._target_"))
        chosen = [old for old in final if old.key in (group, f"{group}._target_")]
        again = any(old.key == word.key and old.value == word.value for old in chosen)
        again = again or (not chosen and word.value == WORDS.get(word.key))
        lost = [
            old
            for old in final
            if replaces
            and (not again or policy.is_closed(replace(old, key=group)))  # where it runs is the user's to say
            and layers.source_file(old) != layers.source_file(word)
            and old.key.startswith(f"{group}.")
        ]
        # required values of a recipe stay required
        lost = [old for old in lost if old.value != "???" or word.key not in GROUPS]
        final = [
            old
            for old in final
            if (old.key != word.key or _adds(old, word))
            and old not in lost
            and (old.key != group or old.value != "???")
        ] + [word]
    given = {word.key for word in final if word.value not in ("???", None)}
    answered = {key for key, other in LENGTHS.items() if other in given}
    answered |= {HOLDOUT for key in given if key.startswith(f"{HOLDOUT}_")}
    final = [word for word in final if word.value != "???" or word.key not in answered]
    return [word for word in final if word.key != "hydra.searchpath"]


def _adds(old: Word, new: Word) -> bool:
    """Whether a word counts beside another one of its key, of a recipe: a mapping adds its names, null removes one."""
    both = isinstance(old.value, dict) and isinstance(new.value, dict)
    removes = new.value is None and layers.is_pattern(new.key)
    return (both or removes) and layers.source_file(old) != layers.source_file(new)


def _not_needed(word: Word) -> bool:
    """Whether the word is the secret of a logger or hook, which verbs that only read a run do not need."""
    return word.key.split(".")[0] in LISTS and any(secrets.places(word.value, word.key))
