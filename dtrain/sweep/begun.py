"""A sweep that another command began, read from its sweep.yaml: `dtrain sweep work s3://bucket/s`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.compose import with_spaces
from dtrain.compose.check import shown
from dtrain.compose.typed import typed
from dtrain.config.word import Word, spelling
from dtrain.errors import StoreError, WordsError
from dtrain.recipe import is_overridden, policy
from dtrain.recipe.locate import find
from dtrain.secrets import screen
from dtrain.sweep import folder, space, study
from dtrain.sweep.jobs import Request, is_private, names_of, unsweepable
from dtrain.sweep.space import Axis, Choices


def again(root: str, more: Sequence[str]) -> list[Request]:
    """The sweep at URL `root`, a request for each of its spaces. `more`: settings, and the words that no file gives:
    secrets, options of storage, trust. Its words have the rights of a recipe at that place, as whoever wrote it need
    not be whoever reads it; what it says and may not say is typed with the same value. Raises WordsError, and
    StoreError if there is no sweep.
    """
    there, place = folder.read(root), find(f"{root}/sweep.yaml")
    if there is None:
        raise StoreError.during("find a sweep at", root, "it has no sweep.yaml")
    added, problems = typed(more)
    written, wrong = typed([f"{key}={text}" for key, text in there.words.items()])
    fixed = {word.key: word.value for word in written}
    repeated = {word.key for word in added if _repeats(word, fixed, there.spaces)}
    problems += [
        _stray(word, written)
        for word in added
        if word.key in study.KEYS
        or not (
            policy.is_left_to_type(word, place)
            or word.key.startswith("sweep.")
            or is_private(word)
            or word.key in repeated
        )
    ]
    written = [word for word in written if not is_overridden(word.key, {each.key for each in added})]
    words = [replace(word, source=str(place), place=place) for word in written]
    swept = [
        Word(key, value, spelling(value), str(place), place=place)
        for axes in there.spaces
        for key, values in axes.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    problems += [*wrong, *(problem for word in words for problem in policy.refused(word, place))]
    problems += [*unsweepable(swept), *policy.swept([word for word in swept if word.key not in repeated])]
    if problems:
        raise WordsError(*dict.fromkeys(problems))
    settings = tuple(word for word in added if word.key.startswith("sweep."))
    typed_again = (word for word in added if word not in settings and not word.sweep)
    written = [word for word in with_spaces(words) if word.key.startswith("sweep.")]
    looks_for, _ = typed([f"{key}={text}" for key, text in there.study.settings().items()])
    return [
        Request(
            root,
            (*words, *typed_again),
            (*written, *looks_for, *settings),
            tuple(_axis(key, values) for key, values in axes.items()),
            places=dict.fromkeys((*there.words, *axes), str(place)),
        )
        for axes in there.spaces
    ]


def _repeats(word: Word, fixed: Mapping[str, Any], spaces: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a typed word says what sweep.yaml says: of all jobs, or of a space."""
    if not word.sweep:
        return word.key in fixed and bool(fixed[word.key] == word.value)
    axis = space.axes([word], names_of, 0)[0].get(word.key)
    return any(word.key in axes and axis == _axis(word.key, axes[word.key]) for axes in spaces)


def _stray(word: Word, written: Sequence[Word]) -> str:
    """The sentence about a typed word that is not as sweep.yaml says it."""
    there = [f", or type it as it is there: {screen.typed(str(each))}" for each in written if each.key == word.key]
    return f"{shown(word)}: the words of a sweep are those of its sweep.yaml. Leave it out{''.join(there)}."


def _axis(key: str, values: Sequence[Any] | str) -> Axis:
    """The axis that sweep.yaml describes. Raises WordsError."""
    if isinstance(values, str):
        made, problems = space.axes([Word(key, None, values, "sweep.yaml", sweep=True)], names_of, 0)
        if problems:
            raise WordsError(*problems)
        return made[key]
    return Choices(key, tuple(values))
